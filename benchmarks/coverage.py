"""Whether stated intervals hold: planted parameters inside their 95 % interval, and steps below their limits.

500 data sets of the rich design (43 cells, three repeats, 3 % log-normal noise): of the parameters that a fit calls
identified, the share whose interval holds the planted value (aim 93-97 %); the same for 100 data sets with intervals
from 400 resamples and 60 with profiles. And 200 logs in time order: the share of new steps below the limits of
their phase at 90 %, 95 % and 99 %, with and without a drift that the fit should flag.

Runs whose noise lasts: 2,000 steps of random B with autoregressive noise of 10 %, with times and without; the share of
the steps of 20 fresh runs within the two-sided 90 % interval and below the 95 % limit, in the mean over 200 fits that
give it, how many do, and how many independent steps they count. The same with noise of no memory that differs by phase
or by size, with heavy tails, and with pauses.
"""

from collections.abc import Callable, Iterator

import numpy as np

from latfit.fitting.bootstrap import DoubtOptions, doubts
from latfit.fitting.checking.conformal import later_rows, prediction_intervals
from latfit.fitting.checking.crossval import cross_validate
from latfit.fitting.data import fit_data, rows_of
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.model.formulas import Saturation
from latfit.stats import FloatArray
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
        problem = make_problem(rows_of(trace), FitOptions("saturation"))
        estimates = doubts(problem, solve(problem), fit_data(trace), asked)[0].estimates
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
        problem = make_problem(rows_of(trace), FitOptions("saturation"))
        theta = problem.theta(solve(problem).z)
        left_out = later_rows(fit_data(trace), FitOptions("saturation"), theta)
        blocks = cross_validate(fit_data(trace), FitOptions("saturation"), theta)[1]
        assert left_out is not None
        assert blocks is not None
        found = prediction_intervals(fit_data(trace), left_out, ordered=True, blocks=blocks)["by_phase"]
        decode = new["S"] == new["B"]
        ratio = new["T_ms"] / problem.model.latency_ms(theta, {"B": new["B"], "S": new["S"]})
        for phase, rows in (("decode", decode), ("prefill or mixed", ~decode)):
            flagged.append(bool(found[phase]["drift"]))
            for level, factor in found[phase]["ratio_quantiles"].items():
                if factor is not None:
                    shares.setdefault((phase, level), []).append(float(np.mean(ratio[rows] <= factor)))
    return shares, float(np.mean(flagged))


Noise = Callable[[np.random.Generator, FloatArray, FloatArray], FloatArray]


def lasting(r: float) -> Noise:
    """Noise of 10 % whose neighbours have correlation r."""

    def drawn(rng: np.random.Generator, B: FloatArray, S: FloatArray) -> FloatArray:
        shocks = 0.1 * np.sqrt(1 - r**2) * rng.standard_normal(len(B))
        series = np.empty(len(B))
        level = 0.1 * float(rng.standard_normal())
        for i, shock in enumerate(shocks.tolist()):
            level = r * level + shock
            series[i] = level
        return series

    return drawn


def by_phase(rng: np.random.Generator, B: FloatArray, S: FloatArray) -> FloatArray:
    """2 % for steps that decode, 15 % for others."""
    return np.asarray(np.where(S == B, 0.02, 0.15) * rng.standard_normal(len(B)))


def by_size(rng: np.random.Generator, B: FloatArray, S: FloatArray) -> FloatArray:
    """2 % for short steps, 10 % for those of 1,000 tokens."""
    return np.asarray(0.02 * (1 + S / 250) * rng.standard_normal(len(B)))


def heavy_tails(rng: np.random.Generator, B: FloatArray, S: FloatArray) -> FloatArray:
    """Student's t with 3 degrees of freedom."""
    return np.asarray(np.where(S == B, 0.02, 0.1) * rng.standard_t(3, len(B)))


