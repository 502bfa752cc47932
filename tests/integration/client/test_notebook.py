"""examples/notebook.ipynb runs in a kernel, and the page on Python as written."""

import html
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.pages import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def execute(folder: Path, **parameters: Any) -> list[Any]:
    """Run the notebook in a folder with other parameters; return its cells of code."""
    book: Any = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    (cell,) = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ()))
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=900, kernel_name="python3", resources=resources).execute()
    return [cell for cell in book.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    """Return what a cell has printed."""
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = execute(tmp_path)
    shown = [output for cell in cells for output in cell.outputs]
    pages = [o.data["text/html"] for o in shown if "text/html" in o.get("data", {})]
    assert len(pages) == 1
    assert 'srcdoc="&lt;!doctype' in pages[0]
    assert "publish" in pages[0]
    assert "svg" in pages[0]
    assert "<script" not in html.unescape(pages[0])
    assert set(re.findall(r"rank (\d) of 2", printed(cells[-2]))) == {"0", "1"}
