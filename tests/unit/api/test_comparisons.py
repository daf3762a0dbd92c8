"""Runs of several starts of an engine compared: what single starts cannot show, and what several a side do."""

from pathlib import Path

import numpy as np
import pytest

from latfit.api import Fit, compare, fit
from latfit.errors import WrongUsage
from tests.conftest import planted_trace
from tests.unit.trace.test_vllm import step


@pytest.fixture(scope="module")
def runs() -> list[Fit]:
    """A and B in turn, B 50 % slower, starts 2 % apart; recorders name the start that steps are of."""
    found = []
    for i in range(6):
        trace = planted_trace(0.05, repeats=3, seed=i)
        slower = (1.5 if i % 2 else 1.0) * (1 + 0.02 * (i // 2))
        run = np.full(len(trace), f"20261125T21{i}501Z-{i:06x}", dtype=object)
        found.append(fit(trace.with_columns(T_ms=slower * trace.floats("T_ms"), run=run), model="linear"))
    return found


def test_two_single_starts_give_no_regression(runs: list[Fit]) -> None:
    found = compare(*runs[:2], names=["a", "b"])
    assert found.verdicts == ["unclear"]
    assert not found.slower
    assert found.sentences[0].startswith("Not separable: slower in ")
    assert "--alternate" in " ".join(each.message for each in found.messages)


def test_several_starts_a_side_give_one(runs: list[Fit]) -> None:
    found = compare(*runs, alternate=True)
    assert found.verdicts == ["slower"]
    (document,) = found.to_json()["compared"]
    assert document["starts"] == [3, 3]
    assert document["start_sd_pct"] == pytest.approx(2, abs=1)
    for phase in document["phases"]:
        assert phase["low_pct"] < 50 < phase["high_pct"]


def test_parts_of_one_start_are_no_runs(runs: list[Fit]) -> None:
    with pytest.raises(WrongUsage, match="are of one start"):
        compare(runs[0], runs[1], runs[0], runs[3], alternate=True)
    with pytest.raises(WrongUsage, match="not 2 or more a side"):
        compare(*runs[:3], alternate=True)


def test_two_logs_of_vllm_are_compared(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text("".join(step(i, ms=f"{10 + i % 7 / 100}") for i in range(60)))
    assert compare(tmp_path / "a.log", tmp_path / "b.log").verdicts == ["as fast"]
