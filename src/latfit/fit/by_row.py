"""A trace's rows as a model reads them, in the order of the trace: a problem collapses and sorts its rows, but time,
phase and run belong to single ones."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from latfit.fit.problem import FitProblem
from latfit.model.features import SOURCES, StepTable
from latfit.stats import FloatArray
from latfit.trace.cell_rows import row_weights
from latfit.trace.table import Trace


def steps_by_row(problem: FitProblem, trace: Trace) -> StepTable:
    """The columns that the problem's model reads, each (n,), for the rows of a trace."""
    return StepTable({name: trace.floats(name) for name in problem.steps if name in trace})


def predicted_by_row(problem: FitProblem, theta: FloatArray, trace: Trace) -> FloatArray:
    """Typical latency in ms (n,) of a trace's rows for parameters theta (p,)."""
    return problem.model.latency_ms(theta, steps_by_row(problem, trace))


def weights_by_row(trace: Trace) -> FloatArray:
    """How many measured steps each row stands for (n,)."""
    given = row_weights(trace)
    return np.ones(len(trace)) if given is None else given


def log_ratios(problem: FitProblem, theta: FloatArray, trace: Trace) -> FloatArray:
    """ln(observed/predicted) (n,) of a trace's rows."""
    predicted = np.maximum(predicted_by_row(problem, theta, trace), 1e-300)
    return np.asarray(np.log(trace.floats("T_ms") / predicted))


def known_columns(trace: Trace) -> dict[str, FloatArray]:
    """Everything a trace knows of its steps but their latency, by column; those with gaps are left out."""
    found = {name: trace.floats(name) for name in SOURCES if name in trace}
    return {name: column for name, column in found.items() if np.all(np.isfinite(column))}


def cells_by_row(trace: Trace) -> NDArray[np.intp]:
    """Number of the cell of each row (n,): rows of one cell agree in everything that is known of them."""
    return numbered(list(known_columns(trace).values()))


def numbered(columns: Sequence[FloatArray]) -> NDArray[np.intp]:
    """Number of each row's values (n,) among the different ones in order; columns, each (n,), are finite."""
    order = np.lexsort(tuple(reversed(columns)))
    new = np.zeros(len(order), dtype=np.intp)
    for column in columns:
        new[1:] |= np.diff(column[order]) != 0
    number = np.empty_like(new)
    number[order] = np.cumsum(new)
    return number


def by_row(problem: FitProblem, trace: Trace) -> FitProblem:
    """The same problem with one row for each row of the trace, in its order."""
    steps = steps_by_row(problem, trace)
    return replace(
        problem,
        steps=steps,
        observed=trace.floats("T_ms"),
        weights=weights_by_row(trace),
        cells=numbered(list(steps.values())),
    )
