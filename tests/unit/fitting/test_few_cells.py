"""Two-sided intervals from a grid of few cells with several repeats each: what a cell's steps share counts once."""

import numpy as np
import pytest

import latfit
from latfit.fitting.checking.conformal import prediction_intervals
from latfit.fitting.checking.crossval import HeldOut
from latfit.fitting.data import FitData, fit_data
from latfit.trace.table import Trace

REPEATS = 5


def grid_of(rng: np.random.Generator, cells: int, shared: float, own: float) -> tuple[FitData, HeldOut]:
    """Decode steps left out cell by cell; scores with a deviation that a cell shares and one of each step."""
    cell = np.repeat(np.arange(cells), REPEATS)
    score = shared * rng.standard_normal(cells)[cell] + own * rng.standard_normal(len(cell))
    B = 1.0 + cell
    data = fit_data(Trace({"B": B, "S": B, "T_ms": np.exp(score)}))
    return data, HeldOut(np.arange(len(cell)), cell % 5, score, np.ones(len(cell)))


def held(rng: np.random.Generator, cells: int, shared: float, own: float, level: float) -> float:
    """Mean share of steps of new cells inside the two-sided interval at a level, over 150 grids."""
    shares = []
    for _ in range(150):
        found = prediction_intervals(*grid_of(rng, cells, shared, own), ordered=False)
        low, high = (np.log(found[kind][f"{(1 + level) / 2:g}"]) for kind in ("lower_quantiles", "ratio_quantiles"))
        new = shared * rng.standard_normal(200) + own * rng.standard_normal(200)
        shares.append(float(np.mean((new >= low) & (new <= high))))
    return float(np.mean(shares))


@pytest.mark.parametrize(("shared", "own"), [(0.1, 0.02), (0.1, 0.1), (0.0, 0.1)])
def test_new_cells_are_covered_as_often_as_promised(shared: float, own: float) -> None:
    """25 cells of five repeats: a rank rounds up, so that a little more than 80 % is held, 1/26 for a side at most. The
    mean of 150 grids is known to 0.08/sqrt(150) = 0.7 %."""
    share = held(np.random.default_rng(1), 25, shared, own, 0.8)
    assert 0.8 - 0.02 < share < 0.8 + 2 / 26 + 0.02


def test_a_prediction_has_the_widest_level_that_its_phase_supports() -> None:
    """12 decode cells support 80 %, 60 mixed cells 90 %: each row is predicted at its own level."""
    rng = np.random.default_rng(4)
    batches, chunks = [1.0, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64], [0.0, 8, 64, 256, 512, 1024]
    B, S = (column.ravel() for column in np.meshgrid(batches, chunks))
    S += B
    T = (5 + 0.1 * B + 0.02 * S) * np.exp(rng.normal(0, 0.02, len(B)))
    rows = {name: np.repeat(column, REPEATS) for name, column in {"B": B, "S": S, "T_ms": T}.items()}
    found = latfit.fit(rows, model="linear").predict(B=[8, 8], S=[8, 264], level=0.9)
    assert found["level"].tolist() == [0.8, 0.9]
    assert (found["high_ms"] > found["low_ms"]).all()


def test_no_model_has_more_parameters_than_the_sizes_that_a_fold_trains_on() -> None:
    """A curve through three of four sizes predicts the fourth by luck, and through two of them it falls to zero."""
    rng = np.random.default_rng(1)
    B = np.tile([1.0, 2.0, 3.0, 4.0], 55)
    T = np.tile([4.9, 7.9, 11.5, 11.3], 55) * np.exp(rng.normal(0, 0.15, len(B)))
    fit = latfit.fit(Trace({"B": B, "S": B, "T_ms": T}))
    assert sum(each["fixed"] is False for each in fit.to_json()["parameters"].values()) <= 3
    assert latfit.Fit.from_json(fit.to_json()).result.model == fit.result.model
