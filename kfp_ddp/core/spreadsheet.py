"""CSV tables that people open in a spreadsheet, which computes no cell of them."""

import csv
import re
from collections.abc import Iterable
from typing import Any, TextIO

_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""Begin of a text that a spreadsheet may compute; also the wide characters of East Asia."""


def write_rows(file: TextIO, rows: Iterable[Iterable[object]]) -> None:
    """Write rows as CSV; a text that a spreadsheet would compute gets a `'` before it."""
    writer = csv.writer(file, lineterminator="\n")
    for row in rows:
        writer.writerow(
            [f"'{one}" if isinstance(one, str) and _FORMULA.match(one) else one for one in row]
        )


class Reader(csv.DictReader):  # type: ignore[type-arg]
    """Rows of a table by column, without that `'`."""

    def __next__(self) -> dict[str | Any, str | Any]:
        """Return the next row."""
        return {
            name: cell[1:] if name and cell and cell[0] == "'" and _FORMULA.match(cell) else cell
            for name, cell in super().__next__().items()
        }
