"""Whether stated intervals hold: planted parameters inside their 95 % interval, and steps below their limits.

500 data sets of the rich design (43 cells, three repeats, 3 % log-normal noise): of the parameters that a fit calls
identified, the share whose interval holds the planted value (aim 93-97 %); the same for 100 data sets with intervals
from 400 resamples and 60 with profiles. And 200 logs in time order: the share of new steps below the limits of
their phase at 90 %, 95 % and 99 %, with and without a drift that the fit should flag.
"""

import numpy as np

from latfit.fit.doubts import DoubtOptions, doubts
from latfit.fit.intervals import later_rows, prediction_intervals
from latfit.fit.problem import FitOptions, make_problem
from latfit.fit.solve import solve
from latfit.model.saturation import Saturation
from latfit.trace.table import Trace

THETA = np.array([4.0, 30.0, 1.0, 60.0, 0.15, 0.01, 0.02, 0.002])
NOISE = 0.03
WAYS = (
    (DoubtOptions("sandwich"), 10, 500),
    (DoubtOptions("bootstrap", resamples=400), 2, 100),
    (DoubtOptions("profile"), 1, 60),
)
"""How intervals are made, with the number of data sets of a smoke run and of a whole one."""


def rich_design(repeats: int, seed: int) -> Trace:
    """B in 1..256 and S in 1..4096, S >= B: 43 cells with planted parameters and log-normal noise."""
    B, S = np.meshgrid(2.0 ** np.arange(9), 4.0 ** np.arange(7))
    B, S = (np.repeat(axis[S >= B], repeats) for axis in (B, S))
    T = Saturation().latency_ms(THETA, {"B": B, "S": S})
    return Trace({"B": B, "S": S, "T_ms": T * np.exp(np.random.default_rng(seed).normal(0, NOISE, len(B)))})


def log_of_steps(rows: int, seed: int, drift: float = 0.0) -> Trace:
    """A log in time order: 80 % decode with heavy-tailed noise, 20 % prefill with more; latency grows by `drift`."""
    rng = np.random.default_rng(seed)
    B = rng.integers(1, 65, rows).astype(float)
    prefill = rng.random(rows) < 0.2
    S = np.where(prefill, B + rng.integers(1, 2048, rows), B)
    noise = np.where(prefill, 0.15, 0.05) * rng.standard_t(5, rows)
    level = drift * np.linspace(0.0, 1.0, rows)
    T = Saturation().latency_ms(THETA, {"B": B, "S": S}) * np.exp(noise + level)
    return Trace({"B": B, "S": S, "T_ms": T, "t_s": np.arange(rows) * 0.01})


def parameters_held(data_sets: int, asked: DoubtOptions) -> dict[str, tuple[int, int]]:
    """(held, identified) by parameter, for one way to make intervals."""
    names = [p.name for p in Saturation().parameters if p.fixed is None]
    truth = {p.name: value for p, value in zip(Saturation().parameters, THETA, strict=True)}
    found = dict.fromkeys(names, (0, 0))
    for seed in range(data_sets):
        trace = rich_design(3, seed)
        problem = make_problem(trace, FitOptions())
        estimates = doubts(problem, solve(problem), trace, asked).uncertainty.estimates
        for name in names:
            known = estimates[name]
            if known.identified and known.low is not None and known.high is not None:
                held, of = found[name]
                found[name] = (held + (known.low <= truth[name] <= known.high), of + 1)
    return found


def steps_below(logs: int, drift: float) -> tuple[dict[tuple[str, str], list[float]], float]:
    """({(phase, level): share of new steps below the limit in each log}, share of phases flagged as drifting)."""
    shares: dict[tuple[str, str], list[float]] = {}
    flagged = []
    for seed in range(logs):
        trace, new = log_of_steps(3000, seed), log_of_steps(3000, 10_000 + seed)
        if drift:
            trace, new = log_of_steps(3000, seed, drift), log_of_steps(3000, 10_000 + seed, drift)
        problem = make_problem(trace, FitOptions())
        theta = problem.theta(solve(problem).z)
        left_out = later_rows(trace, FitOptions(), theta)
        assert left_out is not None
        found = prediction_intervals(trace, left_out, ordered=True)["by_phase"]
        decode = new["S"] == new["B"]
        ratio = new["T_ms"] / problem.model.latency_ms(theta, {"B": new["B"], "S": new["S"]})
        for phase, rows in (("decode", decode), ("prefill or mixed", ~decode)):
            flagged.append(bool(found[phase]["drift"]))
            for level, factor in found[phase]["ratio_quantiles"].items():
                shares.setdefault((phase, level), []).append(float(np.mean(ratio[rows] <= factor)))
    return shares, float(np.mean(flagged))


def main(smoke: bool = False) -> None:
    """Print both tables."""
    for asked, few, many in WAYS:
        found = parameters_held(few if smoke else many, asked)
        held, of = (sum(pair[i] for pair in found.values()) for i in (0, 1))
        print(f"coverage, planted parameters, {asked.intervals}: {held} of {of} identified inside: {held / of:.1%}")
        for name, (inside, identified) in found.items():
            print(f"  {name:6} {inside / max(identified, 1):6.1%} of {identified}")
    for drift in (0.0, 0.3):
        shares, flagged = steps_below(3 if smoke else 200, drift)
        print(f"coverage, new steps below their limit, drift {drift:.0%} (flagged in {flagged:.0%} of phases):")
        for (phase, level), values in shares.items():
            print(f"  {phase:16} {float(level):4.0%}: {np.mean(values):.1%} (logs from {min(values):.1%})")


if __name__ == "__main__":
    main()
