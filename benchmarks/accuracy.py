"""How well measured steps are predicted that were not seen: line, formula, formula with correction, forests, the floor.

`python -m benchmarks.accuracy [FOLDER] [--smoke]`. For every system in a folder of step files (default: the one the
tests use) one table: MAPE in 5-fold cross-validation over rows, of all steps and by phase; the same over whole cells or
blocks of time; and of the steps beyond the 70th percentile of S by a fit below it. `physics` is the formula that
`auto` takes, `+ correction` the same with what `auto` learns on top of it. Which formula is chosen on all rows, and
beyond the percentile on those below; what is learnt, and how much of it, on the training rows of each fold alone. A
query that a fit does not claim to cover (prefill, where it has seen decoding only) is counted as refused, and scored.

Coverage: share of the steps within the intervals of 80, 90 and 98 %, by phase, of fits that have not seen them: each
fifth of the cells in turn; of a log the third, fourth and last fifth of every run, by a fit of what is earlier. One
part alone says little: a fifth of a table's cells is a few dozen independent steps, and one time is not like another.

Cuts: the same beyond the 20th to 85th percentile of S, B and context, by fits that see what lies below.

The floor is the error of each cell's median among its own rows, for cells of at least five rows: no function of what is
known of a step does better there.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from latfit.fitting.checking.crossval import assign_folds, parts_in_time
from latfit.fitting.correction import fit_correction
from latfit.fitting.data import FitData, fit_data
from latfit.fitting.fit import fit_trace
from latfit.fitting.model_selection import add_correction, select_model
from latfit.fitting.prediction import predict
from latfit.fitting.problem import FitOptions, formula_of, log_ratios
from latfit.fitting.solver.solve import solved_once
from latfit.model import CONTEXT, SOURCES, decode_only
from latfit.model.features import MIXED_FROM
from latfit.stats import FloatArray
from latfit.trace.read import ingest
from latfit.trace.table import Trace
from latfit.units import format_percent

DEFAULT = Path(os.environ.get("LATFIT_DATA", "measured")) / "steps"
FOLDS = 5
MOST_ROWS = 8_000
BELOW = 0.7
SMOKE_ROWS, SMOKE_FOLDS = 100, 2
LATER = 2
"""Fifths of every run that are only learnt from."""
CUTS = (0.2, 0.4, 0.55, 0.7, 0.85)
COUNTED = 30
"""Rows from which a phase has a column."""

LEVELS = (0.8, 0.9, 0.98)

Predict = Callable[[Trace, Trace], Mapping[str, FloatArray]]
"""(training rows, rows left out) -> latencies in ms of the latter, by the name of the model."""


def systems(folder: Path, smoke: bool) -> Iterator[tuple[str, Trace]]:
    """(label, rows) of every system of every file."""
    rng = np.random.default_rng(0)
    for source in sorted(folder.glob("*.parquet")):
        for key, rows in ingest(source).trace.systems():
            most = SMOKE_ROWS if smoke else MOST_ROWS
            if len(rows) > most:
                rows = rows.select(np.sort(rng.choice(len(rows), most, replace=False)))
            yield " ".join([source.stem, *key.values()]), rows
            if smoke:
                return


PHYSICS, CORRECTED = "physics", "physics + correction"


def by_formula(options: FitOptions, train: Trace, test: Trace) -> dict[str, FloatArray]:
    """Of a line, of a formula, and of the formula with what `auto` learns on top of it."""
    data, asked = fit_data(train), fit_data(test)
    found = {}
    for name, own in (("line", FitOptions(model="linear")), (PHYSICS, options)):
        problem, end = solved_once(data, own)
        theta = problem.theta(end.z)
        found[name] = problem.model.latency_ms(theta, asked.steps)
    found[CORRECTED] = found[PHYSICS]
    strength = add_correction(data, options, "auto", theta)[0].correction
    if strength is not None:
        table = fit_correction(data, log_ratios(problem, theta, data), strength, formula_of(problem, theta))
        found[CORRECTED] = found[PHYSICS] * np.exp(table.of_steps(asked.steps))
    return found


def by_trees(train: Trace, test: Trace) -> dict[str, FloatArray]:
    """Of trees on every column, fitted to ln T; none where scikit-learn is missing."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    except ImportError:
        return {}
    names = [name for name in SOURCES if name in train]
    X, unseen = (np.stack([rows.floats(name) for name in names], axis=1) for rows in (train, test))
    models = {
        "random forest": RandomForestRegressor(100, random_state=0),
        "gradient boosting": HistGradientBoostingRegressor(random_state=0),
    }
    target = np.log(train.floats("T_ms"))
    return {name: np.asarray(np.exp(model.fit(X, target).predict(unseen))) for name, model in models.items()}


