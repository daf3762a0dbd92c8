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
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in data for data in shown)
    cards = [data["text/html"] for data in shown if "<img" in data.get("text/html", "")]
    assert len(cards) >= 4  # the fit, the plan, the simulation and the validation, each with its figure
    assert all(len(card) < 250_000 for card in cards)
