"""Comparing and calibrating: against runs of engines with planted differences, and against a real one."""

import numpy as np
import pytest

from latfit.errors import BadInput
from latfit.model.step_noise import noise_of
from latfit.simulation.engine.run import serve
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import StepCosts, linear_costs, scaled_costs, scatter_from
from latfit.validation.compare import ValidationOptions, validate
from latfit.validation.measured import Measured
from latfit.workload.requests import make_requests

COSTS = linear_costs(8.0, 0.05, 0.02)
LIMITS = EngineSettings(kv_blocks=600, max_num_seqs=64, max_num_batched_tokens=512)


def planted(costs: StepCosts, n: int = 240, most_output: int = 200) -> Measured:
    """A run of an engine with these step costs, as if it had been measured."""
    rng = np.random.default_rng(3)
    output = np.append(rng.integers(2, 200, n - 1), 1).clip(1, most_output)
    requests = make_requests(np.sort(rng.uniform(0, 15_000, n)), rng.integers(20, 400, n), output)
    run = serve(requests, costs, LIMITS)
    return Measured(requests, run.first_ms, run.last_ms)


def test_a_run_agrees_with_itself() -> None:
    found = validate(planted(COSTS), COSTS, LIMITS)
    assert found.agrees
    assert found.verdict.startswith("Simulation agrees")
    assert all(each.error_pct == 0.0 for row in found.metrics.values() for each in row.values())


def test_a_run_of_single_tokens_is_judged_by_what_it_has() -> None:
    """No request has a TPOT."""
    found = validate(planted(COSTS, most_output=1), COSTS, LIMITS)
    assert found.agrees
    assert validate(planted(scaled_costs(COSTS, 1.0, 1.5, 0.0), most_output=1), COSTS, LIMITS).agrees is False


def test_an_engine_with_more_overhead_is_told_apart() -> None:
    found = validate(planted(scaled_costs(COSTS, 1.0, 1.0, 1.5)), COSTS, LIMITS)
    assert not found.agrees
    assert found.verdict.startswith("Simulation differs")
    assert found.to_json()["metrics"]["tpot_ms"]["mean"]["error_pct"] < -2.0


def test_calibration_recovers_planted_parameters() -> None:
    """Decode steps 6 % slower, 2 ms of host time, 30 ms before the scheduler has a request; load comes in bursts."""
    noise = noise_of(np.array([0.9, 1.0, 1.1]), np.array([1e4, 1e4, 1e4]))
    costs = linear_costs(8.0, 0.2, 0.02)._replace(scatter=scatter_from(noise, noise, noise))
    limits = EngineSettings(kv_blocks=4000, max_num_seqs=64, max_num_batched_tokens=2048)
    rng = np.random.default_rng(4)
    gap_ms = np.where(np.arange(900) // 60 % 2 == 0, 200.0, 30.0)
    requests = make_requests(np.cumsum(rng.exponential(gap_ms)), rng.integers(20, 1500, 900), rng.integers(2, 150, 900))
    run = serve(requests, scaled_costs(costs, 1.06, 1.0, 2.0), limits, seed=7)
    found = validate(
        Measured(requests, run.first_ms + 30.0, run.last_ms + 30.0), costs, limits, ValidationOptions(True)
    )
    assert found.calibration is not None
    # Three times the root mean square error over 16 other seeds.
    planted_within = {"decode_factor": (1.06, 0.065), "prefill_factor": (1.0, 0.035)}
    planted_within |= {"step_ms": (2.0, 0.6), "start_ms": (30.0, 1.7)}
    for name, (truth, within) in planted_within.items():
        value, error = getattr(found.calibration, name), found.calibration.errors[name]
        assert abs(value - truth) < min(within, 4 * error), (name, value, error)
    assert found.calibration.errors["decode_factor"] < 0.02
    assert found.scored == 600
    means = found.mean_errors
    assert abs(means["ttft_ms"]) < 2.0
    assert abs(means["tpot_ms"]) < 1.0
    assert abs(means["latency_ms"]) < 1.0


def test_too_few_to_calibrate_with() -> None:
    with pytest.raises(BadInput, match="too few"):
        validate(planted(COSTS, 20), COSTS, LIMITS, ValidationOptions(calibration=True))
