"""Count the images of a source, before anything is copied."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import is_relative
from kfp_ddp.core.text import plural, printable
from kfp_ddp.datasets.images import uneven
from kfp_ddp.datasets.names import apply
from kfp_ddp.datasets.options import MOST_ROWS, glob_of
from kfp_ddp.local.results import shown
from kfp_ddp.pictures.layout import Layout, LayoutRule, lay_out
from kfp_ddp.pictures.reading import Reading
from kfp_ddp.pictures.shards import Where, content
from kfp_ddp.pictures.sides import ARCHIVES, TEST, TRAIN, VAL, is_image, tables_in
from kfp_ddp.pictures.splits import read_tables
from kfp_ddp.plan.choice import SMALLEST, Photographs, statistics_of
from kfp_ddp.storage.address import check_address
from kfp_ddp.storage.folder_source import LOST_AND_FOUND
from kfp_ddp.storage.kinds import open_source
from kfp_ddp.storage.listing import Filter, Listing

_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
"""Bytes near the end of a complete file, and of a thumbnail in its header."""
_TAIL = 1 << 16
_THREADS = 16
_ROWS, _WIDTH, _EXAMPLES = 20, 48, 5
_DECODED = 64 << 20
"""Bytes of images that are decoded, in some seconds; of more, each n-th image is."""
_BROKEN = 8
"""Classes and columns of their names in the table, and broken images in the list."""


def resolve_source(source: str) -> str:
    """Return the source as the pipeline needs it: the absolute path of an existing local folder."""
    check_address("source", source)
    if "://" in source and not source.startswith("file:"):
        return source
    folder = Path(open_source(source).root).expanduser().absolute()  # type: ignore[attr-defined]
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
        count, some = len(self.broken), list(self.broken.items())[:_BROKEN]
        lines = [f"{plural(count, 'image')} left out that cannot be read"] if count else []
        lines += [f"  {printable(f'{shown(path)}: {why}')}" for path, why in some]
        return [*lines, f"  and {count - _BROKEN:,} more"] if count > _BROKEN else lines


def survey(source: str, arguments: Mapping[str, Any]) -> Survey:
    """Count the images of a source of `resolve_source`, as the pipeline will take them.

    Of a folder, read all headers. Raise KfpDdpError if the source cannot be read, what it holds
    cannot be trained on, or images are broken and on_bad_image is fail.
    """
    folder = None if "://" in source else Path(source)
    training, sync = arguments.get("training", {}), arguments.get("sync", {})
    selection = Filter(*(tuple(sync.get(name, ())) for name in ("include", "exclude")))
    everything = list(_names(folder, sync)) if folder else open_source(source).listing().names
    names = [name for name in everything if selection.selects(name)]
    rule = LayoutRule(**{name: training[name] for name in LayoutRule._fields if name in training})
    labels = read_tables(folder, rule.labels, None) if folder else ()
    layout = lay_out(names, val_fraction=rule.val_fraction, labels=labels, layout=rule.layout)
    notes = list(layout.notes)
    images, chosen = (sum(map(is_image, group)) for group in (everything, names))
    if images > chosen:
        what = " and ".join(name for name in ("include", "exclude") if sync.get(name))
        notes.append(f"{images - chosen:,} of {images:,} images left out by {what}")
    tags = arguments.get("gate", {}).get("tags", "")
    if tags and is_relative(tags) and tags not in names:
        raise InputError(f"tags is {tags}, but {source} has no such file: correct it")
    if not rule.labels and (others := [one for one in tables_in(names) if one != tags]):
        notes.append(f"{others[0]} is not used: if it has the classes, --set labels={others[0]}")
    known = {name: training[name] for name in Reading._fields if name in training}
    headers, broken = _open_all(folder, layout, Reading(**known), notes) if folder else ([], {})
    pictures = [header[:3] for header in headers]
    if folder and broken and training.get("on_bad_image") == "fail":
        first = next(f"{shown(folder / name)} ({why})" for name, why in broken.items())
        raise InputError(
            f"{plural(len(broken), 'image')} cannot be read, {first} first: replace or "
            "remove them, or leave them out with --set on_bad_image=skip"
        )
    if broken and not pictures:
        raise InputError(f"none of the images can be read: {next(iter(broken.values()))}")
    excluded: list[str] = []
    reads_any = folder is None or training.get("script")
    if not reads_any and not sync.get("include"):
        excluded += _other_files(names, {tags, *(one.name for one in labels)}.intersection(names))
    if broken and not reads_any and not labels and len(broken) <= MOST_ROWS:
        excluded += map(glob_of, broken)
        layout = _without(broken, names, rule)
    _check_names(names, excluded, sync)
    columns = {}
    for side, part in layout.parts.items():
        by_class = Counter(target for name, target in part if name not in broken)
        columns[side] = [by_class[number] for number in range(len(layout.classes))]
    notes += uneven(layout.classes, columns[TRAIN], columns[VAL])
    counts = (sum(columns[TRAIN]), sum(columns[VAL]), len(layout.classes))
    (short, decoding), size = statistics_of(pictures), training.get("image_size", 0)
    if 0 < size < min(SMALLEST, short / 2):
        notes.append(f"image_size={size} leaves little of images of {short} px")
    photographs = Photographs(*counts, short, decoding, tuple(map(printable, notes)))
    paths = {str(folder and folder / name): why for name, why in broken.items()}
    table, reading = tuple(_table(layout, columns)), tuple(_reading(layout))
    return Survey(photographs, table, reading, paths, tuple(excluded))


def _check_names(names: Iterable[str], excluded: Sequence[str], sync: Mapping[str, Any]) -> None:
    """Raise InputError if the sync would refuse a name that it does not leave out."""
    listing = Listing()
    for name in names:
        listing.add(name, 0, 0)
    apply(Filter((), excluded).select(listing), sync.get("hostile_names", "error"))


def _other_files(names: Iterable[str], tables: Collection[str]) -> list[str]:
    """Return globs of the files that are neither images nor one of the tables."""
    kept = {"", *(Path(table).suffix for table in tables)}
    suffixes = {os.path.splitext(name)[1] for name in names} - kept
    plain = (one for one in suffixes if not is_image(f"x{one}") and not set(one) & set("*?"))
    return sorted(f"*{one}" for one in plain)


def _without(broken: Mapping[str, str], names: Iterable[str], rule: LayoutRule) -> Layout:
    """Return the layout without the broken images; raise InputError if it cannot train."""
    folders = (f"{os.path.dirname(name)}/" for name in broken)
    readable = [name for name in names if name not in broken]
    try:
        everything = [*readable, *folders]
        return lay_out(everything, val_fraction=rule.val_fraction, layout=rule.layout)
    except InputError as error:
        raise InputError(
            f"{plural(len(broken), 'image')} cannot be read, {next(iter(broken))} first; "
            f"without them {error}"
        ) from None


def _table(layout: Layout, by_side: Mapping[str, list[int]]) -> Iterator[str]:
    """Yield the images of each class and split as lines of at most 80 columns."""
    sides = [side for side in by_side if side != TEST or any(by_side[TEST])]
    columns = [by_side[side] for side in sides]
    rows = list(zip(map(printable, layout.classes), *columns, strict=True))
    hidden = rows[_ROWS:] if len(rows) > _ROWS + 1 else []
    rows = rows[: len(rows) - len(hidden)]
    if hidden:
        sums = [sum(column) for column in list(zip(*hidden, strict=True))[1:]]
        rows.append((f"{len(hidden):,} more classes", *sums))
    width = min(max(len(row[0]) for row in (*rows, ("class",))), _WIDTH)
    for name, *numbers in (("class", *sides), *rows, ("all", *map(sum, columns))):
        name = name if len(name) <= width else f"{name[: width - 1]}…"
        yield f"  {name:<{width}}" + "".join(
            f"{one:>9,}" if isinstance(one, int) else f"{one:>9}" for one in numbers
        )


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
    for at, folders, files in os.walk(folder, followlinks=links == "follow"):
        below = Path(at).relative_to(folder)
        if not folders and not files and below.parts:
            yield f"{below.as_posix()}/"
        if not below.parts and LOST_AND_FOUND in folders:
            folders.remove(LOST_AND_FOUND)
        if links == "follow":  # a link to a folder above has no end; the sync refuses it
            above = {os.path.realpath(path) for path in (Path(at), *Path(at).parents)}
            folders[:] = [name for name in folders if os.path.realpath(Path(at, name)) not in above]
        for name in files:
            if links != "skip" or not Path(at, name).is_symlink():
                yield (below / name).as_posix()


_Header = tuple[str, int, int, bool]
"""Format, width and height of an image, and whether its values are of more than 8 bits."""


def _open_all(
    folder: Path, layout: Layout, reading: Reading, notes: list[str]
) -> tuple[list[_Header], dict[str, str]]:
    """Return the headers of the readable images, and why others cannot be read."""
    names = [name for part in layout.parts.values() for name in part.names]
    with ThreadPoolExecutor(_THREADS) as pool:  # a network drive answers many at once
        size = sum(pool.map(lambda name: _size(folder / name), names))
        step = size // _DECODED + 1
        images = pool.map(
            lambda at: _open(folder / names[at], reading, at % step == 0), range(len(names))
        )
        results = dict(zip(names, images, strict=True))
    headers = [result for result in results.values() if not isinstance(result, str)]
    if step > 1:
        notes.append(f"of {len(names):,} images 1 in {step:,} was decoded, of others the headers")
    if not reading.value_range and (deep := sum(header[3] for header in headers)):
        notes.append(
            f"{plural(deep, 'image')} with more than 8 bits or fractions: without value_range, "
            "the largest value of a TIFF chooses its bits"
        )
    return headers, {name: result for name, result in results.items() if isinstance(result, str)}


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
            header = image.format or "", *image.size, decoder.is_deep(image)
            file.seek(max(file.tell(), path.stat().st_size - _TAIL))
            if complete or _ENDS.get(header[0], b"") not in file.read():
                decoder.decode(content(Where(str(path)), reading.most_bytes), reading)
            return header
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
