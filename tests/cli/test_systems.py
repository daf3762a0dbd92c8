"""`latfit fit` of files that hold several systems: told by a label, fitted apart, entered into a profile."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit.cli.app import run

Captured = pytest.CaptureFixture[str]
FACTORS = {"a100": 2.0, "h100": 1.0, "l4": 6.0}


def planted(target: Path, column: str) -> Path:
    """Steps of T = factor (5 + 0.05 S) of three machines, in a table with their name in `column`."""
    rng = np.random.default_rng(0)
    B = rng.choice([1, 2, 4, 8, 16, 32], 600)
    S = B * rng.choice([1, 8, 64], 600)
    device = rng.choice(list(FACTORS), 600)
    T = np.array([FACTORS[name] for name in device]) * (5 + 0.05 * S) * np.exp(0.03 * rng.standard_normal(600))
    rows = (f"{b},{s},{t:.6g},{name}" for b, s, t, name in zip(B, S, T, device, strict=True))
    target.write_text("\n".join([f"B,S,T_ms,{column}", *rows]))
    return target


def test_pooled_machines_are_named_and_kept_out_of_the_profile(in_tmp: Path, capsys: Captured) -> None:
    source = planted(in_tmp / "steps.csv", "device")
    assert run(["fit", str(source), "--model", "linear", "--json"]) == 4
    told = capsys.readouterr()
    warning = next(each for each in json.loads(told.out)["warnings"] if each["code"] == "pooled_systems")
    assert "device" in warning["message"]
    assert "--map path=device" in warning["remedy"]
    assert "--map path=device" in told.err
    assert (in_tmp / "steps.fit.json").exists()
    assert not (in_tmp / "hardware.json").exists()
    assert run(["fit", str(source), "--model", "linear", "--map", "path=device"]) == 0
    assert set(json.loads((in_tmp / "hardware.json").read_text())["paths"]) == set(FACTORS)
