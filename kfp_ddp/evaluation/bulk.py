"""What a batch prediction has to compute, and the table that it makes of the parts.

Beside the table, `<table>.parts/` has a list of what was missing when a run started, and a part for
each shard of that list. A later run counts complete parts as it counts the rows of the table, so it
computes only what both lack. Free of torch.
"""

import hashlib
import heapq
import itertools
import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

from kfp_ddp.core.errors import InputError, UnavailableError
from kfp_ddp.core.machine import require
from kfp_ddp.core.spreadsheet import Reader, write_rows
from kfp_ddp.core.text import from_json
from kfp_ddp.evaluation.request import PARQUET, PredictionRequest, suffix_of
from kfp_ddp.storage.kinds import kind_of, open_source, open_store
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.source import is_text
from kfp_ddp.training.data.sides import is_ignored, is_image, no_images

PROBABILITY = "probability_"
"""Begin of the name of a column, before that of the class."""
LOST = "not downloaded: "
"""Begin of the reason of a row that the next run computes again."""
SHARD_BYTES = 1 << 29
"""Bytes of the objects of a shard, unless one has more: a rank has three shards on its disk."""
_LARGEST, _TOGETHER = 1 << 40, 4096
Row = dict[str, Any]
"""Values of a row by column; numbers are text if they come from a CSV."""


