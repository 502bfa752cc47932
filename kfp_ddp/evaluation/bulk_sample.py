"""The sample of a table: what the network computes for up to `SIZE` of its images.

Beside each part lies the sample of its images, and beside the table that of all of them: so the
record compares the images of the whole table, whichever attempt has computed them.
"""

import io
import math
from collections.abc import Iterable

from kfp_ddp.core.log import log
from kfp_ddp.core.spreadsheet import Reader, write_rows
from kfp_ddp.core.text import one_line, printable
from kfp_ddp.evaluation.bulk import SAMPLE, Table, content_of
from kfp_ddp.evaluation.drift import Sample, key_of
from kfp_ddp.models.doubt import COLUMNS, Rows
from kfp_ddp.storage.listing import Listing

_COLUMNS = ["name", "bundle", "object", *COLUMNS]
_EARLIER = ["name", "bundle", "object", "0", "1"]
"""The first columns of a sample of an earlier version, which has more."""
_LARGEST = 1 << 26
"""Bytes: a thousand rows of a hundred numbers take a MB."""


def store(table: Table, name: str, listing: Listing, sample: Sample) -> None:
    """Store the rows of listed images beside the file of this name."""
    keys = map(key_of, listing.names)
    chosen = [(at, sample.rows[key]) for at, key in enumerate(keys) if key in sample.rows]
    if not chosen:
        return
    text = io.StringIO(newline="")
    rows = (
        [listing.names[at], table.bundle, content_of(listing, at), *values] for at, values in chosen
    )
    write_rows(text, [_COLUMNS, *rows])
    table.store.write(f"{name}{SAMPLE}", text.getvalue().encode())


def read(table: Table, listing: Listing, reference: Rows | None) -> tuple[Sample, Sample]:
    """Return the samples of all listed images, and of those that the table does not have yet.

    Both are empty without a reference to compare them with.
    """
    if reference is None:
        return Sample(), Sample()
    new = _read(table, table.part_names(SAMPLE), listing)
    old = _read(table, [f"{table.name}{SAMPLE}"], listing)
    return old.merge([new.rows]), new


def _read(table: Table, names: Iterable[str], listing: Listing) -> Sample:
    sample = Sample()
    for name in names:
        content = table.store.read(name, _LARGEST)
        if content is None:
            continue
        try:
            sample.merge([_rows(table, listing, content.decode())])
        except ValueError as error:
            shown = printable(one_line(error, 200))
            log.info(f"{table.store.uri}/{name} is no sample of this table: {shown}")
    return sample


def _rows(table: Table, listing: Listing, text: str) -> dict[bytes, list[float]]:
    """Return the rows of images that are listed like this; raise ValueError for another file."""
    reader = Reader(io.StringIO(text, newline=""))
    if reader.columns[: len(_COLUMNS)] not in (_COLUMNS, _EARLIER):
        raise ValueError(f"its columns are not {', '.join(_COLUMNS)}")
    rows = dict[bytes, list[float]]()
    for row in reader:
        name, bundle, content, *cells = row.values()
        values = list(map(float, cells[: len(COLUMNS)]))
        if not all(map(math.isfinite, values)):
            raise ValueError("a number is not finite")
        if table.position(listing, name, bundle, content) >= 0:
            rows[key_of(name)] = values
    return rows
