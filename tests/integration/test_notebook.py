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


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    book: Any = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=900, kernel_name="python3", resources=resources).execute()
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    shown = [output for cell in cells for output in cell.outputs]
    pages = [o.data["text/html"] for o in shown if "text/html" in o.get("data", {})]
    assert len(pages) == 1
    assert 'srcdoc="&lt;!doctype' in pages[0]
    assert "publish" in pages[0]
    assert "svg" in pages[0]
    assert "<script" not in html.unescape(pages[0])
    printed = "".join(output.get("text", "") for output in cells[-1].outputs)
    assert set(re.findall(r"rank (\d) of 2", printed)) == {"0", "1"}