class Table:
    """The table at a URI, of a bundle's classes and digest, with its parts and its record."""

    def __init__(self, uri: str, classes: Sequence[str] = (), bundle: str = "") -> None:
        parent, slash, self.name = uri.rpartition("/")
        self.uri, self.bundle, self.suffix = uri, bundle, suffix_of(uri)
        self.probabilities = [PROBABILITY + name for name in classes]
        self.columns = ["name", "class", *self.probabilities, "bundle", "reason", "object"]
        self.store = open_store(parent or slash or ".")
        self.parts, self.record = f"{self.name}.parts/", f"{self.name}.json"

    def write(self, file: Path, rows: Iterable[Row]) -> None:
        """Write rows to a file, which has the suffix of the table."""
        if self.suffix == PARQUET:
            arrow, parquet = _pyarrow()
            kinds = {name: arrow.float32() for name in self.probabilities}
            schema = arrow.schema([(one, kinds.get(one, arrow.string())) for one in self.columns])
            iterator = iter(rows)
            with parquet.ParquetWriter(file, schema) as writer:
                while some := list(itertools.islice(iterator, _TOGETHER)):
                    writer.write_table(arrow.Table.from_pylist(some, schema=schema))
            return
        cells = ([row.get(name, "") for name in self.columns] for row in rows)
        short = ([f"{x:.6g}" if isinstance(x, float) else x for x in line] for line in cells)
        with file.open("w", encoding="utf-8", newline="") as opened:
            write_rows(opened, itertools.chain([self.columns], short))

    def rows(self, listing: Listing) -> Iterator[tuple[int, Row]]:
        """Yield position and row of the listed objects that have one, in order, each once.

        Raise InputError if the table is of other classes, or of something else.
        """
        stored = (name for name, _ in self.store.list(self.parts))
        parts = sorted(name for name in stored if name.endswith(self.suffix))
        lists = itertools.groupby(parts, key=lambda name: name.rpartition("-")[0])
        # Both the table and the parts of one list are sorted by name.
        streams = [self._read([self.name]), *(self._read(list(some)) for _, some in lists)]
        at, names = 0, listing.names
        merged = heapq.merge(*streams, key=itemgetter("name"))
        for name, some in itertools.groupby(merged, key=itemgetter("name")):
            while at < len(names) and names[at] < name:
                at += 1
            if at < len(names) and names[at] == name:
                key = (self.bundle, content_of(listing, at))
                same = [row for row in some if (row["bundle"], row["object"]) == key]
                if same:
                    yield at, min(same, key=lambda row: row["reason"].startswith(LOST))

    def _read(self, names: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of one file after the other; parts of other classes are left out."""
        for name in names:
            with self._fetched(name) as file:
                lines: Iterator[Any] = _lines(file) if file else iter([self.columns])
                try:
                    columns = next(lines)
                    if columns == self.columns:
                        yield from lines
                        continue
                except (ValueError, TypeError) as error:
                    columns = [f"{type(error).__name__}: {error}"]
            if name == self.name:
                shown, own = (", ".join(one)[:200] for one in (columns, self.columns))
                raise InputError(
                    f"{self.uri} has other columns ({shown}) than a table of this bundle ({own}): "
                    "name another table, or delete it"
                )

    @contextmanager
    def _fetched(self, name: str) -> Iterator[Path | None]:
        with tempfile.NamedTemporaryFile(suffix=self.suffix) as file:
            exists = self.store.fetch(name, cast(BinaryIO, file), _LARGEST)
            file.flush()
            yield Path(file.name) if exists else None

    def plan(self, listing: Listing) -> tuple[str, int]:
        """Upload the list of objects to predict; return its name and their number."""
        done, digest = bytearray(len(listing)), hashlib.sha256()
        for at, row in self.rows(listing):
            done[at] = not row["reason"].startswith(LOST)
        with tempfile.NamedTemporaryFile() as file:
            for at, name in enumerate(listing.names):
                if not done[at]:
                    pin = (listing.sizes[at], listing.crcs[at], listing.generations[at])
                    line = [name, *pin, listing.tags[at] if listing.tags else ""]
                    file.write(encoded := json.dumps(line).encode() + b"\n")
                    digest.update(encoded)
            file.flush()
            todo = f"{self.parts}{digest.hexdigest()[:12]}"
            if 0 in done:
                self.store.put(Path(file.name), todo)
        return todo, done.count(0)

    def shards(self, todo: str, most: int) -> Iterator[Listing]:
        """Yield the shards of a list, the same ones on all ranks; at most `most` objects each."""
        with self._fetched(todo) as file:
            if file is None:
                raise UnavailableError(f"{self.store.uri}/{todo} was deleted: run again")
            shard, total = Listing(), 0
            with file.open("rb") as lines:
                for line in lines:
                    name, size, *pin = from_json(line)
                    total += size
                    if shard and (len(shard) >= most or total > SHARD_BYTES):
                        yield shard
                        shard, total = Listing(), size
                    shard.add(name, size, *pin)
            yield shard

    def join(self, listing: Listing, record: dict[str, Any]) -> None:
        """Make the table of all rows, and its record; raise UnavailableError without a part."""
        counts = Counter[str]()

        def counted() -> Iterator[Row]:
            for _, row in self.rows(listing):
                counts[row["class"]] += 1
                yield row

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"table{self.suffix}")
            self.write(file, counted())
            if lacking := len(listing) - counts.total():
                raise UnavailableError(
                    f"{self.uri} lacks {lacking:,} rows, as another run deleted parts: run again"
                )
            self.store.put(file, self.name)
        unreadable = counts.pop("", 0)
        record |= {"rows": len(listing), "unreadable": unreadable, "bundle": self.bundle}
        text = json.dumps(record | {"classes": dict(sorted(counts.items()))}, indent=1)
        self.store.write(self.record, text.encode())
        self.delete_parts()

    def read_record(self) -> dict[str, Any]:
        """Return the record beside the table; raise UnavailableError without one."""
        if (content := self.store.read(self.record, 1 << 24)) is None:
            raise UnavailableError(f"{self.store.uri}/{self.record} was deleted: run again")
        record: dict[str, Any] = from_json(content)
        return record

    def delete_parts(self) -> None:
        """Delete the parts, which the table has now."""
        while names := list(self.store.entries(self.parts)):  # then emptied folders
            for name in names:
                self.store.delete(name)


def _lines(file: Path) -> Iterator[Any]:
    """Yield the columns of a file, and its rows; raise ValueError for something else."""
    if file.suffix == PARQUET:
        with _pyarrow()[1].ParquetFile(file) as source:
            yield source.schema_arrow.names
            for some in source.iter_batches(_TOGETHER):
                yield from some.to_pylist()
        return
    with file.open(encoding="utf-8", newline="") as opened:
        reader = Reader(opened)
        yield list(reader.fieldnames or ())
        yield from reader


def _pyarrow() -> tuple[Any, Any]:
    require("parquet", f"a table {PARQUET}")
    import pyarrow
    import pyarrow.parquet

    return pyarrow, pyarrow.parquet


def describe_drift(drift: Mapping[str, Any]) -> str:
    """Return a line for the comparison in a record."""
    result = "differ from" if drift["differs"] else "look like"
    return (
        f"{drift['images']:,} images {result} {drift['reference']:,} of the evaluation: "
        f"p {drift['p_value']:.2g}, distance {drift['distance']:.2f} in {drift['column']}"
    )


def content_of(listing: Listing, at: int) -> str:
    """Return what identifies the content of an object."""
    return f"{listing.token(at)} {listing.sizes[at]}"


def list_objects(request: PredictionRequest, table: Table) -> Listing:
    """List the objects of the source in the order of their names; raise InputError without images.

    Left out are files that systems make, and the table itself.
    """
    source, kind = open_source(request.source), kind_of(request.source)
    place = f"{open_store(request.source).place}/" if kind and kind.store else "\0"
    own = f"{table.store.place}/{table.name}".removeprefix(place)
    listing, listed = source.listing(), array("L")
    for at, name in enumerate(listing.names):
        ours = name in (own, f"{own}.json") or name.startswith(f"{own}.parts/")
        if ours or (is_ignored(name) and not is_image(name)):
            continue
        if not is_text(name):
            raise InputError(f"the name {name!a} of {source.url} is not UTF-8: rename the object")
        listed.append(at)
    if len(listed) < len(listing):
        listing = listing.take(listed)
    if not any(is_image(name) or "." not in name.rpartition("/")[2] for name in listing.names):
        raise InputError(f"{source.url} has {no_images(listing.names)}: correct its address")
    return listing.sorted()
