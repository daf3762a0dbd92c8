"""The longest gap between tokens that a prompt causes, against slow engines in plain Python."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from latfit.model import FitResult
from latfit.model.formulas import TAU_A
from latfit.planning.serving.result import Stalls
from latfit.planning.serving.search import BUDGETS
from latfit.planning.serving.stalls import longest_gap, stalls_of
from latfit.simulation import EngineSettings, StepCosts, linear_costs, serve
from latfit.simulation.engine.step_cost import PLACES
from latfit.workload import make_requests
from tests.oracle.engine_reference import Engine, One
from tests.oracle.test_engine_reference import COSTS, slow_cost
from tests.unit.planning.test_plan import fit_with

ATTENTION = 2.0**-10
LATE_MS = 50.0


def with_attention(costs: StepCosts) -> StepCosts:
    typical = costs.typical.copy()
    typical[:, PLACES[TAU_A.column]] = ATTENTION
    return costs._replace(typical=typical)


def slow_with_attention(step: list[tuple[int, int, bool]]) -> float:
    return slow_cost(step) + ATTENTION * sum(p * (k + p / 2) for p, k, decodes in step if not decodes)


class Timed(Engine):
    """An engine that notes when each request has a token."""

    def make(self, planned: list[One]) -> None:
        before = {one.number: one.generated for one in planned}
        super().make(planned)
        for one in planned:
            if one.generated > before[one.number]:
                self.tokens.setdefault(one.number, []).append(self.busy_until)

    tokens: dict[int, list[float]]


@given(
    D=st.integers(1, 30), prompt=st.integers(2, 600), beyond=st.integers(8, 300), limit=st.sampled_from([0, 0, 0, 48])
)
def test_the_gap_is_the_longest_that_a_slow_engine_shows(D: int, prompt: int, beyond: int, limit: int) -> None:
    """D requests decode when the prompt comes; the longest time between two of their tokens is the stall."""
    settings = EngineSettings(
        max_num_seqs=D + 1,
        max_num_batched_tokens=D + beyond,
        long_prefill_token_threshold=limit,
        kv_blocks=400,
        padded_graphs=False,
    )
    steps = 40 + prompt // min(beyond, limit or beyond)
    lengths = np.array([1] * D + [prompt]), np.array([steps] * D + [2])
    requests = make_requests(np.array([0.0] * D + [LATE_MS]), *lengths)
    engine = Timed(requests, settings, slow_with_attention)
    engine.tokens = {}
    engine.run()
    seen = max(float(np.diff(engine.tokens[number]).max()) for number in range(D))
    assert longest_gap(with_attention(COSTS), settings, D, prompt, 0.0)[0] == pytest.approx(seen, rel=1e-12)


@pytest.mark.parametrize("batching", ["continuous", "selective", "chunked-prefill"])
def test_the_gap_is_that_of_the_simulated_engine(batching: str) -> None:
    """Whole prompts interrupt decoding, or make one long step; the compiled engine counts every gap."""
    settings = EngineSettings(
        batching=batching, max_num_seqs=17, max_num_batched_tokens=2048, kv_blocks=20_000, padded_graphs=False
    )
    lengths = np.array([1] * 16 + [1500]), np.array([100] * 16 + [2])
    run = serve(make_requests(np.array([0.0] * 16 + [LATE_MS]), *lengths), COSTS, settings)
    assert longest_gap(COSTS, settings, 16, 1500, 0.0)[0] == pytest.approx(run.itl["max"], rel=1e-12)


def stalls(throughput: dict[int, float], fit: FitResult | None = None) -> Stalls:
    lengths = np.full(1000, 4000), np.full(1000, 100)
    found = stalls_of(
        linear_costs(5.0, 0.0, 0.01),
        EngineSettings(),
        lengths,
        30.0,
        8192,
        lambda settings: throughput[settings.max_num_batched_tokens],
        fit,
    )
    assert found is not None
    return found


def test_the_knee_is_the_shortest_gap_that_costs_little_throughput() -> None:
    """T = 5 + 0.01 S ms; 95 % of the highest throughput are reached from 1,024 on. A prompt fits into 4,096."""
    found = stalls({256: 700.0, 512: 940.0, 1024: 955.0, 2048: 1000.0, 4096: 999.0})
    gaps = {each.max_num_batched_tokens: each.gap_ms for each in found.choices}
    assert gaps == pytest.approx({256: 7.56, 512: 10.12, 1024: 15.24, 2048: 25.48, 4096: 45.3}, rel=1e-9)
    assert found.planned.max_num_batched_tokens == 2048
    assert found.knee.max_num_batched_tokens == 1024
    assert found.prompt_tokens == 4000


def test_the_interval_of_a_gap_is_that_of_a_mixed_step() -> None:
    mixed = {"ratio_quantiles": {"0.95": 1.3}, "lower_quantiles": {"0.95": 0.8}}
    fit = fit_with([5.0, 0.0, 0.01], "linear", intervals={"by_phase": {"mixed": mixed}})
    for each in stalls(dict.fromkeys(BUDGETS, 1.0), fit).choices:
        assert each.interval_ms == pytest.approx((0.8 * each.gap_ms, 1.3 * each.gap_ms))


def test_an_engine_of_one_request_stalls_nobody() -> None:
    lengths = np.full(10, 4000), np.full(10, 100)
    one = replace(EngineSettings(), max_num_seqs=1)
    assert stalls_of(COSTS, one, lengths, 1.0, 8192, lambda settings: 1.0) is None
