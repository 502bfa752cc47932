"""What a batch prediction has to compute, and the table that it makes of the parts.

Beside the table, `<table>.parts/` has a list of what was missing when a run started, and a part for
each shard of that list. A later run counts complete parts as it counts the rows of the table, so it
computes only what both lack. Free of torch.
"""

import hashlib
import heapq
import itertools
import json
import re
import tempfile
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

from kfp_ddp.core.errors import InputError, UnavailableError
from kfp_ddp.core.log import log
from kfp_ddp.core.machine import require
from kfp_ddp.core.spreadsheet import Reader, write_rows
from kfp_ddp.core.text import from_json, one_line, printable
from kfp_ddp.datasets.names import apply
from kfp_ddp.evaluation.request import PARQUET, PredictionRequest, suffix_of
from kfp_ddp.models.doubt import WORDS
from kfp_ddp.pictures.reading import is_image, is_needless
from kfp_ddp.pictures.sides import no_images
from kfp_ddp.storage.kinds import kind_of, open_source, open_store
from kfp_ddp.storage.listing import Listing, weakness
from kfp_ddp.storage.source import SourceOptions

PROBABILITY = "probability_"
"""Begin of the name of a column, before that of the class."""
LOST = "not downloaded: "
"""Begin of the reason of a row that the next run computes again."""
SHARD_BYTES = 1 << 29
"""Bytes of the objects of a shard, unless one has more: a rank has three shards on its disk."""
_LARGEST = 1 << 40
_TOGETHER = 4096
_PART = "[0-9a-f]{12}-[0-9]{7,}"
"""Names of parts: the digest of a list, and the number of a shard of it."""
SAMPLE = ".sample"
"""End of the name of a sample, after that of the table or the part."""
_SHOWN = 5
_MOST_LISTS = 256
"""Parts of one run are read one after the other, those of several runs at once."""
Row = dict[str, Any]
"""Values of a row by column; numbers are text if they come from a CSV."""


