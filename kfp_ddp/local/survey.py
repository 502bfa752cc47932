"""Count the images of a source, before anything is copied."""

import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import is_relative, with_home
from kfp_ddp.core.text import plural, printable
from kfp_ddp.datasets.images import uneven
from kfp_ddp.datasets.names import apply
from kfp_ddp.datasets.options import MOST_ROWS, below, glob_of
from kfp_ddp.local.display import shown
from kfp_ddp.pictures.layout import Layout, lay_out
from kfp_ddp.pictures.reading import LayoutRule, Reading, is_image
from kfp_ddp.pictures.shards import Where, content
from kfp_ddp.pictures.sides import ARCHIVES, TEST, TRAIN, VAL, tables_in
from kfp_ddp.pictures.splits import read_tables
from kfp_ddp.pictures.tables import Labels
from kfp_ddp.plan.choice import SMALLEST, Photographs, cut_off, statistics_of
from kfp_ddp.storage.address import check_address
from kfp_ddp.storage.folder_source import LOST_AND_FOUND
from kfp_ddp.storage.kinds import open_source
from kfp_ddp.storage.listing import Filter, Listing
from kfp_ddp.storage.source import SourceOptions

_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
"""Bytes near the end of a complete file, and of a thumbnail in its header."""
_TAIL = 1 << 16
_THREADS = 16
_DECODED = 64 << 20
"""Bytes of images that are decoded, in some seconds; of more, each n-th image is."""
_ROWS = 20
"""Classes in the table."""
_WIDTH = 48
"""Columns of their names in the table."""
_EXAMPLES = 5
"""Classes with an example."""
_BROKEN = 8
"""Broken images in the list."""


def resolve_source(source: str) -> str:
    """Return the source as the pipeline needs it: the absolute path of an existing local folder."""
    source = with_home(source)
    check_address("source", source)
    if "://" in source and not source.startswith("file:"):
        return source
    folder = Path(open_source(source).root).absolute()  # type: ignore[attr-defined]
    if folder.suffix in ARCHIVES and folder.is_file():
        raise InputError(
            f"source {folder} is an archive: unpack it, and give the folder with the photographs"
        )
    if not folder.is_dir():
        what = "is no folder: give the one" if folder.exists() else "does not exist; give a folder"
        raise InputError(f"source {folder} {what} with a folder of photographs for each class")
    return str(folder)


@dataclass(frozen=True)
class Survey:
    """The images of a source."""

    photographs: Photographs
    table: tuple[str, ...]
    """Images of each class and split, a line each."""
    reading: tuple[str, ...]
    """The source of classes and splits, and an image of each class, a line each."""
    broken: dict[str, str]
    """Why images cannot be read, by their path."""
    excluded: tuple[str, ...]
    """Globs of files that the sync is to leave out: those that are not images, and broken ones."""

    @property
    def left_out(self) -> list[str]:
        """A title and the broken images; [] without them."""
        if not self.broken:
            return []
        count = len(self.broken)
        lines = [f"{plural(count, 'image')} left out that cannot be read"]
        for path, why in itertools.islice(self.broken.items(), _BROKEN):
            lines.append(f"  {printable(f'{shown(path)}: {why}')}")
        if count > _BROKEN:
            lines.append(f"  and {count - _BROKEN:,} more")
        return lines


class _Header(NamedTuple):
    """What the header of an image tells."""

    format: str
    width: int
    height: int
    deep: bool
    """Whether its values are of more than 8 bits."""


class _Opened(NamedTuple):
    """The images of a folder, as they were opened."""

    headers: Sequence[_Header] = ()
    """Of the readable images."""
    broken: Mapping[str, str] = MappingProxyType({})
    """Why others cannot be read, by their name."""
    step: int = 1
    """One of how many images was decoded."""

    def notes(self, reading: Reading) -> Iterator[str]:
        """Yield what the user should know of them."""
        if self.step > 1:
            count = len(self.headers) + len(self.broken)
            yield f"of {count:,} images 1 in {self.step:,} was decoded, of others the headers"
        deep = sum(header.deep for header in self.headers)
        if deep and not reading.value_range:
            yield (
                f"{plural(deep, 'image')} with more than 8 bits or fractions: without value_range, "
                "the largest value of a TIFF chooses its bits"
            )


