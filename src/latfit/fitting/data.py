"""The rows of a trace as fitting uses them: problems are made of `Rows`, `FitData` adds what belongs to each row."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.model import SOURCES, FitResult, StepTable, outside_by, read_by, support_of
from latfit.stats import FloatArray, distinct
from latfit.trace import WEIGHT, Trace, phases, row_weights, runs_in_time

Found = TypeVar("Found")

SHARED = 4  # steps that have the same time, on average, from which a clock's ticks show


@dataclass(frozen=True, eq=False)
class Rows:
    """Measured steps, (n,) each."""

    steps: StepTable  # columns that a model may use, complete in every row
    observed: FloatArray  # T in ms
    weights: FloatArray  # measured steps that each row stands for
    single: bool  # whether each row is one step, without a column of weights
    cache: dict[Hashable, Any] = field(default_factory=dict, kw_only=True, repr=False)

    def once(self, key: Hashable, compute: Callable[[], Found]) -> Found:
        if key not in self.cache:
            self.cache[key] = compute()
        return self.cache[key]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.observed)

    def at(self, rows: NDArray[np.intp]) -> "Rows":
        return Rows(self.steps.at(rows), self.observed[rows], self.weights[rows], self.single)


@dataclass(frozen=True, eq=False)
class FitData(Rows):
    """Rows of a trace with what belongs to each, (n,); None where the trace does not have it."""

    phase: NDArray[np.str_]
    cell: NDArray[np.intp]  # number of the (B, S) cell
    known_cell: NDArray[np.intp]  # number of the cell of steps that agree in every known column
    runs: tuple[NDArray[np.intp], ...]  # row numbers by run, in time order
    run: NDArray[np.str_] | None  # name of the run
    times: FloatArray | None  # seconds
    in_time: bool  # a log, whose noise can follow time, rather than a grid measured in repeats

    @property
    def B(self) -> FloatArray:
        return self.steps["B"]

    @property
    def S(self) -> FloatArray:
        return self.steps["S"]

    @cached_property
    def by_phase(self) -> dict[str, NDArray[np.bool_]]:
        """Mask of the rows (n,) of each phase."""
        return {name: np.asarray(self.phase == name) for name in dict.fromkeys(self.phase.tolist())}

    @cached_property
    def dither(self) -> FloatArray:
        """Random rounding error of a coarse clock in ln T (n,): zero unless most steps of a log share their time."""
        times, number = distinct(self.observed)
        several = times[np.bincount(number) >= SHARED]
        if not self.in_time or SHARED * len(times) > len(self) or len(several) < 2:
            return np.zeros(len(self))
        error = float(np.diff(several).min()) * np.random.default_rng(0).uniform(-0.5, 0.5, len(self))
        return np.log1p(np.maximum(error / self.observed, -0.5))

    @cached_property
    def _places(self) -> tuple[FloatArray, FloatArray, NDArray[np.str_], FloatArray | None]:
        """B, S, kind and cached tokens of each step (n,): see `model.support`."""
        return self.B, self.S, FitResult.kinds(**self.steps), read_by(self.steps)

    def support(self, rows: NDArray[np.intp] | slice = slice(None)) -> dict[str, list[float]]:
        B, S, kinds, read = self._places
        return support_of(B[rows], S[rows], kinds[rows], self.weights[rows], None if read is None else read[rows])

    def outside_by(self, support: dict[str, list[float]], rows: NDArray[np.intp]) -> FloatArray:
        B, S, kinds, read = self._places
        return outside_by(support, B[rows], S[rows], kinds[rows], None if read is None else read[rows])

    def draw(self, most: int, seed: int = 0) -> "FitData":
        """Return at most so many rows in their order, drawn evenly."""
        if len(self) <= most:
            return self
        return self.sample(np.sort(np.random.default_rng(seed).choice(len(self), most, replace=False)))

    def sample(self, rows: NDArray[np.intp]) -> "FitData":
        """Return some of the rows, in rising order; cells are numbered anew."""
        few = self.at(rows)
        place = np.full(len(self), -1)
        place[rows] = np.arange(len(rows))
        runs = (placed[placed >= 0] for placed in (place[run] for run in self.runs))
        return FitData(
            few.steps,
            few.observed,
            few.weights,
            few.single,
            phase=self.phase[rows],
            cell=distinct(self.cell[rows])[1],
            known_cell=distinct(self.known_cell[rows])[1],
            runs=tuple(run for run in runs if len(run)),
            run=None if self.run is None else self.run[rows],
            times=None if self.times is None else self.times[rows],
            in_time=self.in_time,
        )


def rows_of(trace: Trace) -> Rows:
    """Return the rows of a clean trace. Columns with gaps are left out."""
    found = {name: trace.floats(name) for name in SOURCES if name in trace}
    steps = {name: column for name, column in found.items() if np.all(np.isfinite(column))}
    return Rows(StepTable(steps), trace.floats("T_ms"), weights_by_row(trace), row_weights(trace) is None)


def fit_data(trace: Trace) -> FitData:
    """Return the rows of a clean trace of one system that stand for a step. Raises BadInput for impossible weights."""
    trace = _counted(trace)
    rows = rows_of(trace)
    return FitData(
        rows.steps,
        rows.observed,
        rows.weights,
        rows.single,
        phase=phases(trace).astype(str),
        cell=numbered([rows.steps["B"], rows.steps["S"]]),
        known_cell=numbered(list(rows.steps.values())),
        runs=tuple(runs_in_time(trace)),
        run=trace["run"].astype(str) if "run" in trace else None,
        times=trace.floats("t_s") if "t_s" in trace else None,
        in_time="t_s" in trace and "rep" not in trace,
    )


def _counted(trace: Trace) -> Trace:
    weights = row_weights(trace)
    if weights is None or np.all((weights > 0) & np.isfinite(trace.floats(WEIGHT))):
        return trace
    if bad := int(np.sum((weights < 0) | np.isinf(trace.floats(WEIGHT)))):
        raise BadInput(
            f"{bad:,} rows have a {WEIGHT} that is no number of steps",
            remedy="It says how many steps a row stands for: 0 or more.",
        )
    if not np.any(weights > 0):
        raise BadInput(f"{WEIGHT} is zero in every row", remedy=f"Leave {WEIGHT} out where each row is one step.")
    return trace.select(weights > 0)


def weights_by_row(trace: Trace) -> FloatArray:
    given = row_weights(trace)
    return np.ones(len(trace)) if given is None else given


def numbered(columns: list[FloatArray]) -> NDArray[np.intp]:
    """Return the number of each row's values (n,) among the distinct ones, in order. Columns (n,) are finite."""
    key = np.zeros(len(columns[0]), dtype=np.intp)
    for column in columns:
        values, number = distinct(column)
        key = distinct(key * len(values) + number)[1]
    return key


def medians(values: FloatArray, group: NDArray[np.intp]) -> FloatArray:
    """Return the median of values (n,) in each group (m,), numbered without gaps."""
    order, sizes = np.lexsort((values, group)), np.bincount(group)
    start = np.cumsum(sizes) - sizes
    return np.asarray(0.5 * (values[order[start + (sizes - 1) // 2]] + values[order[start + sizes // 2]]))
