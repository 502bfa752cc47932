"""Check the images of a listing before the first of them is downloaded."""

import contextlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.text import human, printable
from kfp_ddp.datasets.context import Context, source_options
from kfp_ddp.datasets.names import apply, without_markers
from kfp_ddp.datasets.options import SyncOptions, below
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.datasets.transfer import Transfer
from kfp_ddp.pictures.layout import Layout, lay_out
from kfp_ddp.pictures.reading import LayoutRule
from kfp_ddp.pictures.sides import SIDES, TRAIN, likely_tables
from kfp_ddp.pictures.splits import splits_of
from kfp_ddp.pictures.tables import LARGEST, Labels, labels_of, roots_of
from kfp_ddp.storage.kinds import open_source
from kfp_ddp.storage.listing import Filter, Listing
from kfp_ddp.storage.source import Retry

FEW = 10
"""A class with fewer training images gets a warning."""
_SHOWN = 5
_SAMPLED = 12
_LARGEST_SAMPLE = 32 << 20
_TRAIN = SIDES.index(TRAIN)


@dataclass(frozen=True)
class DatasetImages:
    """The images of a dataset by class and split, with warnings."""

    layout: Layout
    warnings: tuple[str, ...]

    @property
    def line(self) -> str:
        """Return a summary in one line."""
        layout = self.layout
        text = (
            f"images: {layout.form}: {len(layout.classes):,} classes, {len(layout.train):,} to "
            f"train on, {len(layout.val):,} to validate, {len(layout.test):,} to test"
        )
        return printable("; warning: ".join([text, *self.warnings]))


def check(
    context: Context, rule: LayoutRule, listing: Listing, before: Path | None
) -> DatasetImages:
    """Check the listed images before any download; warn of those that changed their split."""
    try:
        tables = labels_of(
            rule.labels,
            lambda name: _table(context, name, listing),
            roots_of(context.source.url),
        )
        images = look_at(listing, rule, tables)
        if before is not None and images.layout.by_name:
            moved = tuple(_moved(images.layout, before, rule))
            images = replace(images, warnings=(*images.warnings, *moved))
    except InputError as error:
        raise InputError(f"{context.source.url}: {error}") from None
    context.phase(images.line)
    return images


def look_at(listing: Listing, rule: LayoutRule, tables: Sequence[Labels]) -> DatasetImages:
    """Return the images of a sorted listing, with warnings; raise InputError as `lay_out`."""
    layout = lay_out(listing.names, rule, labels=tables)
    train, val = (part.counts(len(layout.classes)) for part in (layout.train, layout.val))
    warnings = (*layout.notes, *uneven(layout.classes, train, val), *_duplicates(listing, layout))
    return DatasetImages(layout, warnings)


def _table(context: Context, name: str, listing: Listing) -> bytes:
    index = bisect_left(listing.names, name)
    if index == len(listing) or listing.names[index] != name:
        tables = likely_tables(listing.names)
        hint = f"; it has {', '.join(tables[:_SHOWN])}" if tables else ""
        raise InputError(f"labels={name} is not in it{hint}")
    if listing.sizes[index] > LARGEST:
        size = human(listing.sizes[index])
        raise InputError(
            f"labels={name} is too large ({size}): give one of {human(LARGEST)} at most"
        )
    context.phase(f"reading {name}")
    return _contents(context, listing.take([index]))[0]


def _contents(context: Context, listing: Listing) -> list[bytes]:
    import tempfile  # only few callers need it

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(FileStage(Path(folder) / "files", listing)) as stage,
    ):
        stage.open()
        every = range(len(listing))
        Transfer(context, stage).run(every)
        return [stage.path(index).read_bytes() for index in every]


def sample(source_url: str, options: SyncOptions, rule: LayoutRule) -> tuple[Layout, list[bytes]]:
    """List a source; return the layout of its images, and the content of some for training."""
    options = replace(options, exclude=below(source_url, options.exclude))
    select = Filter(options.include, options.exclude)
    source = open_source(source_url, source_options(options, select))
    context = Context(source, options, Retry(), lambda *_: None)
    listed = select.select(without_markers(context.source.listing())[0])
    listing = apply(listed, options.hostile_names, exclude=options.exclude).listing
    layout = check(context, rule, listing, None).layout
    names = layout.train.names[:: -(-len(layout.train) // _SAMPLED)]
    indices = (bisect_left(listing.names, name) for name in names)
    few = listing.take([index for index in indices if listing.sizes[index] <= _LARGEST_SAMPLE])
    return layout, _contents(context, few)


def uneven(classes: Sequence[str], train: Sequence[int], val: Sequence[int]) -> Iterator[str]:
    """Yield warnings for classes without validation images or with few training images."""
    counts = list(zip(classes, train, val, strict=True))
    names = [f"{name} ({images:,} to train on)" for name, images, checked in counts if not checked]
    what = "without images to validate"
    if len(names) == len(classes) - 1:
        what += ", so no classes are distinguished"
    yield from _some(names, what)
    few = [f"{name} ({images})" for name, images, _ in counts if images < FEW]
    yield from _some(few, f"with fewer than {FEW} images to train on")


def _some(names: Sequence[str], what: str) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
        classes = "class" if len(names) == 1 else "classes"
        yield f"{len(names):,} {classes} {what}: {', '.join(names[:_SHOWN])}{more}"


def _moved(layout: Layout, before: Path, rule: LayoutRule) -> Iterator[str]:
    """Yield a warning for images that are in another split than in the version before."""
    try:
        earlier = splits_of(before, rule)
    except KfpDdpError:  # it could not be used for training
        return
    start = len(f"{before}/")
    trained = {path[start:] for path in earlier.train.paths}
    validated = {path[start:] for path in earlier.val.paths}
    late = sorted(trained.intersection(layout.val.names))
    names = late + sorted(validated.intersection(layout.train.names))
    if names:
        yield (
            f"{len(names):,} images of small classes changed their split, {names[0]} first: "
            f"earlier models were trained on {len(late):,} that validate now"
        )


def _duplicates(listing: Listing, layout: Layout) -> Iterator[str]:
    """Yield warnings for images with the same content in two splits or two classes."""
    target = array("i", [-1]) * len(listing)
    side = bytearray(len(listing))
    for number, part in enumerate(layout.parts.values()):
        for name, label in part:
            index = bisect_left(listing.names, name)
            target[index] = label
            side[index] = number
    first: dict[int, int] = {}
    leaks: list[tuple[int, int]] = []
    contradictions: list[tuple[int, int]] = []
    for index, label in enumerate(target):
        if label < 0 or not listing.sizes[index]:
            continue
        before = first.setdefault(hash((listing.sizes[index], listing.token(index))), index)
        if side[before] != side[index]:
            leaks.append((index, before))
        elif target[before] != label:
            contradictions.append((index, before))
    for pairs, which, of, so in (
        (leaks, " of val or test", "split", "the measured accuracy is too high"),
        (contradictions, "", "class", "one of the two is wrong"),
    ):
        if pairs:
            # The image for training is named last.
            image, other = sorted(pairs[0], key=lambda index: side[index] == _TRAIN)
            example = f"{listing.names[image]} and {listing.names[other]}"
            same = f"images{which} are the same as images"
            if len(pairs) == 1:
                same = f"image{which} is the same as one"
            yield f"{len(pairs):,} {same} of another {of} ({example}): {so}"
