"""What a listing says of the images to train on, before the first of them is read."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import human, printable
from kfp_ddp.datasets.context import Context
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.datasets.transfer import Transfer
from kfp_ddp.storage.listing import Listing
from kfp_ddp.training.labels import LARGEST, Labels
from kfp_ddp.training.layout import Layout, Rule, lay_out
from kfp_ddp.training.sides import SIDES, TRAIN

FEW = 10
"""Images of a class to train on that are told as few."""
_SHOWN = 5
_TRAIN = SIDES.index(TRAIN)


@dataclass(frozen=True)
class Images:
    """The images of a dataset by class and side, and what is odd about them."""

    layout: Layout
    warnings: tuple[str, ...]

    @property
    def line(self) -> str:
        """All of it in one line."""
        found = self.layout
        text = (
            f"images: {found.form}: {len(found.classes):,} classes, {len(found.train):,} to train "
            f"on, {len(found.val):,} to validate, {len(found.test):,} to test"
        )
        return printable("; warning: ".join([text, *self.warnings]))


def check(context: Context, rule: Rule, listing: Listing) -> Images:
    """Check the listed images before the first of them is downloaded.

    Raises:
        InputError: no training is possible with them.
        Changed: the table of labels is no longer as listed.
        StorageError: the table cannot be read.
    """
    try:
        table = _table(context, rule.labels, listing) if rule.labels else None
        images = look_at(listing, rule, table)
    except InputError as error:
        raise InputError(f"{context.source.url}: {error}") from None
    context.phase(images.line)
    return images


def look_at(listing: Listing, rule: Rule, table: Labels | None) -> Images:
    """The images of a sorted listing, and what is odd about them.

    Raises:
        InputError: what cannot train, in one line.
    """
    found = lay_out(listing.names, val_fraction=rule.val_fraction, labels=table)
    warnings = (*found.notes, *uneven(found), *_duplicates(listing, found))
    return Images(found, warnings)


def _table(context: Context, name: str, listing: Listing) -> Labels:
    """The table of labels, which is brought first."""
    import tempfile  # only such a table needs it

    index = bisect_left(listing.names, name)
    if index == len(listing) or listing.names[index] != name:
        tables = [each for each in listing.names if each.lower().endswith((".csv", ".jsonl"))]
        hint = f"; it has {', '.join(tables[:_SHOWN])}" if tables else ""
        raise InputError(f"labels={name} is not in it{hint}")
    if listing.sizes[index] > LARGEST:
        size = human(listing.sizes[index])
        raise InputError(
            f"labels={name} is too large ({size}): give one of {human(LARGEST)} at most"
        )
    context.phase(f"reading {name}")
    with tempfile.TemporaryDirectory() as folder:
        stage = FileStage(Path(folder) / "labels", listing.take([index]))
        stage.open()
        try:
            Transfer(context.source, stage.listing, stage, retry=context.retry).run([0])
            return Labels.parse(name, stage.path(0).read_bytes())
        finally:
            stage.close()


def uneven(found: Layout) -> Iterator[str]:
    """Classes that a side lacks, or that have few images to train on, in words."""
    number = len(found.classes)
    train, val = found.train.counts(number), found.val.counts(number)
    names = [
        f"{name} ({there:,} to train on)"
        for name, there, held in zip(found.classes, train, val, strict=True)
        if not held
    ]
    what = "without images to validate"
    if len(names) == number - 1:
        what += ", so nothing is told apart"
    yield from _some(names, what)
    few = [
        f"{name} ({there})" for name, there in zip(found.classes, train, strict=True) if there < FEW
    ]
    yield from _some(few, f"with less than {FEW} images to train on")


def _some(names: Sequence[str], what: str) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
        classes = "class" if len(names) == 1 else "classes"
        yield f"{len(names):,} {classes} {what}: {', '.join(names[:_SHOWN])}{more}"


def _duplicates(listing: Listing, found: Layout) -> Iterator[str]:
    """Images of one size and checksum that stand on two sides, or in two classes."""
    target = array("i", [-1]) * len(listing)
    side = bytearray(len(listing))
    for number, part in enumerate(found.parts.values()):
        for name, label in part:
            index = bisect_left(listing.names, name)
            target[index], side[index] = label, number
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
        (leaks, " of val or test", "another side", "what is measured flatters"),
        (contradictions, "", "another class", "one of the two is wrong"),
    ):
        if pairs:
            index, before = pairs[0]
            held, other = sorted((index, before), key=lambda at: side[at] == _TRAIN)
            one = len(pairs) == 1
            yield (
                f"{len(pairs):,} image{'' if one else 's'}{which} {'has' if one else 'have'} the "
                f"content of one of {of}, {listing.names[held]} that of {listing.names[other]} "
                f"first: {so}"
            )
