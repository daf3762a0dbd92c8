"""How fast the solver is beside SciPy's `least_squares` (trf), lmfit and iminuit: same rows, same Huber loss at one
scale, same box, numeric derivatives and a naive start for the peers, one thread.

Our side goes from the trace to the parameters: rows gathered, a start and the loss's scale searched, all of it counted.
The peers are given the scale, and the rows as they are. Times are those of the processor that the process used.

Aims: 20 times SciPy at a million rows, 10 times at 100,000, as fast as it below 5,000 rows, and a final cost
never above the best peer's by more than 1 %. Run it with OPENBLAS_NUM_THREADS=1: threads of a linear algebra library
that wait for each other on a busy machine slow either side tenfold.
"""

import os
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.fit_time import as_they_are, naive, synthetic
from benchmarks.timing import paired
from latfit.fitting.data import rows_of
from latfit.fitting.problem import FitOptions, FitProblem, make_problem
from latfit.fitting.solver.loss import RHO, total_cost
from latfit.fitting.solver.solve import solve
from latfit.stats import FloatArray

ROWS = (1_000, 4_000, 10_000, 100_000, 1_000_000)


def pseudo_residuals(problem: FitProblem, z: FloatArray, f_scale: float) -> FloatArray:
    """Residuals whose sum of squares is twice the robust cost."""
    square = (problem.residuals(z) / f_scale) ** 2
    return np.asarray(f_scale * np.sqrt(problem.weights * RHO["huber"](square)[0]))


def with_lmfit(problem: FitProblem, f_scale: float) -> float:
    """Cost that lmfit's `least_squares` reaches from the naive start."""
    import lmfit

    parameters = lmfit.Parameters()
    for i, (low, high) in enumerate(zip(problem.lower, problem.upper, strict=True)):
        parameters.add(f"z{i}", value=float(np.clip(0.5, low, high)), min=low, max=high)

    def residuals(found: lmfit.Parameters) -> FloatArray:
        return pseudo_residuals(problem, np.array(list(found.valuesdict().values())), f_scale)

    end = lmfit.minimize(residuals, parameters, method="least_squares")
    z = np.array(list(end.params.valuesdict().values()))
    return total_cost("huber", problem.residuals(z), f_scale, problem.weights)


def with_iminuit(problem: FitProblem, f_scale: float) -> float:
    """Cost that MIGRAD reaches from the naive start."""
    from iminuit import Minuit

    def cost(z: FloatArray) -> float:
        return total_cost("huber", problem.residuals(z), f_scale, problem.weights)

    search = Minuit(cost, np.clip(np.full(len(problem.free), 0.5), problem.lower, problem.upper))
    search.limits = list(zip(problem.lower, problem.upper, strict=True))
    search.errordef = Minuit.LEAST_SQUARES
    search.migrad()
    return float(search.fval)


PEERS: dict[str, Callable[[FitProblem, float], float]] = {"SciPy": naive, "lmfit": with_lmfit, "iminuit": with_iminuit}


def compare(rows: int, pairs: int, peers: dict[str, Callable[[FitProblem, float], float]]) -> None:
    """Print times and costs of one number of rows."""
    trace = synthetic(rows)
    began = time.perf_counter()
    problem = make_problem(rows_of(trace), FitOptions("saturation"))
    found = solve(problem)
    first = time.perf_counter() - began
    print(f"fit speed, {rows:,} rows ({len(problem.observed):,} different): first fit {first:.3f} s")
    plain = as_they_are(problem, trace)
    for name, peer in peers.items():
        try:
            times = paired(
                lambda: solve(make_problem(rows_of(trace), FitOptions("saturation"))),
                lambda peer=peer: peer(plain, found.f_scale),  # type: ignore[misc]
                pairs,
                time.process_time,
            )
        except ImportError:
            print(f"  {name}: skipped, not installed")
            continue
        cost = peer(plain, found.f_scale)
        gain = times.theirs_s / times.ours_s
        print(f"  {name}: {times}; {gain:.1f} times as fast; cost ours/theirs - 1 = {found.cost / cost - 1:.1e}")


def main(smoke: bool = False) -> None:
    """Print the comparison for growing numbers of rows; the slow peers only up to 100,000."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        print("fit speed: not one thread; set OPENBLAS_NUM_THREADS=1 for figures that can be compared")
    for rows in ROWS[:1] if smoke else ROWS:
        names = list(PEERS) if rows <= 100_000 else ["SciPy"]
        compare(rows, 1 if smoke else 5 if rows < 1_000_000 else 3, {name: PEERS[name] for name in names})


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
