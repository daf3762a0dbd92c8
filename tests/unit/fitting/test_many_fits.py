"""Fits of many systems: the same as one by one, on several processes, and what fails is told."""

from typing import Any

import numpy as np
import pytest

import latfit
from latfit.errors import BadInput, WrongUsage
from latfit.fitting import many_fits
from latfit.fitting.bootstrap import DoubtOptions
from latfit.fitting.problem import FitOptions
from latfit.trace.table import Trace

SYSTEMS, ROWS = 5, 24


def planted(systems: int = SYSTEMS) -> dict[str, Any]:
    """T = (i + 1) (3 + 0.1 B + 0.02 S) of system i, rows of all systems in any order."""
    rng = np.random.default_rng(1)
    number = rng.permutation(np.repeat(np.arange(systems), ROWS))
    B = rng.integers(1, 33, len(number))
    S = B + rng.integers(0, 500, len(number))
    T = (number + 1) * (3 + 0.1 * B + 0.02 * S) * np.exp(0.01 * rng.standard_normal(len(number)))
    return {"B": B, "S": S, "T_ms": T, "model": np.array([f"m/{i}" for i in number], dtype=object)}


def test_processes_give_the_fits_that_one_gives() -> None:
    columns = planted()
    told: list[str] = []
    progress: list[Any] = []
    fits = latfit.fit_each(
        columns,
        model="linear",
        made=lambda label, found: told.append(label),
        progress=lambda *done: progress.append(done),
    )
    assert sorted(told) == sorted(fits)
    assert max(progress) == (SYSTEMS, SYSTEMS)
    assert list(fits) == [f"m%2F{i}" for i in dict.fromkeys(int(name[2:]) for name in columns["model"])]
    for label, found in fits.items():
        rows = columns["model"] == label.replace("%2F", "/")
        alone = latfit.fit({name: column[rows] for name, column in columns.items()}, model="linear")
        assert found.result.parameters == alone.result.parameters
        scale = int(label.removeprefix("m%2F")) + 1
        assert found.result.parameters["tau_S"].value == pytest.approx(0.02 * scale, rel=0.05)


def test_an_error_in_one_fit_is_recorded_and_one_in_all_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = planted(3)
    whole = many_fits.FitTask.run

    def done(task: many_fits.FitTask) -> many_fits.Outcome:
        if task.data["system"] == {"model": "m/1"}:
            return BadInput("no good", remedy="Make it better.")
        return whole(task)

    monkeypatch.setattr(many_fits.FitTask, "run", done)
    fits = latfit.fit_each(columns, model="linear")
    assert {label: found.ok for label, found in fits.items()} == {"m%2F0": True, "m%2F1": False, "m%2F2": True}
    assert [each.message for each in fits["m%2F1"].warnings] == ["no good"]
    with pytest.raises(WrongUsage, match="k_Z"):
        latfit.fit_each(columns, model="linear", fix={"k_Z": 1.0})


def test_a_process_that_dies_costs_its_system_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_fits, "WORKER", "import sys; sys.exit(1)")
    task = many_fits.FitTask(Trace(planted(1)), FitOptions("linear"), DoubtOptions(), {}, {})
    outcomes = dict(many_fits.fit_all(lambda number: task, 3, workers=2))
    assert len(outcomes) == 3
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes.values())