def floor(data: FitData) -> float:
    """Error of the medians of steps alike in everything known among themselves; NaN without repeated ones."""
    cell, observed = data.known_cell, data.observed
    order = np.argsort(cell, kind="stable")
    groups = np.split(observed[order], np.flatnonzero(np.diff(cell[order])) + 1)
    errors = [100 * np.abs(np.median(T) / T - 1) for T in groups if len(T) >= 5]
    return float(np.concatenate(errors).mean()) if errors else float("nan")


def left_out(rows: Trace, fold: NDArray[np.int64], predicting: Sequence[Predict]) -> dict[str, FloatArray]:
    """Absolute errors in percent (n,) of every row while its fold is left out, by model."""
    found: dict[str, FloatArray] = {}
    for number in range(int(fold.max()) + 1):
        train, test = rows.select(fold != number), rows.select(fold == number)
        for one in predicting:
            for name, T in one(train, test).items():
                found.setdefault(name, np.full(len(rows), np.nan))[fold == number] = ape(T, test)
    return found


def ape(predicted: FloatArray, rows: Trace) -> FloatArray:
    return 100 * np.abs(predicted / rows.floats("T_ms") - 1)


def beyond(rows: Trace, trees: bool) -> tuple[dict[str, float], int]:
    """(MAPE by model above the 70th percentile of S of a fit below it, queries that the fit does not claim to
    cover)."""
    S = rows.floats("S")
    limit = float(np.quantile(S, BELOW))
    limit = limit if limit < S.max() else float(S[limit > S].max(initial=0.0))
    train, test = rows.select(limit >= S), rows.select(limit < S)
    if len(train) < 20 or len(test) == 0:
        return {}, 0
    options = select_model(fit_data(train), FitOptions(model="auto")).options
    found = by_formula(options, train, test) | (by_trees(train, test) if trees else {})
    alone = decode_only({"B": train.floats("B"), "S": train.floats("S")})
    refused = int(np.sum(test.floats("S") > MIXED_FROM * test.floats("B"))) if alone else 0
    return {name: float(ape(T, test).mean()) for name, T in found.items()}, refused


def print_cuts(rows: Trace, smoke: bool) -> None:
    """Print errors and coverage beyond cuts in S, B and context: of `auto`, and of its parametric model alone.

    The fit sees the rows up to a percentile of a column and predicts those above. Coverage is that of 90 % intervals,
    over the steps that have one.
    """
    for column in ("S", "B", CONTEXT):
        values = rows.floats(column) if column in rows else np.zeros(len(rows))
        for share in CUTS[-1:] if smoke else CUTS:
            limit = float(np.quantile(values, share))
            train, test = rows.select(values <= limit), rows.select(values > limit)
            if len(train) < COUNTED or len(test) < 10 or len(np.unique(values[values <= limit])) < 3:
                continue
            fit = fit_trace(train)
            if not fit.status.ok:
                continue
            T, told = test.floats("T_ms"), predict(fit, test, 0.9)
            known = np.isfinite(told.low) & np.isfinite(told.high)
            held = float(np.mean(((told.low <= T) & (told.high >= T))[known])) if known.any() else float("nan")
            plain = ape(predict(structs.replace(fit, correction=None), test, 0.9).T_ms, test).mean()
            print(
                f"cut {column} <= {limit:g} ({100 * share:.0f} %), {fit.name}: parametric {plain:.1f} %, auto"
                f" {ape(told.T_ms, test).mean():.1f} %, 90 % intervals hold {100 * held:.0f} %,"
                f" {100 * known.mean():.0f} % of steps have one",
                flush=True,
            )


