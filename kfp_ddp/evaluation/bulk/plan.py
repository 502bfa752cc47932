"""What a batch prediction has to compute, and the table that it makes of the parts.

Beside the table, `<table>.parts/` has a list of what was missing when a run started, and a part for
each shard of that list. A later run counts complete parts as it counts the rows of the table, so it
computes only what is missing in both. Free of torch.
"""

import hashlib
import heapq
import itertools
import json
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from kfp_ddp.core.errors import InputError, StorageError, UnavailableError
from kfp_ddp.core.settings import Stored
from kfp_ddp.core.text import from_json
from kfp_ddp.evaluation.bulk import table
from kfp_ddp.evaluation.bulk.request import PredictionRequest
from kfp_ddp.evaluation.bulk.table import Row
from kfp_ddp.storage.kinds import kind_of, open_source, open_store
from kfp_ddp.storage.listing import Filter, Listing
from kfp_ddp.storage.source import SourceOptions, is_text
from kfp_ddp.training.data.sides import is_ignored, is_image, no_images

LOST = "not downloaded: "
"""Begin of the reason of a row that the next run computes again."""
SHARD_BYTES = 1 << 29
"""Bytes of the objects of a shard, unless one has more: a rank has three shards on its disk."""
_LARGEST = 1 << 40


class Shard(NamedTuple):
    """Objects that one rank predicts together."""

    number: int
    listing: Listing


class Summary(Stored):
    """Record of a table, beside it."""

    rows: int
    computed: int
    """Rows of the last run; the others were there before."""
    unreadable: int
    bundle: str
    source: str
    classes: dict[str, int]
    """Number of objects by their likeliest class."""
    seconds: float


