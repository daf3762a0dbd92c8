"""How long a whole `fit_trace` takes (search, uncertainty, cross-validation, baselines, diagnostics) beside one plain
SciPy `least_squares` of the saturation model from a naive start with the same loss, on the same rows, and how the two
costs compare. Times are those of the processor. Run it with OPENBLAS_NUM_THREADS=1."""

import time
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.timing import paired
from latfit.fitting.data import rows_of
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions, FitProblem, make_problem
from latfit.fitting.solver.loss import RHO
from latfit.fitting.solver.solve import solve
from latfit.model.saturation import Saturation
from latfit.trace.table import Trace

ROWS = (1_000, 10_000, 50_000)


def synthetic(rows: int, seed: int = 0) -> Trace:
    """Rows of a serving log: mostly decode, some prefill, 10 % log-normal noise, latencies rounded to 1 us."""
    rng = np.random.default_rng(seed)
    B = rng.integers(1, 65, rows).astype(float)
    S = np.where(rng.random(rows) < 0.2, B + rng.integers(1, 2048, rows), B)
    theta = np.array([4.0, 30.0, 1.0, 60.0, 0.15, 0.01, 0.02, 0.002])
    T = Saturation().latency_ms(theta, {"B": B, "S": S}) * np.exp(rng.normal(0, 0.1, rows))
    return Trace({"B": B, "S": S, "T_ms": np.round(T, 3)})


def naive(problem: FitProblem, f_scale: float) -> float:
    """Cost that one `least_squares` with numeric defaults reaches from a start at one in every scaled coordinate."""
    start = np.clip(np.zeros(len(problem.free)), problem.lower, problem.upper)
    with np.errstate(all="ignore"):
        result = least_squares(
            problem.residuals,
            start,
            bounds=(problem.lower, problem.upper),
            loss=lambda z: RHO["huber"](z) * problem.weights,
            f_scale=f_scale,
        )
    return float(result.cost)


def as_they_are(problem: FitProblem, trace: Trace) -> FitProblem:
    """The problem with a row for every row of the trace."""
    steps = {name: trace.floats(name) for name in problem.steps}
    T = trace.floats("T_ms")
    return replace(problem, steps=steps, observed=T, weights=np.ones(len(T)), cells=np.arange(len(T)))


def main(smoke: bool = False) -> None:
    """Print times and costs for growing numbers of rows, and for the choice among all models at the most."""
    for rows in (1_000,) if smoke else ROWS:
        trace = synthetic(rows)
        problem = make_problem(rows_of(trace), FitOptions("saturation"))
        found, plain = solve(problem), as_they_are(problem, trace)
        peer = naive(plain, found.f_scale)
        for model in ("saturation",) if rows < ROWS[-1] else ("saturation", "auto"):
            options = FitOptions(model=model)
            times = paired(
                lambda t=trace, o=options: fit_trace(t, o),  # type: ignore[misc]
                lambda p=plain, f=found.f_scale: naive(p, f),  # type: ignore[misc]
                1 if smoke else 5,
                time.process_time,
            )
            print(
                f"fit, {rows:,} rows: whole fit_trace of {model} against one SciPy fit of saturation: {times}; "
                f"cost of saturation over SciPy's {found.cost / peer:.6f}"
            )


if __name__ == "__main__":
    main()