class Table:
    """The table at a URI, of a bundle's classes and digest, with its parts and its record."""

    def __init__(self, uri: str, classes: Sequence[str] = (), bundle: str = "") -> None:
        parent, slash, self.name = uri.rpartition("/")
        self.uri = uri
        self.bundle = bundle
        self.suffix = suffix_of(uri)
        self.probabilities = [PROBABILITY + name for name in classes]
        earlier = ["name", "class", *self.probabilities, "bundle", "reason", "object"]
        self.columns = [*earlier, "sure"]
        self.readable = (self.columns, earlier)
        self.store = open_store(parent or slash or ".")
        self.parts = f"{self.name}.parts/"
        self.record = f"{self.name}.json"

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
        short = ([_short(cell) for cell in line] for line in cells)
        with file.open("w", encoding="utf-8", newline="") as opened:
            write_rows(opened, itertools.chain([self.columns], short))

    def part_names(self, end: str = "") -> list[str]:
        """Return the names of the parts, or of the files beside them with this end, sorted."""
        pattern = re.compile(f"{re.escape(self.parts)}{_PART}{re.escape(self.suffix + end)}")
        return sorted(name for name, _ in self.store.list(self.parts) if pattern.fullmatch(name))

    def rows(self, listing: Listing) -> Iterator[tuple[int, Row]]:
        """Yield position and row of the listed objects that have one, in order, each once.

        Raise InputError if the table is of other classes, or of something else.
        """
        lists = itertools.groupby(self.part_names(), key=lambda name: name.rpartition("-")[0])
        # Both the table and the parts of one list are sorted by name.
        together = [[self.name], *(list(files) for _, files in lists)]
        if len(together) > _MOST_LISTS:
            raise InputError(
                f"{self.store.uri}/{self.parts} has parts of {len(together):,} runs, and "
                f"{_MOST_LISTS} can be read at once: delete it, and run again"
            )
        streams = (self._read(files, listing) for files in together)
        merged = heapq.merge(*streams, key=itemgetter(0))
        for at, same in itertools.groupby(merged, key=itemgetter(0)):
            yield at, min((row for _, row in same), key=lambda row: row["reason"].startswith(LOST))

    def _read(self, files: Sequence[str], listing: Listing) -> Iterator[tuple[int, Row]]:
        """Yield position and row of the objects that are listed like this, of one file after other.

        A damaged part is left out from there on. Raise InputError for a table of something else.
        """
        last = -1
        for name in files:
            with self._fetched(name) as file:
                lines: Iterator[Any] = _lines(file) if file else iter([self.columns])
                try:
                    columns = next(lines)
                    for row in lines if columns in self.readable else ():
                        at = self._position(row, listing)
                        if at > last:
                            yield at, row
                            last = at
                    if columns in self.readable:
                        continue
                except (ValueError, TypeError) as error:
                    columns = [one_line(f"{type(error).__name__}: {error}", 200)]
            shown = printable(", ".join(columns)[:200])
            own = printable(", ".join(self.columns)[:200])
            if name == self.name:
                raise InputError(
                    f"{self.uri} has other columns ({shown}) than a table of this bundle ({own}): "
                    "name another table, or delete it"
                )
            log.info(f"{self.store.uri}/{name} is no part of this table: {shown}")

    def _position(self, row: Row, listing: Listing) -> int:
        """Return the position of a row's object, -1 if it is listed otherwise.

        Raise ValueError or TypeError for what is no row.
        """
        row.setdefault("sure", "")  # rows of earlier versions have none
        texts = [row[name] for name in ("name", "class", "bundle", "reason", "object", "sure")]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text is missing")
        for name in self.probabilities:
            row[name] = float(row[name]) if row[name] not in (None, "") else row[name]
        return self.position(listing, row["name"], row["bundle"], row["object"])

    def position(self, listing: Listing, name: str, bundle: str, content: str) -> int:
        """Return where an object is listed with this content, -1 if not, or of another bundle."""
        at = bisect_left(listing.names, name)
        if at == len(listing) or listing.names[at] != name:
            return -1
        return at if (self.bundle, content_of(listing, at)) == (bundle, content) else -1

    @contextmanager
    def _fetched(self, name: str) -> Iterator[Path | None]:
        with tempfile.NamedTemporaryFile(suffix=self.suffix) as file:
            exists = self.store.fetch(name, cast(BinaryIO, file), _LARGEST)
            file.flush()
            yield Path(file.name) if exists else None

    def plan(self, listing: Listing) -> tuple[str, int]:
        """Upload the list of objects to predict; return its name and their number."""
        done = bytearray(len(listing))
        digest = hashlib.sha256()
        for at, row in self.rows(listing):
            done[at] = not row["reason"].startswith(LOST)
        with tempfile.NamedTemporaryFile() as file:
            for at, name in enumerate(listing.names):
                if not done[at]:
                    crc = listing.crcs[at] if listing.lists_crc else None
                    pin = (listing.sizes[at], crc, listing.generations[at])
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
            shard = Listing()
            total = 0
            with file.open("rb") as lines:
                for line in lines:
                    name, size, crc, *pin = from_json(line)
                    total += size
                    if shard and (len(shard) >= most or total > SHARD_BYTES):
                        yield shard
                        shard = Listing()
                        total = size
                    shard.lists_crc = crc is not None
                    shard.add(name, size, crc or 0, *pin)
            yield shard

    def join(self, listing: Listing, record: dict[str, Any]) -> None:
        """Make the table of all rows, and its record; raise UnavailableError without a part."""
        counts = Counter[str]()
        answers = Counter[str]()
        done = bytearray(len(listing))

        def counted() -> Iterator[Row]:
            for at, row in self.rows(listing):
                counts[row["class"]] += 1
                answers[row["sure"]] += 1
                done[at] = True
                yield row

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"table{self.suffix}")
            self.write(file, counted())
            if lacking := done.count(0):
                raise UnavailableError(
                    f"{self.uri} lacks {lacking:,} rows, that of {listing.names[done.find(0)]!a} "
                    "first, as another run deleted or replaced parts: run again, and if it lacks "
                    f"them again, delete {self.parts}, and rename this object"
                )
            self.store.put(file, self.name)
        unreadable = counts.pop("", 0)
        record |= {"rows": len(listing), "unreadable": unreadable, "bundle": self.bundle}
        record["unsure"] = answers[WORDS[False]]
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
        arrow, parquet = _pyarrow()
        try:
            with parquet.ParquetFile(file) as source:
                yield source.schema_arrow.names
                for some in source.iter_batches(_TOGETHER):
                    yield from some.to_pylist()
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        return
    with file.open(encoding="utf-8", newline="") as opened:
        reader = Reader(opened)
        yield reader.columns
        yield from reader


