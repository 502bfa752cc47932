"""CSV tables that people open in a spreadsheet, which computes no cell of them."""

import csv
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TextIO

_START = "(?:^|(?<=[;\t\r\n]))"
"""Where a cell starts: also where a spreadsheet takes another separator than the comma."""
_COMPUTED = "(?=['\"]*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20])"
"""Begin of a text that a spreadsheet may compute; also the wide characters of East Asia. Quotation
marks at the start of a cell may be taken for those of the table."""
_UNGUARDED = re.compile(_START + _COMPUTED)
_GUARDED = re.compile(f"{_START}'{_COMPUTED}")
_MARK = "\ufeff"
"""Begin of a text in UTF-8. Excel reads a table without it in the code page of the machine."""


def write_for_excel(file: TextIO, rows: Iterable[Iterable[object]]) -> None:
    """Write rows as `write_rows` to a table that people open: Excel shows all of its letters."""
    file.write(_MARK)
    write_rows(file, rows)


def write_rows(file: TextIO, rows: Iterable[Iterable[object]]) -> None:
    """Write rows as CSV; a text that a spreadsheet would compute gets a `'` before it."""
    # Every text is quoted: before Python 3.13, one with a lone carriage return is not otherwise.
    writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    for row in rows:
        writer.writerow(map(_guarded, row))


def _guarded(value: object) -> object:
    return _UNGUARDED.sub("'", value) if isinstance(value, str) else value


def unguarded(cell: str) -> str:
    """Return the text of a cell as it was before it was written."""
    return _GUARDED.sub("", cell)


class Reader:
    """Rows of a table by column, without that `'`; raise ValueError for what is no table.

    The table may begin with the mark of `write_for_excel`. The file is opened with `newline=""`.
    Cells that a row lacks are empty.
    """

    def __init__(self, file: TextIO) -> None:
        self._rows = self._read(file)
        self.columns = next(self._rows, [])

    def __iter__(self) -> Iterator[dict[str, str]]:
        width = len(self.columns)
        for row in filter(None, self._rows):
            cells = [*row, *[""] * (width - len(row))]
            yield dict(zip(self.columns, cells, strict=False))

    @staticmethod
    def _read(file: TextIO) -> Iterator[list[str]]:
        try:
            first = file.readline().removeprefix(_MARK)
            for row in csv.reader(itertools.chain([first], file)):
                yield list(map(unguarded, row))
        except csv.Error as error:
            raise ValueError(str(error)) from None