@dataclass
class Destination:
    """The table at a URI, its parts, and its record."""

    uri: str
    classes: Sequence[str] = ()
    bundle: str = ""
    """Digest of the bundle, whose rows count."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        parent, slash, self.name = self.uri.rpartition("/")
        self.suffix = table.suffix_of(self.uri)
        self.store = open_store(parent or slash or ".")
        self.parts = f"{self.name}.parts/"

    def part(self, todo: str, number: int) -> str:
        """Return the name of the part of a shard."""
        return f"{self.parts}{todo}-{number:07d}{self.suffix}"

    def rows(self, listing: Listing) -> Iterator[tuple[int, Row]]:
        """Yield position and row of the listed objects that have one, in order, each once.

        Raise InputError if the table is of other classes, or of something else.
        """
        stored = (name for name, _ in self.store.list(self.parts))
        parts = sorted(name for name in stored if name.endswith(self.suffix))
        lists = itertools.groupby(parts, key=lambda name: name.rpartition("-")[0])
        # Both the table and the parts of one list are sorted by name.
        streams = [self._read(self.name), *(self._chained(list(some)) for _, some in lists)]
        at, names = 0, listing.names
        for name, some in itertools.groupby(heapq.merge(*streams), key=lambda row: row.name):
            while at < len(names) and names[at] < name:
                at += 1
            if at < len(names) and names[at] == name:
                key = (self.bundle, content_of(listing, at))
                same = [row for row in some if (row.bundle, row.content) == key]
                if same:
                    yield at, min(same, key=lambda row: row.reason.startswith(LOST))

    def _chained(self, names: Sequence[str]) -> Iterator[Row]:
        return itertools.chain.from_iterable(map(self._read, names))

    def _read(self, name: str) -> Iterator[Row]:
        with tempfile.NamedTemporaryFile(suffix=self.suffix) as file:
            if not self.store.fetch(name, cast(BinaryIO, file), _LARGEST):
                return
            file.flush()
            try:
                classes, rows = table.read(Path(file.name))
                if classes == tuple(self.classes):
                    yield from rows
                    return
            except InputError:
                raise
            except (ValueError, TypeError, LookupError) as error:
                raise InputError(
                    f"{self.store.uri}/{name} is no table of predictions ({error}): name another "
                    "table, or delete it"
                ) from None
        if name == self.name:  # parts may be those of a bundle before
            raise InputError(
                f"{self.uri} has the classes {_shown(classes)}, and the bundle "
                f"{_shown(self.classes)}: name another table, or delete it"
            )

    def plan(self, listing: Listing) -> tuple[str, int]:
        """Upload the list of objects to predict; return its name and their number."""
        done, digest = bytearray(len(listing)), hashlib.sha256()
        for at, row in self.rows(listing):
            done[at] = not row.reason.startswith(LOST)
        with tempfile.NamedTemporaryFile() as file:
            for at, name in enumerate(listing.names):
                if not done[at]:
                    pin = (listing.sizes[at], listing.crcs[at], listing.generations[at])
                    line = [name, *pin, listing.tags[at] if listing.tags else ""]
                    file.write(encoded := json.dumps(line).encode() + b"\n")
                    digest.update(encoded)
            file.flush()
            todo = digest.hexdigest()[:12]
            if 0 in done:
                self.store.put(Path(file.name), f"{self.parts}{todo}.jsonl")
        return todo, done.count(0)

    def shards(self, todo: str, most: int) -> Iterator[Shard]:
        """Yield the shards of a list, the same ones on all ranks; at most `most` objects each."""
        with tempfile.NamedTemporaryFile() as file:
            name = f"{self.parts}{todo}.jsonl"
            if not self.store.fetch(name, cast(BinaryIO, file), _LARGEST):
                raise UnavailableError(f"{self.store.uri}/{name} was deleted: run again")
            file.seek(0)
            shard, total = Shard(0, Listing()), 0
            for line in file:
                name, size, *pin = from_json(line)
                total += size
                if shard.listing and (len(shard.listing) >= most or total > SHARD_BYTES):
                    yield shard
                    shard, total = Shard(shard.number + 1, Listing()), size
                shard.listing.add(name, size, *pin)
            if shard.listing:
                yield shard

    def join(self, listing: Listing, computed: int, source: str, seconds: float) -> None:
        """Make the table of all rows and its record; raise UnavailableError without a part."""
        counts = dict.fromkeys(self.classes, 0)
        unreadable = 0

        def counted() -> Iterator[Row]:
            nonlocal unreadable
            for _, row in self.rows(listing):
                unreadable += not row.label
                if row.label:
                    counts[row.label] += 1
                yield row

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"table{self.suffix}")
            rows = table.write(file, self.classes, counted())
            if rows != len(listing):
                raise UnavailableError(
                    f"{self.uri} lacks {len(listing) - rows:,} rows, whose parts another run "
                    "deleted: run again"
                )
            self.store.put(file, self.name)
        summary = Summary(
            rows=rows,
            computed=computed,
            unreadable=unreadable,
            bundle=self.bundle,
            source=source,
            classes=counts,
            seconds=round(seconds, 1),
        )
        self.store.write(f"{self.name}.json", summary.model_dump_json(indent=1).encode())
        self.delete_parts()

    def summary(self) -> Summary:
        """Return the record beside the table; raise StorageError without one."""
        content = self.store.read(f"{self.name}.json", 1 << 24)
        if content is None:
            raise StorageError(f"{self.uri}.json is missing: run again")
        return Summary.model_validate_json(content)

    def delete_parts(self) -> None:
        """Delete the parts, which the table has now."""
        while names := list(self.store.entries(self.parts)):  # then emptied folders
            for name in names:
                self.store.delete(name)


def content_of(listing: Listing, at: int) -> str:
    """Return what identifies the content of an object."""
    return f"{listing.token(at)} {listing.sizes[at]}"


def list_objects(request: PredictionRequest, destination: Destination) -> Listing:
    """List the objects of the source in the order of their names; raise InputError without images.

    Left out are files that systems make, and the table itself.
    """
    options = request.options
    select = Filter(options.include, options.exclude)
    source = open_source(request.source, SourceOptions(symlinks=options.symlinks, select=select))
    listing, own = source.listing(), _own_names(request.source, destination)
    listed = array("L")
    for at, name in enumerate(listing.names):
        ours = own and (name in (own, f"{own}.json") or name.startswith(f"{own}.parts/"))
        if ours or (is_ignored(name) and not is_image(name)) or not select.selects(name):
            continue
        if not is_text(name):
            raise InputError(f"the name {name!a} of {source.url} is not UTF-8: rename the object")
        listed.append(at)
    if len(listed) < len(listing):
        listing = listing.take(listed)
    if not any(is_image(name) or "." not in name.rpartition("/")[2] for name in listing.names):
        raise InputError(f"{source.url} has {no_images(listing.names)}: correct its address")
    return listing.sorted()


def _own_names(source: str, destination: Destination) -> str:
    """Return the table's name below the source; '' for a table elsewhere."""
    kind = kind_of(source)
    place = f"{open_store(source).place}/" if kind and kind.store else "\0"
    path = f"{destination.store.place}/{destination.name}"
    return path.removeprefix(place) if path.startswith(place) else ""


def _shown(classes: Sequence[str]) -> str:
    return ", ".join(classes[:5]) + ", …" * (len(classes) > 5)
