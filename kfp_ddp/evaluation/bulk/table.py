"""The table of a batch prediction: CSV or Parquet, by the suffix of its name."""

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.spreadsheet import Reader, write_rows

CSV, PARQUET = SUFFIXES = (".csv", ".parquet")
PROBABILITY = "probability_"
"""Begin of the name of a column, before that of the class."""
_FIRST, _LAST = ("name", "class"), ("bundle", "reason", "object")
_TOGETHER = 4096


class Row(NamedTuple):
    """The prediction for one object."""

    name: str
    """Below the source."""
    label: str
    """The likeliest class; '' for an unreadable object."""
    bundle: str
    """Digest of the bundle."""
    reason: str
    """Why the object cannot be read; '' if it can."""
    content: str
    """What identifies its content, the column `object`: checksum or ETag, and bytes."""
    probabilities: tuple[float, ...]
    """Of each class; empty for an unreadable object."""


def suffix_of(table: str) -> str:
    """Return the suffix that names the format of a table; raise InputError for another."""
    for suffix in SUFFIXES:
        if table.lower().endswith(suffix) and not table.rpartition("/")[2].startswith("."):
            return suffix
    raise InputError(f"table={table!r} ends in neither {CSV} nor {PARQUET}: name one of these")


def write(file: Path, classes: Sequence[str], rows: Iterable[Row]) -> int:
    """Write rows, and return their number."""
    head = (*_FIRST, *(PROBABILITY + name for name in classes), *_LAST)
    if file.suffix == PARQUET:
        return _write_parquet(file, head, rows)
    count = 0

    def lines() -> Iterator[Sequence[object]]:
        nonlocal count
        yield head
        for count, row in enumerate(rows, 1):  # noqa: B007
            values = (f"{one:.6g}" for one in row.probabilities)
            yield row.name, row.label, *(values if row.label else [""] * len(classes)), *row[2:5]

    with file.open("w", encoding="utf-8", newline="") as opened:
        write_rows(opened, lines())
    return count


def read(file: Path) -> tuple[tuple[str, ...], Iterator[Row]]:
    """Return classes and rows of a table; raise ValueError if it is of something else."""
    if file.suffix == PARQUET:
        source = _pyarrow().ParquetFile(file)
        return _classes(source.schema_arrow.names), _rows_of_parquet(source)
    with file.open(encoding="utf-8", newline="") as opened:
        return _classes(next(csv.reader(opened), [])), _rows_of_csv(file)


def _classes(head: Sequence[str]) -> tuple[str, ...]:
    names = tuple(head[len(_FIRST) : -len(_LAST)])
    fixed = (*head[: len(_FIRST)], *head[-len(_LAST) :])
    if fixed != (*_FIRST, *_LAST) or not all(name.startswith(PROBABILITY) for name in names):
        raise ValueError("it has other columns")
    return tuple(name.removeprefix(PROBABILITY) for name in names)


def _rows_of_csv(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8", newline="") as opened:
        for cells in map(list, map(dict.values, Reader(opened))):
            name, label, *values, bundle, reason, content = cells
            numbers = tuple(map(float, filter(None, values)))
            yield Row(name, label, bundle, reason, content, numbers)


def _rows_of_parquet(source: Any) -> Iterator[Row]:
    for batch in source.iter_batches(_TOGETHER):
        name, label, *values, bundle, reason, content = map(list, _columns(batch))
        for at, own in enumerate(zip(*values, strict=True)):
            fixed = (name[at], label[at], bundle[at], reason[at], content[at])
            yield Row(*fixed, own if label[at] else ())


def _columns(batch: Any) -> Iterator[Any]:
    return (column.to_pylist() for column in batch.columns)


def _write_parquet(file: Path, head: Sequence[str], rows: Iterable[Row]) -> int:
    import pyarrow

    kinds = {name: pyarrow.float32() for name in head[len(_FIRST) : -len(_LAST)]}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in head])
    count, iterator, empty = 0, iter(rows), (None,) * len(kinds)
    with _pyarrow().ParquetWriter(file, schema) as writer:
        while some := list(itertools.islice(iterator, _TOGETHER)):
            lines = [(*row[:2], *(row.probabilities or empty), *row[2:5]) for row in some]
            columns = zip(zip(*lines, strict=True), schema, strict=True)
            arrays = [pyarrow.array(values, field.type) for values, field in columns]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
            count += len(some)
    return count


def _pyarrow() -> Any:
    """Import it; raise InputError if it is missing."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"a table {PARQUET} needs pip install 'kfp-ddp[parquet]'") from None
    return pyarrow.parquet
