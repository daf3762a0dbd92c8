"""How fast a fit is beside SciPy's `least_squares` (trf): same rows, same Huber loss at one scale, one thread.

`python -m benchmarks.fit_speed [--smoke]`, with OPENBLAS_NUM_THREADS=1. latfit goes from the trace to the parameters;
SciPy is given the scale and the rows, and takes numeric derivatives from a naive start. Then the whole `latfit fit` of
two samples. Times are processor time. Aims: 20 times SciPy at a million rows, as fast below 5,000 rows, and a final
cost at most 1 % above SciPy's.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.timing import paired
from latfit.fitting.data import rows_of
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions, FitProblem, make_problem
from latfit.fitting.solver.objective import RHO
from latfit.fitting.solver.solve import solve
from latfit.model.features import StepTable
from latfit.model.formulas import Saturation
from latfit.trace.read import ingest
from latfit.trace.table import Trace

ROWS = (1_000, 4_000, 10_000, 100_000, 1_000_000)
SAMPLES = ("cpu_numpy_tiny", "rtx4090_llama-3.1-8b")


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


def compare(rows: int, pairs: int) -> None:
    """Print times and costs of one number of rows."""
    trace = synthetic(rows)
    problem = make_problem(rows_of(trace), FitOptions("saturation"))
    found = solve(problem)
    steps = StepTable({name: trace.floats(name) for name in problem.steps})
    plain = replace(
        problem, steps=steps, observed=trace.floats("T_ms"), weights=np.ones(len(trace)), cells=np.arange(len(trace))
    )
    times = paired(
        lambda: solve(make_problem(rows_of(trace), FitOptions("saturation"))),
        lambda: naive(plain, found.f_scale),
        pairs,
        time.process_time,
    )
    gain, excess = times.theirs_s / times.ours_s, found.cost / naive(plain, found.f_scale) - 1
    print(
        f"fit speed, {rows:,} rows: {times}; {gain:.1f} times as fast; cost ours/SciPy's - 1 = {excess:.1e}", flush=True
    )


def whole_fit(name: str) -> None:
    """Print how long the default fit of a sample takes, once compiled."""
    trace = ingest(Path(__file__).parent.parent / "sample_traces" / f"{name}.parquet").trace
    fit_trace(trace)
    began = time.process_time()
    fit = fit_trace(trace)
    print(f"default fit of {name}, {len(trace):,} rows: {time.process_time() - began:.1f} s, {fit.model}")


def main(smoke: bool = False) -> None:
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        print("fit speed: not one thread; set OPENBLAS_NUM_THREADS=1 for figures that can be compared")
    for rows in ROWS[:1] if smoke else ROWS:
        compare(rows, 1 if smoke else 5 if rows < 1_000_000 else 3)
    for name in SAMPLES[: 1 if smoke else None]:
        whole_fit(name)


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