def pauses(rng: np.random.Generator, B: FloatArray, S: FloatArray) -> FloatArray:
    """3 %, and six steps of a thousand take 40 to 60 times as long."""
    stuck = rng.random(len(B)) < 0.006
    return np.asarray(np.where(stuck, np.log(rng.uniform(40, 60, len(B))), 0.03 * rng.standard_normal(len(B))))


def run_of(rng: np.random.Generator, rows: int, noise: Noise, times: bool, prefill: float) -> Trace:
    """A run of steps of random sizes with planted noise; a share of them holds prefill."""
    B = rng.integers(1, 65, rows).astype(float)
    S = B + np.where(rng.random(rows) < prefill, rng.integers(1, 1024, rows), 0)
    T = (2 + 0.3 * B + 0.01 * (S - B)) * np.exp(noise(rng, B, S))
    return Trace({"B": B, "S": S, "T_ms": T, **({"t_s": np.arange(rows) * 0.01} if times else {})})


def held_in_fresh_runs(fits: int, noise: Noise, times: bool, prefill: float) -> Iterator[str]:
    """A line a phase: how often its limits hold in other runs of the same machine, and how often there are any."""
    options, rng = FitOptions(model="linear"), np.random.default_rng(0)
    inside: dict[str, list[float]] = {}
    below: dict[str, list[float]] = {}
    counted: dict[str, list[float]] = {}
    for _ in range(fits):
        trace = run_of(rng, 2000, noise, times, prefill)
        problem = make_problem(rows_of(trace), options)
        theta = problem.theta(solve(problem).z)
        blocks, later = cross_validate(fit_data(trace), options, theta)[1], later_rows(fit_data(trace), options, theta)
        assert blocks is not None
        if later is None:
            found = prediction_intervals(fit_data(trace), blocks, ordered=False)
        else:
            found = prediction_intervals(fit_data(trace), later, ordered=True, blocks=blocks)
        fresh = [run_of(rng, 2000, noise, times, prefill) for _ in range(20)]
        B, S, T = (np.concatenate([run[name] for run in fresh]) for name in ("B", "S", "T_ms"))
        ratio = T / problem.model.latency_ms(theta, {"B": B, "S": S})
        for phase, entry in found["by_phase"].items():
            seen = ratio[(S == B) == (phase == "decode")]
            counted.setdefault(phase, []).append(entry["n"] * entry["independent_share"])
            upper, lower = entry["ratio_quantiles"]["0.95"], entry["lower_quantiles"]["0.95"]
            if upper is not None:
                below.setdefault(phase, []).append(float(np.mean(seen <= upper)))
                if lower is not None:
                    inside.setdefault(phase, []).append(float(np.mean((seen <= upper) & (seen >= lower))))
    for phase in sorted(counted):
        held = [f"{np.mean(shares[phase]):.1%}" if phase in shares else "none" for shares in (inside, below)]
        given = len(inside.get(phase, []))
        yield (
            f"  {phase:16} 90 % interval {held[0]:>6}, 95 % limit {held[1]:>6}; given by {given} of {fits} fits, which"
            f" count {np.median(counted[phase]):.0f} independent steps"
        )


def main(smoke: bool = False) -> None:
    """Print all tables."""
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
            told = f"{np.mean(values):.1%} (logs from {min(values):.1%}; {len(values)} logs)"
            print(f"  {phase:16} {float(level):4.0%}: {told}")
    fits = 3 if smoke else 200
    for times in (True, False):
        where = "with times" if times else "without times"
        for r in (0.0, 0.5, 0.9, 0.99):
            print(f"coverage, fresh runs, correlation {r:g}, {where}:")
            print("\n".join(held_in_fresh_runs(fits, lasting(r), times, 0.0)))
        for noise in (by_phase, by_size, heavy_tails, pauses):
            print(f"coverage, fresh runs, {noise.__name__.replace('_', ' ')}, {where}:")
            print("\n".join(held_in_fresh_runs(fits, noise, times, 0.2)))


if __name__ == "__main__":
    main()