def _short(cell: object) -> object:
    """Return a number with six digits, as it is written."""
    return float(f"{cell:.6g}") if isinstance(cell, float) else cell


def _pyarrow() -> tuple[Any, Any]:
    require("parquet", f"a table {PARQUET}")
    import pyarrow
    import pyarrow.parquet

    return pyarrow, pyarrow.parquet


def describe_drift(drift: Mapping[str, Any]) -> tuple[str, str]:
    """Return a line with the figures of the comparison in a record, and one in plain words."""
    result = "look like"
    advice = ""
    if drift["differs"]:
        result = "differ from"
        advice = ", so expect more mistakes"
    figures = (
        f"{drift['images']:,} images {result} {drift['reference']:,} of the evaluation: "
        f"p {drift['p_value']:.2g}, distance {drift['distance']:.2f} in {drift['column']}"
    )
    return figures, f"the new pictures {result} those that the model was tested on{advice}"


def content_of(listing: Listing, at: int) -> str:
    """Return what identifies the content of an object: with its generation, where it has one."""
    content = f"{listing.token(at)} {listing.sizes[at]}"
    return f"{content} {generation}" if (generation := listing.generations[at]) else content


def _table_in_source(request: PredictionRequest, table: Table) -> str:
    """Return the name that the table would have among the objects of the source."""
    kind = kind_of(request.source)
    place = f"{open_store(request.source).place}/" if kind and kind.store else "\0"
    return f"{table.store.place}/{table.name}".removeprefix(place)


def _may_be_image(name: str) -> bool:
    """Return whether a name is of an image, or has no suffix."""
    return is_image(name) or "." not in name.rpartition("/")[2]


def list_objects(request: PredictionRequest, table: Table) -> tuple[Listing, dict[str, int]]:
    """List the objects of the source by name, and count those left out by the reason.

    Left out are files that systems make and the table itself, which do not count, and names that
    no sync takes. Raise InputError without images.
    """
    source = open_source(request.source, SourceOptions(requester_pays=request.requester_pays))
    own = _table_in_source(request, table)
    listing = source.listing()
    if not listing.sized:
        raise InputError(
            f"{source.url} is a dataset in Parquet files: copy its pictures to a folder first, by "
            f"kfp-ddp sync {source.url} FOLDER, and predict FOLDER/current"
        )
    listed = array("L")
    for position, name in enumerate(listing.names):
        ours = name in (own, f"{own}.json", f"{own}{SAMPLE}") or name.startswith(f"{own}.parts/")
        if not (ours or is_needless(name)):
            listed.append(position)
    if len(listed) < len(listing):
        listing = listing.take(listed)
    judged = apply(listing, "skip")
    listing = judged.listing
    if judged.skipped:
        shown = printable("; ".join(f"{name!r} ({why})" for name, why in judged.skipped[:_SHOWN]))
        log.info(f"{len(judged.skipped):,} objects are left out by their names: {shown}")
    if listing.weak:
        log.info(weakness(source.url, listing))
    if not any(map(_may_be_image, listing.names)):
        raise InputError(f"{source.url} has {no_images(listing.names)}: correct its address")
    return listing, dict(Counter(why for _, why in judged.skipped))
