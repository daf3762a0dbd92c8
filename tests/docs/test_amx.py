"""What pages say of AMX: their tables are those that the script prints, and the evidence is that of the traces."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import latfit
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "how-to" / "cpu-or-gpu.md").read_text()
PROFILE = (ROOT / "docs" / "how-to" / "profile.md").read_text()
SAMPLES = ROOT / "sample_traces"


@pytest.mark.nightly
def test_tables_are_those_of_the_traces(tmp_path: Path) -> None:
    figure = tmp_path / "amx.png"
    made = subprocess.run(
        [sys.executable, ROOT / "examples" / "amx.py", figure], capture_output=True, text=True, check=True
    )
    lines = [line for line in made.stdout.splitlines() if line]
    assert len(lines) > 20
    assert [line for line in lines if line not in PAGE] == []
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("isa", ["amx", "avx512"])
@pytest.mark.parametrize("library", ["openvino", "torch"])
def test_the_evidence_shown_is_that_of_the_trace(isa: str, library: str) -> None:
    trace = latfit.read(SAMPLES / f"{isa}_{library}_smollm2-135m.parquet").trace
    ((path, facts),) = trace.provenance["paths"].items()
    evidence = facts["device"]["evidence"]
    assert path == ("amx" if isa == "amx" else "cpu")
    assert json.dumps(evidence["products"]) in PROFILE
    assert json.dumps(evidence.get("execution_types", [])).strip("[]") in PROFILE