def survey(source: str, arguments: Mapping[str, Any]) -> Survey:
    """Count the images of a source of `resolve_source`, as the pipeline will take them.

    Of a folder, read all headers. Raise KfpDdpError if the source cannot be read, what it holds
    cannot be trained on, or images are broken and on_bad_image is fail.
    """
    folder = None if "://" in source else Path(source)
    training = arguments.get("training", {})
    sync = dict(arguments.get("sync", {}))
    sync["exclude"] = below(source, sync.get("exclude", ()))
    tags = arguments.get("gate", {}).get("tags", "")
    rule = LayoutRule(**_fields_of(LayoutRule, training))
    reading = Reading(**_fields_of(Reading, training))

    selection = Filter(tuple(sync.get("include", ())), sync["exclude"])
    bucket = SourceOptions(
        requester_pays=sync.get("requester_pays", ""), label_column=sync.get("label_column", "")
    )
    everything = (
        list(_names(folder, sync)) if folder else open_source(source, bucket).listing().names
    )
    names = [name for name in everything if selection.selects(name)]
    labels = read_tables(folder, rule.labels, None) if folder else ()
    layout = lay_out(names, rule, labels=labels)
    notes = [*layout.notes, *_filter_notes(everything, names, sync)]
    _check_tags(tags, names, source)
    if not rule.labels:
        notes += _unused_table_notes(names, tags)

    opened = _open_all(folder, layout, reading) if folder else _Opened()
    notes += opened.notes(reading)
    broken = {str(Path(source) / name): why for name, why in opened.broken.items()}
    _check_readable(opened, broken, training)

    excluded: list[str] = []
    # A script of the user may read any file, and a bucket is not looked into.
    images_only = folder is not None and not training.get("script")
    if images_only and not sync.get("include"):
        excluded += _other_files(names, labels, tags)
    # An image that has a row in a table cannot be left out by the sync.
    can_leave_out = images_only and not labels
    if can_leave_out and 0 < len(broken) <= MOST_ROWS:
        excluded += map(glob_of, opened.broken)
        layout = _without(opened.broken, names, rule)
    _check_names(names, excluded, sync)

    counts = _count(layout, opened.broken)
    pictures = [header[:3] for header in opened.headers]
    short, decoding = statistics_of(pictures)
    notes += cut_off(pictures, reading.fit)
    notes += uneven(layout.classes, counts[TRAIN], counts[VAL])
    notes += _size_notes(training.get("image_size", 0), short)
    photographs = Photographs(
        train=sum(counts[TRAIN]),
        val=sum(counts[VAL]),
        classes=len(layout.classes),
        short_side=short,
        decoding=decoding,
        notes=tuple(map(printable, notes)),
    )
    table = tuple(_table(layout, counts))
    return Survey(photographs, table, tuple(_reading(layout)), broken, tuple(excluded))


