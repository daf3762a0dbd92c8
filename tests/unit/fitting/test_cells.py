"""A fit on cells is the fit on their rows."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from latfit.fitting.checking.conformal import upper_limit
from latfit.fitting.data import rows_of
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.fitting.uncertainty.covariance import uncertainty
from latfit.model.fit_parts import Estimate
from latfit.model.saturation import Saturation
from latfit.trace.cells import MAX_BINS, compress
from latfit.trace.clean import CleanOptions
from latfit.trace.read import Reading, ingest, system_filter
from latfit.trace.table import WEIGHT, Trace, row_weights
from tests.conftest import REFERENCE, planted_trace

NO_RULES = CleanOptions(keep=("zero_time", "duplicate", "cold_start"))


def on_cells(folder: Path, trace: Trace, limit: int = MAX_BINS) -> Trace:
    """The rows as cells, by way of a file."""
    pq.write_table(pa.table(dict(trace.columns)), folder / "rows.parquet")
    return compress(folder, Reading(cleaning=NO_RULES), limit=limit).trace


def estimates(trace: Trace) -> Mapping[str, Estimate]:
    problem = make_problem(rows_of(trace), FitOptions("saturation"))
    return uncertainty(problem, solve(problem)).estimates


def assert_within_a_standard_error(rows: Mapping[str, Estimate], cells: Mapping[str, Estimate]) -> None:
    for name, estimate in rows.items():
        other = cells[name]
        if estimate.std_error is not None and other.std_error is not None:
            assert abs(other.value - estimate.value) <= estimate.std_error, name


class TestWeights:
    @pytest.mark.parametrize("model", ["saturation", "linear"])
    def test_a_weight_is_so_many_rows_in_everything_that_is_reported(self, model: str) -> None:
        trace = planted_trace(0.05, repeats=4, seed=1)
        times = np.random.default_rng(0).integers(1, 5, len(trace))
        written_out = trace.select(np.repeat(np.arange(len(trace)), times))
        short = fit_trace(trace.with_columns(**{WEIGHT: times.astype(float)}), FitOptions(model=model)).to_json()
        long = fit_trace(written_out, FitOptions(model=model)).to_json()
        one, other = flat(short), flat(long)
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, float | int):
                # parts of the rows are refitted, to a cost good to 1e-12, so that what follows is good to its root
                assert value == pytest.approx(other[name], rel=1e-5, abs=1e-9), name
            elif isinstance(value, tuple):
                # the band of a whole number of steps, which is rounded
                assert value == pytest.approx(other[name], rel=0.02), name
            else:
                assert value == other[name], name

    def test_rows_without_a_weight_among_rows_with_one_stand_for_themselves(self) -> None:
        trace = Trace({"B": np.ones(3), WEIGHT: np.array([4.0, np.nan, 2.0])})
        weights = row_weights(trace)
        assert weights is not None
        assert weights.tolist() == [4, 1, 2]

    def test_limits_count_steps(self) -> None:
        rng = np.random.default_rng(3)
        ratios, times = rng.lognormal(size=60), rng.integers(1, 9, 60)
        for level in (0.5, 0.9, 0.95, 0.99):
            assert upper_limit(ratios, level, times.astype(float)) == upper_limit(np.repeat(ratios, times), level)


def flat(document: object, name: str = "") -> dict[str, object]:
    """Leaves of a JSON document by their path."""
    if isinstance(document, dict):
        return {k: v for key, part in document.items() for k, v in flat(part, f"{name}/{key}").items()}
    if isinstance(document, list):
        return {k: v for i, part in enumerate(document) for k, v in flat(part, f"{name}/{i}").items()}
    return {name: document}


class TestPlanted:
    @pytest.mark.parametrize("noise", [0.002, 0.03, 0.2])
    @pytest.mark.parametrize("loss", ["huber", "linear"])
    def test_estimates_errors_and_quantiles(self, tmp_path: Path, noise: float, loss: str) -> None:
        trace = planted_trace(noise, repeats=150, seed=2)
        options = FitOptions("saturation", loss=loss)
        rows, cells = fit_trace(trace, options), fit_trace(on_cells(tmp_path, trace), options)
        assert_within_a_standard_error(rows.parameters, cells.parameters)
        assert cells.metrics.n == rows.metrics.n == len(trace)
        for name, estimate in rows.parameters.items():
            if estimate.std_error is not None:
                assert cells.parameters[name].std_error == pytest.approx(estimate.std_error, rel=0.1), name
        # a bin of ln T is 1.6 % wide: no row is moved further
        for level, ratio in rows.intervals["ratio_quantiles"].items():
            assert cells.intervals["ratio_quantiles"][level] == pytest.approx(ratio, rel=0.01)
        floor = "floor_mape_pct"
        exact, binned = rows.diagnostics.lack_of_fit or {}, cells.diagnostics.lack_of_fit or {}
        assert binned[floor] == pytest.approx(exact[floor], rel=0.1, abs=0.1)

    def test_outliers_stay_outliers(self, tmp_path: Path) -> None:
        trace = planted_trace(0.03, repeats=200, seed=4)
        slow = np.random.default_rng(5).random(len(trace)) < 0.03
        spoilt = trace.with_columns(T_ms=np.where(slow, trace["T_ms"] * 8, trace["T_ms"]))
        assert_within_a_standard_error(estimates(spoilt), estimates(on_cells(tmp_path, spoilt)))

    def test_coarser_cells_still_find_the_truth(self, tmp_path: Path) -> None:
        """B and S uniform, so that bins of them hold many values; intervals of 95 % leave 1 in 20 outside."""
        rng = np.random.default_rng(6)
        B = rng.integers(1, 257, 200_000).astype(float)
        S = B + np.where(rng.random(len(B)) < 0.5, rng.integers(0, 4096, len(B)), 0)

        times = Saturation().latency_ms(REFERENCE, {"B": B, "S": S}) * np.exp(rng.normal(0, 0.05, len(B)))
        trace = on_cells(tmp_path, Trace({"B": B, "S": S, "T_ms": times}), limit=20_000)
        assert len(trace) <= 40_000
        fit = fit_trace(trace, FitOptions("saturation"))
        clean = planted_trace(0.0)
        assert np.abs(np.log(fit.latency_ms(clean["B"], clean["S"]) / clean["T_ms"])).max() < 0.01
        for name, truth in zip(fit.parameters, REFERENCE, strict=True):
            estimate = fit.parameters[name]
            if estimate.std_error is not None:
                assert abs(estimate.value - truth) <= 4 * estimate.std_error, name


def test_measured_steps(measured_steps: Path) -> None:
    """Two systems of each file: the estimates of the cells are those of the rows."""
    for source in sorted(measured_steps.glob("*.parquet")):
        for key, rows in islice(ingest(source, Reading(cleaning=NO_RULES)).trace.systems(), 2):
            found = compress(source, Reading(where=system_filter(key) or None, cleaning=NO_RULES))
            assert found.facts["rows_used"] == found.trace[WEIGHT].sum() == len(rows)
            assert_within_a_standard_error(estimates(rows), estimates(found.trace))
