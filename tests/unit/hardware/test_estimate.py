"""Estimates of a path: factors by phase against the law they were taken from; ceilings against arithmetic."""

import numpy as np
import pytest
from msgspec import structs

from latfit.errors import WrongUsage
from latfit.hardware.ceiling import Ceiling, beside_the_fit
from latfit.hardware.path_latency import PathLatency
from latfit.hardware.profile import ExecutionPath
from latfit.model.step_noise import noise_of
from tests.unit.planning.test_plan import line

LEVELS = (0.5, 0.9, 0.95, 0.99)


def path_with(draws: np.ndarray) -> ExecutionPath:
    """A path whose limits and ratios are those of draws of observed over typical."""
    limits = {
        "ratio_quantiles": {f"{p:g}": float(np.quantile(draws, p)) for p in LEVELS},
        "lower_quantiles": {f"{p:g}": float(np.quantile(draws, 1 - p)) for p in LEVELS},
        "ratios": noise_of(draws, np.ones(len(draws))).to_json(),
    }
    return ExecutionPath("gpu", line(4, 0.1, intervals=limits))


def test_mean_and_spread_are_those_of_the_sample() -> None:
    draws = np.random.default_rng(0).lognormal(0, 0.2, 200_000)
    latency = PathLatency(path_with(draws))
    found = latency.noise
    assert found is not None
    assert found.pooled.mean == pytest.approx(draws.mean(), rel=1e-7)
    assert found.cv(np.ones(1), np.ones(1))[0] == pytest.approx(draws.std() / draws.mean(), rel=1e-3)
    assert latency.mean_ms(np.array([10.0]))[0] == pytest.approx(5.0 * found.pooled.mean)


def test_quantiles_are_the_factor_times_the_typical_step() -> None:
    path = path_with(np.random.default_rng(1).lognormal(0, 0.1, 50_000))
    found = PathLatency(path).estimate(8)
    assert found.typical_ms == pytest.approx(4.8)
    for level, value in found.quantiles.items():
        assert value == pytest.approx(4.8 * np.exp(0.1 * _normal(level)), rel=0.02)
    assert found.source == "fitted"
    assert not found.outside
    assert PathLatency(path).estimate(1000).outside


def _normal(level: float) -> float:
    from scipy.stats import norm

    return float(norm.ppf(level))


@pytest.mark.parametrize(("B", "tokens", "context"), [(0, 1, None), (1, 0, None), (1, 1, -1.0)])
def test_impossible_batches(B: int, tokens: float, context: float | None) -> None:
    with pytest.raises(WrongUsage):
        PathLatency(ExecutionPath("gpu", line(4, 0.1)), tokens, context).estimate(B)


class TestCeiling:
    def test_published_decode_floor(self) -> None:
        """theory I2: 16.06e9 + 16777216000 bytes at 3.35e12 B/s take 9.80215 ms."""
        whole = Ceiling(bandwidth=3.35e12, step_bytes=16.06e9 + 16_777_216_000)
        assert beside_the_fit(whole, line(4, 0.1)).floor_ms == pytest.approx(9.80215, rel=1e-5)

    def test_share_of_a_line(self) -> None:
        """T = 2 + 0.02 S on a machine of 100 tokens/ms: the peak inside S <= 4096 is 4096/83.92."""
        fit = line(2, 0.0)
        fit = structs.replace(
            fit, parameters={**fit.parameters, "tau_S": structs.replace(fit.parameters["tau_S"], value=0.02)}
        )
        found = beside_the_fit(Ceiling(flops=1e15, flops_per_token=1e10), fit)
        assert found.fitted_tokens_per_ms == pytest.approx(4096 / 83.92)
        assert found.peak_share == pytest.approx(4096 / 83.92 / 100)
        assert found.floor_ms is None

    @pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
    def test_numbers_must_be_above_zero(self, value: float) -> None:
        with pytest.raises(WrongUsage, match="not above zero"):
            Ceiling(flops=value)