def _fields_of(
    kind: type[LayoutRule] | type[Reading], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that are fields of a kind of record."""
    return {name: settings[name] for name in kind._fields if name in settings}


def _filter_notes(
    everything: Iterable[str], names: Iterable[str], sync: Mapping[str, Any]
) -> Iterator[str]:
    """Yield how many images the filters of the sync leave out, if any."""
    images = sum(map(is_image, everything))
    chosen = sum(map(is_image, names))
    if images > chosen:
        filters = " and ".join(name for name in ("include", "exclude") if sync.get(name))
        yield f"{images - chosen:,} of {images:,} images left out by {filters}"


def _check_tags(tags: str, names: Collection[str], source: str) -> None:
    """Raise InputError if the source lacks the table of tags, which has a path in it."""
    is_inside = bool(tags) and is_relative(tags)
    if is_inside and tags not in names:
        raise InputError(f"tags is {tags}, but {source} has no such file: correct it")


def _unused_table_notes(names: Iterable[str], tags: str) -> Iterator[str]:
    """Yield how to use the first table of the dataset, which may have the classes."""
    unused = next((table for table in tables_in(names) if table != tags), None)
    if unused is not None:
        yield f"{unused} is not used: if it has the classes, --set labels={unused}"


def _check_readable(
    opened: _Opened, broken: Mapping[str, str], training: Mapping[str, Any]
) -> None:
    """Raise InputError if no image can be read, or one cannot and on_bad_image is fail."""
    if not broken:
        return
    path, why = next(iter(broken.items()))
    if training.get("on_bad_image") == "fail":
        raise InputError(
            f"{plural(len(broken), 'image')} cannot be read, {shown(path)} ({why}) first: replace "
            "or remove them, or leave them out with --set on_bad_image=skip"
        )
    if not opened.headers:
        raise InputError(f"none of the images can be read: {why}")


def _count(layout: Layout, broken: Collection[str]) -> dict[str, list[int]]:
    """Return the readable images of each class, by split."""
    counts = {}
    for side, part in layout.parts.items():
        by_class = Counter(target for name, target in part if name not in broken)
        counts[side] = [by_class[number] for number in range(len(layout.classes))]
    return counts


def _size_notes(size: int, short: int) -> Iterator[str]:
    """Yield that the requested size is small for images with this short side."""
    if 0 < size < min(SMALLEST, short / 2):
        yield f"image_size={size} leaves little of images of {short} px"


def _check_names(names: Iterable[str], excluded: Sequence[str], sync: Mapping[str, Any]) -> None:
    """Raise InputError if the sync would refuse a name that it does not leave out."""
    listing = Listing()
    for name in names:
        listing.add(name, 0, 0)
    apply(Filter((), excluded).select(listing), sync.get("hostile_names", "error"))


def _other_files(names: Collection[str], labels: Iterable[Labels], tags: str) -> list[str]:
    """Return globs of the files that are neither images nor one of the tables."""
    tables = {tags, *(table.name for table in labels)}.intersection(names)
    kept = {"", *(Path(table).suffix for table in tables)}
    suffixes = {os.path.splitext(name)[1] for name in names} - kept
    globs = []
    for suffix in suffixes:
        # In a glob, these characters match names of other files, too.
        is_plain = set("*?").isdisjoint(suffix)
        if is_plain and not is_image(f"x{suffix}"):
            globs.append(f"*{suffix}")
    return sorted(globs)


def _without(broken: Mapping[str, str], names: Iterable[str], rule: LayoutRule) -> Layout:
    """Return the layout without the broken images; raise InputError if it cannot train."""
    folders = (f"{os.path.dirname(name)}/" for name in broken)
    readable = [name for name in names if name not in broken]
    try:
        everything = [*readable, *folders]
        return lay_out(everything, rule)
    except InputError as error:
        raise InputError(
            f"{plural(len(broken), 'image')} cannot be read, {next(iter(broken))} first; "
            f"without them {error}"
        ) from None


def _table(layout: Layout, by_side: Mapping[str, list[int]]) -> Iterator[str]:
    """Yield the images of each class and split as lines of at most 80 columns."""
    columns = dict(by_side)
    if not any(columns[TEST]):
        del columns[TEST]
    header = ("class", *columns)
    totals = ("all", *map(sum, columns.values()))
    rows = list(zip(map(printable, layout.classes), *columns.values(), strict=True))
    if len(rows) > _ROWS + 1:  # a line for one hidden class would save nothing
        hidden = rows[_ROWS:]
        _, *numbers = zip(*hidden, strict=True)
        rows[_ROWS:] = [(f"{len(hidden):,} more classes", *map(sum, numbers))]
    width = min(_WIDTH, max(len(row[0]) for row in (header, *rows)))
    for name, *cells in (header, *rows, totals):
        short = name if len(name) <= width else f"{name[: width - 1]}…"
        yield f"  {short:<{width}}{''.join(map(_cell, cells))}"


def _cell(value: int | str) -> str:
    text = f"{value:,}" if isinstance(value, int) else value
    return f"{text:>9}"


def _reading(layout: Layout) -> Iterator[str]:
    yield f"classes and splits: {printable(layout.form)}"
    first = {target: name for name, target in reversed(tuple(layout.train))}
    for target, label in enumerate(layout.classes[:_EXAMPLES]):
        yield printable(f"  {label}: {first.get(target, '')}")
    if len(layout.classes) > _EXAMPLES:
        yield "  …"


def _names(folder: Path, sync: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of all files below a folder, and of empty folders with a trailing slash."""
    links = sync.get("symlinks")
    follows = links == "follow"
    for place, folders, files in os.walk(folder, followlinks=follows):
        below = Path(place).relative_to(folder)
        is_root = not below.parts
        is_empty = not folders and not files
        if is_empty and not is_root:
            yield f"{below.as_posix()}/"
        if is_root and LOST_AND_FOUND in folders:
            folders.remove(LOST_AND_FOUND)
        if follows:
            folders[:] = _without_loops(Path(place), folders)
        for name in files:
            if links != "skip" or not Path(place, name).is_symlink():
                yield (below / name).as_posix()


def _without_loops(place: Path, folders: Iterable[str]) -> list[str]:
    """Return the folders without links to one above, which have no end; the sync refuses them."""
    above = {os.path.realpath(path) for path in (place, *place.parents)}
    return [name for name in folders if os.path.realpath(place / name) not in above]


def _open_all(folder: Path, layout: Layout, reading: Reading) -> _Opened:
    """Open the images of a layout; decode all, or a sample if they are many bytes."""
    names = [name for part in layout.parts.values() for name in part.names]
    with ThreadPoolExecutor(_THREADS) as pool:  # a network drive answers many at once
        size = sum(pool.map(lambda name: _size(folder / name), names))
        step = size // _DECODED + 1

        def open_one(index: int) -> _Header | str:
            return _open(folder / names[index], reading, complete=index % step == 0)

        results = dict(zip(names, pool.map(open_one, range(len(names))), strict=True))
    headers = []
    broken = {}
    for name, result in results.items():
        if isinstance(result, str):
            broken[name] = result
        else:
            headers.append(result)
    return _Opened(headers, broken, step)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _open(path: Path, reading: Reading, complete: bool) -> _Header | str:
    """Return the header of an image, or why it cannot be read, or decoded if `complete`."""
    from kfp_ddp.pictures import decoder

    try:
        if not path.is_file():
            return "it is not a file"
        with path.open("rb") as file:
            image = decoder.open_picture(file, reading)
            header = _Header(image.format or "", *image.size, decoder.is_deep(image))
            file.seek(max(file.tell(), path.stat().st_size - _TAIL))
            if complete or _ENDS.get(header.format, b"") not in file.read():
                decoder.decode(content(Where(str(path)), reading.most_bytes), reading)
            return header
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
