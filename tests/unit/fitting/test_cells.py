"""A fit on cells is the fit on their rows."""

import numpy as np
import pytest

from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.trace.table import WEIGHT
from tests.conftest import planted_trace


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
