"""Steps that scatter: sums of independent draws, Pollaczek and Khinchine's formula, a slow engine with other draws."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from latfit.model.fit_parts import Estimate
from latfit.model.fit_result import FitResult, FitStatus
from latfit.model.step_noise import SizeLevels, StepNoise, noise_of
from latfit.simulation.engine.replicas import Routing, Transfer, serve_apart, serve_replicas
from latfit.simulation.engine.run import EngineRun, serve
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import StepCosts, linear_costs, scatter_from, step_costs
from latfit.workload.requests import Requests, make_requests

STEP_MS = 2.0
ONE = EngineSettings(max_num_seqs=1, kv_blocks=1001, asynchronous=False, padded_graphs=False)
PLAIN = replace(ONE, max_num_seqs=512)
PAUSED, PAUSE = 0.01, 21.0
"""So many steps take PAUSE times their cost, the others what they cost."""


def law(values: list[float], shares: list[float], levels: SizeLevels | None = None) -> StepNoise:
    found = noise_of(np.array(values), 1e4 * np.array(shares))
    return found if levels is None else replace(found, levels=levels)


PAUSES = law([1.0, PAUSE], [1 - PAUSED, PAUSED])


def costs(decode: StepNoise | None, prefill: StepNoise | None = None, mixed: StepNoise | None = None) -> StepCosts:
    return linear_costs(STEP_MS, 0.0, 0.0)._replace(scatter=scatter_from(decode, prefill, mixed))


def a_fit(name: str, values: dict[str, float], intervals: Mapping[str, object]) -> FitResult:
    parameters = {key: Estimate(value, None, None, None, "ms") for key, value in values.items()}
    return FitResult(name, FitStatus.CONVERGED, parameters, intervals=intervals)


def a_load(n: int = 300, seed: int = 1) -> Requests:
    rng = np.random.default_rng(seed)
    return make_requests(
        np.cumsum(rng.exponential(40.0, n)), rng.integers(1, 900, n), rng.integers(1, 90, n), user_id=np.arange(n) % 3
    )


def moments(run: EngineRun) -> tuple[bytes, bytes, bytes]:
    return run.start_ms.tobytes(), run.first_ms.tobytes(), run.last_ms.tobytes()


def test_a_request_alone_takes_a_sum_of_independent_ratios() -> None:
    """Of k steps J ~ Bin(k, p) pause: latency T (k + (PAUSE - 1) J), whose moments and percentiles are known."""
    n, k = 40_000, 8
    run = serve(make_requests(1e5 * np.arange(float(n)), 1, k), costs(PAUSES), ONE)
    mean = STEP_MS * k * (1 + (PAUSE - 1) * PAUSED)
    variance = k * (STEP_MS * (PAUSE - 1)) ** 2 * PAUSED * (1 - PAUSED)
    assert run.latency_ms.mean() == pytest.approx(mean, abs=4 * np.sqrt(variance / n))
    paused = np.round((run.latency_ms / STEP_MS - k) / (PAUSE - 1)).astype(int)
    np.testing.assert_allclose(run.latency_ms, STEP_MS * (k + (PAUSE - 1) * paused), rtol=1e-6)
    for j, share in enumerate([(1 - PAUSED) ** k, k * PAUSED * (1 - PAUSED) ** (k - 1)]):
        assert (paused == j).mean() == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / n))
    # P(J > 0) = 7.7 %, P(J > 1) = 0.3 %: one request in a hundred has one pause.
    assert np.quantile(run.latency_ms, 0.99) == pytest.approx(STEP_MS * (k + PAUSE - 1))
    assert run.busy_ms == pytest.approx(run.latency_ms.sum())
    # Neighbouring requests have nothing to do with each other.
    together = np.corrcoef(run.latency_ms[:-1], run.latency_ms[1:])[0, 1]
    assert together == pytest.approx(0.0, abs=4 / np.sqrt(n))


def test_fits_by_phase_bring_their_own_laws() -> None:
    values = {"tau_0": 2.0, "tau_B": 0.0, "tau_S": 0.0}
    decode, prefill, mixed = (law([each], [1.0]).to_json() for each in (1.5, 2.0, 3.0))
    one = a_fit("linear", values, {"by_phase": {"decode": {"ratios": decode}}})
    other = a_fit("linear", values, {"by_phase": {"prefill": {"ratios": prefill}, "mixed": {"ratios": mixed}}})
    run = serve(make_requests([0.0, 6.0], [4, 4], [4, 2]), step_costs(one, other), PLAIN)
    assert (run.first_ms.tolist(), run.last_ms.tolist()) == ([4.0, 13.0], [16.0, 16.0])
    bare = serve(make_requests([0.0], [4], [3]), step_costs(one, other, scatter=False), PLAIN)
    assert (bare.first_ms.item(), bare.last_ms.item()) == (2.0, 6.0)


@pytest.mark.parametrize("batching", ["chunked-prefill", "continuous", "selective", "static"])
def test_what_does_not_scatter_changes_not_one_bit(batching: str) -> None:
    settings = EngineSettings(batching=batching, kv_blocks=500)
    plain = linear_costs(8.0, 0.02, 0.05)
    ones = plain._replace(scatter=scatter_from(*[law([1.0], [1.0])] * 3))
    fit = a_fit("linear", {"tau_0": 8.0, "tau_B": 0.02, "tau_S": 0.05}, {})
    bare = moments(serve(a_load(), plain, settings))
    assert moments(serve(a_load(), ones, settings)) == bare
    assert moments(serve(a_load(), step_costs(fit), settings)) == bare


@pytest.mark.parametrize("batching", ["chunked-prefill", "continuous", "selective", "static"])
def test_draws_go_by_the_seed_alone(batching: str) -> None:
    """Repeating steps in one go meet the same numbers as steps one by one."""
    settings = EngineSettings(batching=batching, kv_blocks=500)
    drawn = linear_costs(8.0, 0.02, 0.05)._replace(scatter=scatter_from(PAUSES, PAUSES, PAUSES))
    one = moments(serve(a_load(), drawn, settings, 5))
    assert moments(serve(a_load(), drawn, settings, 5)) == one
    assert moments(serve(a_load(), drawn, replace(settings, fast=False), 5)) == one
    assert moments(serve(a_load(), drawn, settings, 6)) != one


def test_engines_beside_each_other_draw_for_themselves() -> None:
    """The same request to each of two replicas: paused together in a share p^2 of the steps, not p."""
    n = 20_000
    requests = make_requests(np.repeat(1e3 * np.arange(float(n)), 2), 1, 1)
    run = serve_replicas(requests, costs(PAUSES), ONE, Routing(2))
    paused = (run.latency_ms > 1.5 * STEP_MS).reshape(n, 2)
    error = np.sqrt(PAUSED / n)
    assert paused.mean(axis=0).tolist() == pytest.approx([PAUSED, PAUSED], abs=4 * error)
    assert paused.all(axis=1).mean() < 0.1 * PAUSED
    apart = serve_apart(
        make_requests(1e3 * np.arange(float(n)), 1, 2), (costs(PAUSES), costs(PAUSES)), (ONE, ONE), Transfer()
    )
    first, second = apart.first_ms - 1e3 * np.arange(float(n)), apart.last_ms - apart.first_ms
    assert ((first > 1.5 * STEP_MS) & (second > 1.5 * STEP_MS)).mean() < 0.1 * PAUSED
