"""Whether the solver's optimum is the best there is: every family on planted and measured steps beside its peers.

`python -m benchmarks.optimum [--smoke] [FAMILY ...]`. Peers minimise the same cost, at the scale of the loss that the
solver ended with, from starts that know nothing of the structure: SciPy's `least_squares` (trf) from nine, with the
Jacobian, lmfit and iminuit's MIGRAD from one, with numeric slopes. Excess is the solver's cost over the best of
theirs, less one; up to 1 % passes: 0.5 % of the residuals. Measured steps are those of the folder that LATFIT_DATA
names, at most 1,500 rows a system.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.accuracy import systems
from benchmarks.fit_speed import with_iminuit, with_lmfit
from benchmarks.fit_time import naive
from latfit.fitting.data import rows_of
from latfit.fitting.model_selection import settled
from latfit.fitting.problem import FitOptions, FitProblem, make_problem
from latfit.fitting.solver.levenberg_marquardt import Minimum, Objective
from latfit.fitting.solver.loss import RHO
from latfit.fitting.solver.objective import by_cell, remembered
from latfit.fitting.solver.solve import solve
from latfit.model.registry import FAMILY
from latfit.stats import FloatArray, weighted_quantile
from latfit.trace.table import Trace

PASSES = 1e-2
MOST_ROWS = 1_500
STARTS = 8
NOISE = (0.01, 0.1)
SMOKE = ("hinge", "saturation+moe")


def planted(noise: float, outliers: float, rows: int = 800, seed: int = 0) -> Trace:
    """Decode, prefill and mixed steps with a cached context, on a machine with a corner that saturates."""
    rng = np.random.default_rng(seed)
    prefill = rng.random(rows) < 0.4
    decoding = rng.integers(1, 129, rows)
    n = np.where(prefill, rng.integers(1, 4, rows), 0)
    tokens = np.where(prefill, n * np.round(2 ** rng.uniform(3, 10, rows)), 0)
    cached = np.where(prefill, n * np.round(2 ** rng.uniform(0, 12, rows)), 0)
    B, S = (decoding + n).astype(float), (decoding + tokens).astype(float)
    context = cached + decoding * np.round(2 ** rng.uniform(4, 11, rows))
    work = np.hypot(8.0, 0.06 * S) + 0.05 * B + 2e-4 * context + 6 * -np.expm1(-0.03 * S)
    factor = np.exp(rng.normal(0, noise, rows)) * np.where(rng.random(rows) < outliers, 5.0, 1.0)
    return Trace(
        {
            "B": B,
            "S": S,
            "prefill_requests": n.astype(float),
            "prefill_tokens": tokens.astype(float),
            "prefill_context_tokens": cached.astype(float),
            "context_tokens": context.astype(float),
            "T_ms": work * factor,
        }
    )


def sets(smoke: bool) -> Iterator[tuple[str, Trace]]:
    """(label, rows): planted ones, then those measured."""
    for noise in NOISE[:1] if smoke else NOISE:
        for outliers in (0.03,) if smoke else (0.0, 0.03):
            yield f"planted, noise {noise:g}, outliers {outliers:g}", planted(noise, outliers, 200 if smoke else 800)
    folder = Path(os.environ.get("LATFIT_DATA", "")) / "steps"
    if smoke or "LATFIT_DATA" not in os.environ:
        return
    rng = np.random.default_rng(0)
    for label, rows in systems(folder, False):
        few = np.sort(rng.choice(len(rows), min(len(rows), MOST_ROWS), replace=False))
        yield label, rows.select(few)


RANDOM_SPREAD = 2.0


def naive_points(problem: FitProblem, wanted: int) -> list[FloatArray]:
    """Return starts in z that ignore the structure: the textbook one, zero, and random ones of order one."""
    rng = np.random.default_rng(problem.options.seed)
    drawn = rng.normal(0.0, RANDOM_SPREAD, (max(wanted - 1, 0), len(problem.free)))
    drawn[:1] = 0.0
    positive = [p.positive for p in problem.free_parameters]
    signed = np.abs(drawn) * np.where(positive, np.sign(drawn), 1.0)
    return [problem.coordinates(textbook_start(problem)), *np.clip(signed, problem.lower, problem.upper)]


def textbook_start(problem: FitProblem) -> FloatArray:
    """Return the textbook start of the saturation model, as theta (p,).

    P_max is the 95th percentile of S/T, k_B and k_S a tenth and a hundredth of their scale, tau_0 half the 5th
    percentile of T. Shapes start in the middle of their range, other coefficients small.
    """
    T, weights = problem.observed, problem.weights
    guess = {
        "tau_0": 0.5 * weighted_quantile(T, 0.05, weights),
        "w_0": 1.0,
        "w_1": 1.0,
        "P_max": weighted_quantile(problem.steps["S"] / T, 0.95, weights),
    }
    factor = {"k_B": 0.1, "k_S": 0.01}
    theta = np.empty(len(problem.scales))
    for i, (parameter, scale) in enumerate(zip(problem.model.parameters, problem.scales, strict=True)):
        small = 1.0 if parameter.positive else 0.01
        value = guess.get(parameter.name, factor.get(parameter.name, small) * float(scale))
        theta[i] = problem.fixed.get(parameter.name, value)
    return theta


def trust_region(objective: Objective, start: FloatArray) -> Minimum:
    """Minimise by SciPy's trust-region reflective algorithm on all rows, without priors."""
    problem, rows = objective.problem, objective.rows
    rho, sizes = RHO[problem.options.loss], rows.sizes
    with np.errstate(all="ignore"):  # aliased columns cause division by zero in SciPy's subproblem
        result = least_squares(
            lambda z: rows.by_row(rows.predicted(z)) - rows.y,
            np.clip(start, problem.lower, problem.upper),
            jac=lambda z: np.repeat(problem.jacobian(z), sizes, axis=0),
            bounds=(problem.lower, problem.upper),
            method="trf",
            x_scale="jac",
            loss=lambda z: np.asarray(rho(z) * rows.weights),
            f_scale=objective.f_scale,
            ftol=1e-11,
            xtol=1e-11,
            gtol=1e-11,
            max_nfev=400,
        )
    return Minimum(result.x, objective.cost(result.x), bool(result.status > 0))


