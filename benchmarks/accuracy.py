"""How well each family predicts measured steps it has not seen, beside forests and the floor of repeated cells.

`python -m benchmarks.accuracy [FOLDER] [--smoke]`. For every system in a folder of step files (default: the one the
tests use) and every family: MAPE in 5-fold cross-validation over rows, the same over whole cells or blocks of time, of
the decoding rows alone, and of steps beyond the 70th percentile of S by a fit below it. A query that a fit does not
claim to cover (prefill, where it has seen decoding only) is counted as refused, and scored all the same. `auto` chooses
its form on all rows for the first three columns, and on those below the percentile for the last; every family stands
beside it also with the expert-coverage term, which it does not choose by itself.

The floor is the error of each cell's median among its own rows, for cells of at least five rows: no function of B and S
does better there.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.checking.crossval import assign_folds
from latfit.fitting.data import fit_data, rows_of
from latfit.fitting.model_selection import candidates_for, select_model, settled
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.model.features import MIXED_FROM, SOURCES, decode_only, step_features
from latfit.stats import FloatArray
from latfit.trace.read import ingest
from latfit.trace.table import Trace

DEFAULT = Path(os.environ.get("LATFIT_DATA", "measured")) / "steps"
FOLDS = 5
MOST_ROWS = 12_000
BELOW = 0.7
SMOKE_ROWS = 300


@dataclass(frozen=True)
class Errors:
    """MAPE in percent of one model on one system."""

    rows: float
    blocks: float
    decode: float
    beyond: float
    refused: int = 0

    def __str__(self) -> str:
        refused = f" ({self.refused} refused)" if self.refused else ""
        return f"{self.rows:7.2f} {self.blocks:7.2f} {self.decode:7.2f} {self.beyond:7.2f}{refused}"


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
                break


def fitted(train: Trace, test: Trace, options: FitOptions, warm: FloatArray | None = None) -> FloatArray:
    """Latencies in ms of the test rows by a fit of the training rows."""
    problem = make_problem(rows_of(train), options)
    end = solve(problem, warm=None if warm is None else problem.coordinates(warm))
    return problem.model.latency_ms(problem.theta(end.z), {name: test.floats(name) for name in problem.steps})


def forest(kind: str, train: Trace, test: Trace) -> FloatArray:
    """Latencies in ms of the test rows by trees on every column, fitted to ln T."""
    from sklearn.ensemble import (
        HistGradientBoostingRegressor,
        RandomForestRegressor,
    )

    names = [name for name in SOURCES if name in train]
    X, unseen = (np.stack([rows.floats(name) for name in names], axis=1) for rows in (train, test))
    model = (
        RandomForestRegressor(200, n_jobs=2, random_state=0)
        if kind == "random forest"
        else HistGradientBoostingRegressor(random_state=0)
    )
    return np.asarray(np.exp(model.fit(X, np.log(train.floats("T_ms"))).predict(unseen)))


def ape(predicted: FloatArray, rows: Trace) -> FloatArray:
    return 100 * np.abs(predicted / rows.floats("T_ms") - 1)


def floor(rows: Trace) -> float:
    """Error of the cells' medians among their own rows; NaN without repeated cells."""
    if len(rows) == 0:
        return float("nan")
    table = np.stack([rows.floats("B"), rows.floats("S")], axis=1)
    _, cell, count = np.unique(table, axis=0, return_inverse=True, return_counts=True)
    T, kept = rows.floats("T_ms"), count[cell.ravel()] >= 5
    errors = [
        100 * np.abs(np.median(T[cell.ravel() == c]) / T[cell.ravel() == c] - 1) for c in np.unique(cell.ravel()[kept])
    ]
    return float(np.concatenate(errors).mean()) if errors else float("nan")


def judged(name: str, rows: Trace, folds: list[NDArray[np.int64]], options: FitOptions | None) -> Errors:
    """All errors of one model; options None for trees."""
    warm = None
    if options is not None:
        problem = make_problem(rows_of(rows), options)
        warm = problem.theta(solve(problem).z)
    scores = []
    for fold in folds:
        errors = np.full(len(rows), np.nan)
        for left_out in range(int(fold.max()) + 1):
            train, test = rows.select(fold != left_out), rows.select(fold == left_out)
            predicted = forest(name, train, test) if options is None else fitted(train, test, options, warm)
            errors[fold == left_out] = ape(predicted, test)
        scores.append(errors)
    decoding = step_features({each: rows.floats(each) for each in SOURCES if each in rows})["m"] == 0
    beyond, refused = extrapolated(name, rows, options)
    decode = float(scores[0][decoding].mean()) if decoding.any() else float("nan")
    return Errors(float(scores[0].mean()), float(scores[1].mean()), decode, beyond, refused)


def extrapolated(name: str, rows: Trace, options: FitOptions | None) -> tuple[float, int]:
    """(MAPE above the 70th percentile of S by a fit below it, queries that the fit does not claim to cover)."""
    S = rows.floats("S")
    limit = float(np.quantile(S, BELOW))
    limit = limit if limit < S.max() else float(S[limit > S].max(initial=0.0))
    train, test = rows.select(limit >= S), rows.select(limit < S)
    if len(train) < 20 or len(test) == 0:
        return float("nan"), 0
    if options is None:
        return float(ape(forest(name, train, test), test).mean()), 0
    plain = replace(options, fixed={})
    own = select_model(fit_data(train), plain).options if name == "auto" else settled(rows_of(train), plain)
    alone = decode_only({"B": train.floats("B"), "S": train.floats("S")})
    refused = int(np.sum(test.floats("S") > MIXED_FROM * test.floats("B"))) if alone else 0
    return float(ape(fitted(train, test, own), test).mean()), refused


def main(smoke: bool = False, folder: Path = DEFAULT) -> None:
    """Print a table a system."""
    if not folder.is_dir():
        print(f"accuracy: skipped, no measured steps at {folder}; set LATFIT_DATA")
        return
    try:
        import sklearn  # noqa: F401

        trees = ["random forest", "gradient boosting"]
    except ImportError:
        trees = []
        print("accuracy: forests skipped, scikit-learn is not installed")
    for label, rows in systems(folder, smoke):
        by_row = np.random.default_rng(0).permutation(len(rows)) % FOLDS
        folds = [by_row, assign_folds(fit_data(rows))[1]]
        decoding = rows.select(step_features({each: rows.floats(each) for each in SOURCES if each in rows})["m"] == 0)
        print(f"\n{label}: {len(rows):,} rows, floor {floor(rows):.2f} %, of decode {floor(decoding):.2f} %")
        print(f"{'MAPE in %':24} {'rows':>7} {'blocks':>7} {'decode':>7} {'beyond':>7}")
        chosen = select_model(fit_data(rows), FitOptions(model="auto"))
        print(f"{f'auto = {chosen.name}':24} {judged('auto', rows, folds, chosen.options)}", flush=True)
        names = candidates_for(rows_of(rows), experts=True)[1:] if not smoke else ["linear", "context"]
        for name in names:
            options = settled(rows_of(rows), FitOptions(model=name))
            print(f"{name:24} {judged(name, rows, folds, options)}", flush=True)
        for name in [] if smoke else trees:
            print(f"{name:24} {judged(name, rows, folds, None)}", flush=True)


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    main("--smoke" in sys.argv[1:], Path(given[0]) if given else DEFAULT)
