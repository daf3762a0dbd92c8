"""Properties that hold for any machine: thresholds follow the launch cost, feasible sets are what enumeration finds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from latfit.hardware.path_latency import PathLatency
from latfit.hardware.profile import ExecutionPath
from latfit.planning.steps.limits import feasible_ranges
from latfit.planning.steps.thresholds import amortised_batch, gpu_threshold, knee_batch, prefill_threshold
from latfit.planning.support import doubtful_steps
from latfit.stats import FloatArray
from tests.unit.planning.test_plan import fit_with, line

costs = st.floats(0.01, 20.0)
slopes = st.floats(0.01, 1.0)


def path(name: str, tau: float, slope: float, **parts: Any) -> PathLatency:
    return PathLatency(ExecutionPath(name, line(tau, slope, **parts)))


class TestLaunchCost:
    @given(costs, costs, slopes, slopes)
    def test_thresholds_rise_with_it(self, one: float, other: float, slow: float, fast: float) -> None:
        low, high = sorted((one, other))
        cpu = path("amx", 0.1, slow)
        gpus = [path("gpu", tau, fast) for tau in (low, high)]
        B1 = [gpu_threshold(cpu, gpu).value or 10**9 for gpu in gpus]
        B2 = [amortised_batch(gpu).value or 0 for gpu in gpus]
        knees = [knee_batch(gpu).value or 0 for gpu in gpus]
        assert B1[0] <= B1[1]
        assert B2[0] <= B2[1]
        assert knees[0] <= knees[1]

    @given(costs, slopes, st.floats(0.0, 10.0), st.floats(0.0, 10.0))
    def test_a_wait_or_a_transfer_never_lowers_B1(self, tau: float, slope: float, one: float, other: float) -> None:
        low, high = sorted((one, other))
        cpu, gpu = path("amx", 0.0, 1.5), path("gpu", tau, slope)
        first, second = (gpu_threshold(cpu, gpu, extra_ms=extra).value or 10**9 for extra in (low, high))
        assert first <= second

    @given(costs, slopes, slopes)
    def test_B1_is_the_first_win_and_stretches_are_all_wins(self, tau: float, slow: float, fast: float) -> None:
        found = gpu_threshold(path("amx", 0.0, slow), path("gpu", tau, fast))
        B = np.arange(1, 257)
        wins = set(B[tau + fast * B <= slow * B * (1 + 1e-15)].tolist())
        told = {b for low, high in found.wins for b in range(low, high + 1)}
        assert told == wins
        assert found.value == (min(wins) if wins else None)


class TestKnownLines:
    def test_the_knee_of_a_line(self) -> None:
        """B/(tau + alpha B)^2 is largest at tau/alpha."""
        assert knee_batch(path("gpu", 8.0, 0.1)).value == 80
        assert "may lie beyond" in knee_batch(path("gpu", 80.0, 0.1)).reason

    @pytest.mark.parametrize(("share", "value"), [(0.5, 160), (0.1, 1440)])
    def test_published_B2(self, share: float, value: int) -> None:
        """theory H3: ceil(tau (1/eps - 1)/alpha) for tau 8, alpha 0.05, without a limit on B."""
        wide = path("gpu", 8.0, 0.05, domain={"B": [1, 10**6], "S": [1, 10**6]})
        # The best rate is only reached at infinity; at 1e6 it is short of it by 1.6e-4.
        assert amortised_batch(wide, share).value == pytest.approx(value, rel=2e-3)

    def test_prefill_threshold(self) -> None:
        slow, fast = (ExecutionPath("p", fit_with([tau, 0.0, s], "linear")) for tau, s in ((0.0, 0.5), (8.0, 0.01)))
        assert prefill_threshold(slow, fast).value == 17
        assert prefill_threshold(slow, fast, extra_ms=8.0).value == 33


class TestIntervals:
    def test_B1_spreads_as_its_root_does(self) -> None:
        """GPU 8 + 0.05 B with an uncertain launch cost against AMX 2 B: the root is tau/1.95."""
        taus = 8 * np.exp(np.random.default_rng(0).normal(0, 0.1, 200))
        draws = {"parameters": ["tau_0"], "values": taus[:, None].tolist()}
        found = gpu_threshold(path("amx", 0, 2), path("gpu", 8, 0.05, draws=draws))
        assert found.value == 5
        roots = np.ceil(np.quantile(taus, [0.025, 0.975], method="inverted_cdf") / 1.95)
        assert found.interval == tuple(roots)
        assert found.never_share == 0

    def test_a_share_of_never_is_told(self) -> None:
        """GPU slope 0.9 to 2.1 around an AMX of 2 B: where it is not below, the GPU never wins."""
        slopes = np.linspace(0.9, 2.4, 200)
        draws = {"parameters": ["tau_B"], "values": slopes[:, None].tolist()}
        found = gpu_threshold(path("amx", 0, 2), path("gpu", 1.0, 1.5, draws=draws))
        assert found.never_share == pytest.approx(np.mean(1.0 + slopes * 256 > 512), abs=1e-12)
        assert found.interval is not None
        assert found.interval[1] is None


class TestFeasibleSets:
    def test_published_two_intervals(self) -> None:
        """theory A9: experts make T concave at first; within 23 ms S is 7..36 or 152..1535."""

        def T(S: FloatArray) -> FloatArray:
            return np.asarray(2 + (372 + S) / -np.expm1(-0.002 * S) / 2000 - 20 * np.expm1(-0.0645385 * S))

        spans = feasible_ranges(T, 23.0, 1, None)
        assert [(span.low, span.high) for span in spans] == [(7, 36), (152, 1535)]

    @given(
        st.floats(0.5, 30.0), st.floats(0.0, 40.0), st.floats(0.001, 0.2), st.floats(0.01, 0.5), st.floats(5.0, 60.0)
    )
    def test_scan_finds_what_enumeration_finds(
        self, tau: float, bump: float, slope: float, k: float, limit: float
    ) -> None:
        def T(S: FloatArray) -> FloatArray:
            return np.asarray(tau + bump * S * k * np.exp(-k * S) + slope * S)

        spans = feasible_ranges(T, limit, 1, 300)
        S = np.arange(1.0, 301)
        inside = set(S[T(S) <= limit].astype(int).tolist())
        assert {s for span in spans for s in range(span.low, (span.high or 0) + 1)} == inside


class TestDoubts:
    def test_doubtful_steps_straddle_the_sla(self) -> None:
        slopes = 0.5 * np.exp(np.random.default_rng(0).normal(0, 0.2, 200))
        draws = {"parameters": ["tau_B"], "values": slopes[:, None].tolist()}
        unsure = path("gpu", 4.0, 0.5, draws=draws)
        found = doubtful_steps(unsure.path, 20.0, 99.0)
        assert found
        for step in found:
            assert step.low_ms <= 20.0 <= step.high_ms
            assert step.chance == pytest.approx(np.mean(4.0 + slopes * step.B <= 20.0))
        # 4 + 0.5 B = 20 at B = 32: the least certain step is near it.
        assert abs(np.log(found[0].B / 32)) < 0.3

    def test_a_fit_without_draws_has_no_doubts_to_tell(self) -> None:
        assert doubtful_steps(path("gpu", 4.0, 0.5).path, 20.0, 99.0) == []