def excess(problem: FitProblem, peers: bool = True) -> tuple[float, float, float]:
    """(our cost over the best other one, less one; seconds of ours; seconds of the others)."""
    began = time.process_time()
    found = solve(problem)
    ours = time.process_time() - began
    objective = Objective(by_cell(remembered(problem)), found.f_scale)
    began = time.process_time()
    ends = [trust_region(objective, z).cost for z in naive_points(problem, STARTS)]
    ends.append(naive(problem, found.f_scale))
    if peers:
        for peer in (with_lmfit, with_iminuit):
            try:
                ends.append(peer(problem, found.f_scale))
            except ImportError:
                continue
    best = min(ends)
    return (found.cost / best - 1 if best > 0 else 0.0), ours, time.process_time() - began


def main(smoke: bool = False, names: list[str] | None = None) -> None:
    """Print every case that fails, and the worst excess of each family."""
    worst: dict[str, float] = {}
    cases = failed = 0
    for label, rows in sets(smoke):
        for name in names or (SMOKE if smoke else FAMILY):
            problem = make_problem(rows_of(rows), settled(rows_of(rows), FitOptions(model=name)))
            if not problem.free:
                continue
            found, ours, theirs = excess(problem)
            cases += 1
            worst[name] = max(worst.get(name, -1.0), found)
            if found > PASSES:
                failed += 1
                print(f"  {label}: {name}: excess {found:.1e} ({ours:.2f} s against {theirs:.2f} s)", flush=True)
    for name, value in worst.items():
        print(f"optimum, {name}: worst excess {value:.1e}")
    print(f"optimum: {cases} cases, {failed} with an excess above {PASSES:g}")


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:], [name for name in sys.argv[1:] if not name.startswith("--")])
