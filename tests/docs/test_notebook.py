"""The example notebook runs as it stands, cell by cell, in a kernel of its own."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

NOTEBOOK = ROOT / "examples" / "library.ipynb"


@pytest.mark.nightly
def test_the_notebook_runs() -> None:
    """An error in a cell raises CellExecutionError with its traceback."""
    notebook = nbformat.reads(NOTEBOOK.read_text(), as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()
    shown = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert "image/png" in shown
    assert shown.count("text/html") >= 8
