"""What earlier versions wrote (`tests/kept`) is still read, and means what it meant: their predictions lie beside."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import latfit
from latfit.hardware import HardwareProfile
from latfit.model import FitResult
from tests.conftest import ROOT

KEPT = ROOT / "tests" / "kept"
SAMPLE = ROOT / "sample_traces" / "cpu_numpy_tiny.parquet"
SAME_LIMITS = ("2026-11-22-8ccbc4d", "2026-11-23-2c1ec44")
"""Versions that made the limits of steps by today's rules."""


def versions(name: str) -> pytest.MarkDecorator:
    found = sorted(KEPT.glob(f"*/{name}"))
    assert found
    return pytest.mark.parametrize("file", found, ids=[each.parent.name for each in found])


def predicted(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((file.parent / "predicted.json").read_text())["rows"]
    return rows


def unpacked(file: Path, folder: Path) -> Path:
    """The document as it was written."""
    target = folder / file.stem
    target.write_bytes(gzip.decompress(file.read_bytes()))
    return target


@versions("fit.json.gz")
def test_a_fit_predicts_what_it_predicted(file: Path, tmp_path: Path) -> None:
    fit = latfit.Fit.load(unpacked(file, tmp_path))
    for row in predicted(file):
        now = fit.predict(B=row["B"], S=row["S"]).iloc[0]
        assert now["T_ms"] == pytest.approx(row["T_ms"], rel=1e-9)
        if file.parent.name in SAME_LIMITS:
            limits = [row.get(f"{end}_ms", row.get(end)) for end in ("low", "high")]
            assert [now["low_ms"], now["high_ms"]] == pytest.approx(limits, rel=1e-9)


@versions("fit.json.gz")
def test_a_fit_that_is_written_again_is_the_same(file: Path, tmp_path: Path) -> None:
    fit = FitResult.read(unpacked(file, tmp_path))
    assert latfit.Fit.from_json(fit.to_json()).to_json() == fit.to_json()


@versions("hardware.json.gz")
def test_a_profile_has_its_paths(file: Path, tmp_path: Path) -> None:
    paths = HardwareProfile.read(unpacked(file, tmp_path)).paths
    rows = predicted(file) if paths["cpu"].fit.model == "saturation" else []  # others ask for the context too
    B, S = (np.array([row[name] for row in rows], dtype=np.float64) for name in ("B", "S"))
    assert paths["cpu"].fit.latency_ms(B, S) == pytest.approx([row["T_ms"] for row in rows], rel=1e-9)
    if "gpu" in paths:  # entered as launch=12ms,slope=0.05ms
        assert paths["gpu"].fit.latency_ms(np.array([1.0, 10.0]), np.array([1.0, 10.0])) == pytest.approx([12.05, 12.5])


@versions("trace.parquet")
def test_a_trace_has_its_steps(file: Path) -> None:
    steps, sample = (latfit.read(source).frame for source in (file, SAMPLE))
    assert len(steps) == len(sample) == 732
    for column in ("B", "S", "T_ms", "context_tokens"):
        assert np.array_equal(steps[column], sample[column])


def test_five_versions_are_kept() -> None:
    assert len([each for each in KEPT.iterdir() if each.is_dir()]) >= 5
