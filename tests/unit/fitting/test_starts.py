"""Several runs a side: planted starts, how often an alarm is false, and what is no run."""

import numpy as np
import pytest

from latfit.errors import BadInput
from latfit.fitting.compare import Change, Measured, change_over_starts
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.model.fit_result import FitResult
from tests.conftest import planted_trace

START_SD = 0.08


@pytest.fixture(scope="module")
def fit() -> FitResult:
    return fit_trace(planted_trace(0.05, repeats=4, seed=1), FitOptions("linear"))


def compared(fit: FitResult, seed: int, slower: float, runs: int = 3) -> Change:
    """Runs of starts whose speed scatters, those of the other side slower by a factor."""
    rng = np.random.default_rng(seed)
    sides = []
    for factor in (1.0, slower):
        side = []
        for i in range(runs):
            trace = planted_trace(0.05, repeats=2, seed=100 * seed + i)
            start = factor * float(np.exp(START_SD * rng.normal()))
            side.append(Measured.of(fit, trace.with_columns(T_ms=start * trace.floats("T_ms"))))
        sides.append(side)
    return change_over_starts(sides[0], sides[1], 5)


def test_no_alarm_where_only_starts_differ(fit: FitResult) -> None:
    """Slower by exactly the tolerance: at most 5 % of comparisons may raise an alarm, 18 of 200 come up in 1 %."""
    alarms = sum(compared(fit, seed, 1.05).gravest == "slower" for seed in range(200))
    assert alarms < 18


def test_a_slowdown_beyond_the_starts_is_found(fit: FitResult) -> None:
    """60 % are eight standard errors of a difference of 3 + 3 starts; t of 4 degrees of freedom needs three."""
    found = compared(fit, 3, 1.6)
    assert found.gravest == "slower"
    assert found.starts == (3, 3)
    assert found.start_sd_pct == pytest.approx(100 * START_SD, rel=0.8)
    for phase in found.phases:
        assert phase.low_pct is not None
        assert phase.low_pct < 60 < (phase.high_pct or 0.0)


def test_fits_without_steps_are_no_runs(fit: FitResult) -> None:
    with pytest.raises(BadInput, match="no run"):
        change_over_starts([Measured(fit)] * 2, [Measured(fit)] * 2, 5)
