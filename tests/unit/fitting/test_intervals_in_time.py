"""Limits of steps whose noise lasts: what is promised holds in fresh runs, what a run cannot tell is not promised."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.signal import lfilter

from latfit.fitting.checking.conformal import later_rows, prediction_intervals
from latfit.fitting.checking.crossval import cross_validate
from latfit.fitting.data import fit_data, rows_of
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.stats import FloatArray
from latfit.trace.table import Trace

LINE = FitOptions(model="linear")


def autoregression(n: int, r: float, rng: np.random.Generator) -> FloatArray:
    """A stationary series (n,) of variance 1 whose neighbours have correlation r."""
    shocks = rng.standard_normal(n) * math.sqrt(1 - r**2)
    shocks[0] = rng.standard_normal()
    return np.asarray(lfilter([1.0], [1.0, -r], shocks))


Noise = Callable[[np.random.Generator, FloatArray, FloatArray], FloatArray]


def run_of(rng: np.random.Generator, n: int, noise: Noise, *, prefill: float = 0.0) -> Trace:
    """A run of steps of random sizes, T = 2 + 0.3 B + 0.01 (S - B) ms times the noise; a share holds prefill."""
    B = rng.integers(1, 65, n).astype(float)
    S = B + np.where(rng.random(n) < prefill, rng.integers(1, 1024, n), 0)
    columns = {"B": B, "S": S, "T_ms": (2 + 0.29 * B + 0.01 * S) * np.exp(noise(rng, B, S))}
    return Trace({**columns, "t_s": np.arange(n) * 0.01})


def limits_of(trace: Trace) -> tuple[dict[str, dict[str, dict[str, float | None]]], Callable[[Trace], FloatArray]]:
    """(intervals by phase, ln(observed/typical) of other steps) of a straight line fitted to a run."""
    problem = make_problem(rows_of(trace), LINE)
    theta = problem.theta(solve(problem).z)
    held, later = cross_validate(fit_data(trace), LINE, theta)[1], later_rows(fit_data(trace), LINE, theta)
    assert held is not None
    found = (
        prediction_intervals(fit_data(trace), held, ordered=False)
        if later is None
        else prediction_intervals(fit_data(trace), later, ordered=True, blocks=held)
    )

    def ratio(other: Trace) -> FloatArray:
        typical = problem.model.latency_ms(theta, {"B": other["B"], "S": other["S"]})
        return np.asarray(np.log(other["T_ms"] / typical))

    return found["by_phase"], ratio


class Held:
    """By phase and limit, for each fit that gives it: the share of the steps of fresh runs that stay within."""

    def __init__(self) -> None:
        self.shares: dict[tuple[str, str], list[float]] = {}

    def add(self, trace: Trace, fresh: list[Trace]) -> None:
        by_phase, ratio = limits_of(trace)
        steps = [(ratio(run), run["S"] == run["B"]) for run in fresh]
        for phase, entry in by_phase.items():
            scores = np.concatenate([score[decode == (phase == "decode")] for score, decode in steps])
            upper, lower = entry["ratio_quantiles"]["0.95"], entry["lower_quantiles"]["0.95"]
            if upper is not None:
                self.shares.setdefault((phase, "95 % one-sided"), []).append(float(np.mean(scores <= math.log(upper))))
            if upper is not None and lower is not None:
                inside = (scores <= math.log(upper)) & (scores >= math.log(lower))
                self.shares.setdefault((phase, "90 % two-sided"), []).append(float(np.mean(inside)))

    def mean(self, phase: str, limit: str) -> float:
        return float(np.mean(self.shares[phase, limit]))


class TestFreshRuns:
    @pytest.mark.parametrize("r", [0.0, 0.5, 0.9, 0.99])
    def test_a_limit_holds_in_other_runs_or_is_not_given(self, r: float) -> None:
        """12 fits, 10 fresh runs each. A run of 1,500 steps of correlation 0.99 is worth 7.5: it tells neither level,
        which take 19. White noise has no more than its level, to 1.5 points; all others no less, to 2."""
        rng, held, given = np.random.default_rng(int(100 * r)), Held(), 0

        def noise(rng: np.random.Generator, B: FloatArray, S: FloatArray) -> FloatArray:
            return 0.1 * autoregression(len(B), r, rng)

        for _ in range(12):
            held.add(run_of(rng, 1500, noise), [run_of(rng, 1500, noise) for _ in range(10)])
        for (_, limit), shares in held.shares.items():
            level = 0.95 if "95" in limit else 0.9
            assert np.mean(shares) > level - 0.02
            assert r > 0 or abs(np.mean(shares) - level) < 0.015
            given += len(shares)
        assert given == 24 if r < 0.95 else given <= 4


class TestWords:
    def test_a_run_that_tells_little_says_so_with_a_remedy(self) -> None:
        """2,000 steps of correlation 0.99 are worth some 10; as 2,000 they would promise 90 % and hold 85 %."""
        rng = np.random.default_rng(3)
        n = 2000
        trace = run_of(rng, n, lambda rng, B, S: 0.1 * autoregression(n, 0.99, rng))
        found = fit_trace(trace, LINE)
        decode = found.intervals["by_phase"]["decode"]
        assert decode["ratio_quantiles"]["0.95"] is None
        assert "1,000 steps in a row carry " in decode["reason"]
        assert "too few for intervals at" in decode["reason"]
        assert "such runs" in decode["reason"]
        assert n * decode["independent_share"] < 19
        caution = next(warning for warning in found.warnings if warning.code == "no_interval")
        assert "several separate runs" in caution.remedy


def slower(size: float, noise: float) -> Noise:
    """Noise under a latency that is higher by `size` from 60 % of the run on."""

    def added(rng: np.random.Generator, B: FloatArray, S: FloatArray) -> FloatArray:
        return noise * rng.standard_normal(len(B)) + size * (np.arange(len(B)) >= 0.6 * len(B))

    return added


class TestDrift:
    def test_it_is_a_warning_with_its_size_and_its_time(self) -> None:
        trace = run_of(np.random.default_rng(6), 2000, slower(0.1, 0.05))
        said = next(warning for warning in fit_trace(trace, LINE).warnings if warning.code == "drift").message
        assert "11 % slower" in said
        assert abs(float(said.split("t = ")[1].split(" s")[0]) - 12.0) < 0.3