def covered(rows: Trace, smoke: bool) -> dict[str, tuple[int, list[float]]]:
    """By phase: steps that a fit has not seen, and the share of them within its intervals at LEVELS."""
    data = fit_data(rows)
    part = parts_in_time(data, FOLDS) if data.in_time else assign_folds(data, seed=1)[1]
    parts, hits = range(LATER if data.in_time else 0, int(part.max()) + 1), dict[str, list[list[NDArray[np.bool_]]]]()
    for number in parts[-1:] if smoke else parts:
        fit = fit_trace(rows.select(part < number if data.in_time else part != number))
        if not fit.status.ok or not fit.intervals:
            continue
        test = rows.select(part == number)
        T, phase = test.floats("T_ms"), fit_data(test).phase
        given = [predict(fit, test, level) for level in LEVELS]
        for name in np.unique(phase):
            found = hits.setdefault(str(name), [[] for _ in LEVELS])
            for each, held in zip(given, found, strict=True):
                known = (phase == name) & np.isfinite(each.low) & np.isfinite(each.high)
                held.append(((each.low <= T) & (each.high >= T))[known])
    counted = {name: [np.concatenate(held) for held in found] for name, found in hits.items()}
    return {
        name: (
            int(np.sum(data.phase[part >= parts[-1 if smoke else 0]] == name)),
            [float(held.mean()) if len(held) >= COUNTED else float("nan") for held in found],
        )
        for name, found in counted.items()
    }


@dataclass(frozen=True)
class Table:
    """Errors of a system by model and column."""

    columns: Sequence[str]
    rows: Mapping[str, Sequence[float]]

    def __str__(self) -> str:
        wide = [max(9, len(name) + 2) for name in self.columns]
        lines = [f"{'MAPE in %':22}" + "".join(f"{name:>{w}}" for name, w in zip(self.columns, wide, strict=True))]
        for name, values in self.rows.items():
            lines.append(f"{name:22}" + "".join(f"{value:{w}.2f}" for value, w in zip(values, wide, strict=True)))
        return "\n".join(lines)


def judged(rows: Trace, options: FitOptions, smoke: bool) -> tuple[Table, int]:
    """All errors of a system, and how many of the steps beyond are not claimed to be known."""
    trees, folds = not smoke, SMOKE_FOLDS if smoke else FOLDS
    data = fit_data(rows)
    predicting: list[Predict] = [partial(by_formula, options), *([by_trees] if trees else [])]
    by_row = np.random.default_rng(0).permutation(len(rows)) % folds
    free = left_out(rows, by_row, predicting)
    blocks = left_out(rows, assign_folds(data)[1] % folds, predicting)
    far, refused = beyond(rows, trees)
    phases = {name: inside for name, inside in data.by_phase.items() if inside.sum() >= COUNTED}
    columns = ["rows", *phases, "blocks", *(f"{name}/b" for name in phases), "beyond"]
    table = {
        name: [
            *(float(free[name][inside].mean()) for inside in (np.ones(len(rows), dtype=bool), *phases.values())),
            *(float(blocks[name][inside].mean()) for inside in (np.ones(len(rows), dtype=bool), *phases.values())),
            far.get(name, float("nan")),
        ]
        for name in free
    }
    return Table(columns, table), refused


def main(smoke: bool = False, folder: Path = DEFAULT) -> None:
    """Print a table a system."""
    if not folder.is_dir():
        print(f"accuracy: skipped, no measured steps at {folder}; set LATFIT_DATA")
        return
    try:
        import sklearn  # noqa: F401
    except ImportError:
        print("accuracy: forests skipped, scikit-learn is not installed")
    for label, rows in systems(folder, smoke):
        data = fit_data(rows)
        options = select_model(data, FitOptions(model="auto")).options
        table, refused = judged(rows, options, smoke)
        print(f"\n{label}: {len(rows):,} rows, physics = {options.model}, floor {format_percent(floor(data))}")
        print(table)
        if refused:
            print(f"beyond: {refused:,} steps refused")
        print_cuts(rows, smoke)
        for phase, (steps, shares) in covered(rows, smoke).items():
            shown = ", ".join(
                f"{100 * level:g} %: {100 * share:.1f}" for level, share in zip(LEVELS, shares, strict=True)
            )
            print(f"coverage, {steps:,} {phase} steps: {shown}", flush=True)


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    main("--smoke" in sys.argv[1:], Path(given[0]) if given else DEFAULT)
