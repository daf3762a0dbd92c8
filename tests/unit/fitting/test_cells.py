"""A fit on cells is the fit on their rows."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from latfit.fitting.data import rows_of
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.fitting.uncertainty.covariance import uncertainty
from latfit.model.fit_parts import Estimate
from latfit.trace.cells import MAX_BINS, compress
from latfit.trace.clean import CleanOptions
from latfit.trace.read import Reading
from latfit.trace.table import WEIGHT, Trace
from tests.conftest import planted_trace

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
