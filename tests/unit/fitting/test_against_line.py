"""What a fit says of its parameters where a straight line predicts as well, and where it does not."""

from pathlib import Path

import numpy as np

from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.model.fit_result import FitStatus
from latfit.model.formulas import Saturation
from latfit.trace.read import ingest
from latfit.trace.table import Trace
from tests.conftest import REFERENCE, planted_trace


def decode_log(tau_0: float, noise: float, shared: float, rows: int = 4000, seed: int = 0) -> Trace:
    """Decode steps of a line in time order, runs of growing load; noise of single steps, and of minutes in common."""
    rng = np.random.default_rng(seed)
    B = np.concatenate([rng.integers(1, top + 1, rows // 5) for top in (4, 8, 16, 32, 64)]).astype(float)
    minutes = np.repeat(rng.normal(0, shared, rows // 50), 50)
    T = (tau_0 + 0.6 * B) * np.exp(minutes + rng.normal(0, noise, rows))
    return Trace({"B": B, "S": B, "T_ms": T, "t_s": np.arange(rows) * 0.1})


def test_a_line_with_noise_in_common_pins_nothing_that_bends() -> None:
    """Planted: T = 17 + 0.6 B; any value of a peak or a rate that the fit called known would be wrong."""
    for seed in range(3):
        found = fit_trace(decode_log(17.0, 0.05, 0.03, seed=seed), FitOptions("saturation"))
        for name in ("P_max", "k_B", "k_S"):
            assert not found.parameters[name].identified, (seed, name)
        tau_0 = found.parameters["tau_0"]
        assert not tau_0.identified or (tau_0.low or 0.0) <= 17.5
        assert found.status is FitStatus.PARTLY_IDENTIFIED
        assert found.identifiability.line_as_good


def test_a_curve_is_still_told() -> None:
    found = fit_trace(planted_trace(0.05, repeats=5), FitOptions("saturation"))
    assert not found.identifiability.line_as_good
    for name in ("P_max", "k_B", "k_S"):
        known = found.parameters[name]
        assert known.identified
        assert known.std_error is not None
        assert abs(np.log(known.value / dict(zip(PARAMETERS, REFERENCE, strict=True))[name])) < 1.0


PARAMETERS = [p.name for p in Saturation().parameters]


def test_a_peak_that_measured_decode_steps_leave_open_is_not_called_known(measured_steps: Path) -> None:
    """On these data any peak from 18 tokens/ms on fits within 1 % of the best cost."""
    trace = ingest(measured_steps / "ibm_llm_pilot_llama-13b_a100_tp4.parquet").trace
    found = fit_trace(trace.select(trace.floats("S") == trace.floats("B")), FitOptions("saturation"))
    assert not found.parameters["P_max"].identified
    assert found.parameters["P_max"].high is None
    assert any("P_max" in group for group in found.identifiability.unidentified)
    assert "line_as_good" in {caution.code for caution in found.warnings}
