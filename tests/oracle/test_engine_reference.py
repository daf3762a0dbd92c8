"""The compiled core against the slow one of `reference`, and its short cut against stepping, on small random cases."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from latfit.simulation.engine.run import EngineRun, serve
from latfit.simulation.engine.settings import EngineSettings, Order, Speculation
from latfit.simulation.engine.step_cost import linear_costs
from latfit.workload.requests import Requests, make_requests
from tests.oracle.engine_reference import Engine

TAU_0, TAU_B, TAU_S = 3.0, 0.25, 0.125
"""Sums of eighths: exact in binary, so that both must agree to the last bit."""

COSTS = linear_costs(TAU_0, TAU_B, TAU_S)


def slow_cost(step: list[tuple[int, int, bool]]) -> float:
    return TAU_0 + TAU_B * len(step) + TAU_S * sum(chunk for chunk, _, _ in step)


def random_case(seed: int) -> tuple[Requests, EngineSettings]:
    """Few requests, few blocks: preemption, resumption and waiting for blocks are the rule."""
    rng = np.random.default_rng(seed)
    n, size = int(rng.integers(1, 25)), int(rng.choice([1, 4, 16]))
    prompt, output = rng.integers(1, 60, n), rng.integers(1, 40, n)
    largest = int(np.max(-(-(prompt + output) // size)))
    blocks = largest + int(rng.integers(1, 2 + 2 * largest))
    arrivals = np.sort(np.round(rng.exponential(rng.choice([0.0, 5.0, 40.0]), n).cumsum() * 8) / 8)
    seqs = int(rng.integers(1, 12))
    options = EngineSettings(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + int(rng.integers(0, 60)),
        kv_blocks=blocks + 1,
        block_size=size,
        long_prefill_token_threshold=int(rng.choice([0, 0, 7])),
        asynchronous=bool(rng.integers(2)),
        reuse_freed=bool(rng.integers(2)),
        padded_graphs=False,
        fast=bool(rng.integers(2)),
    )
    return make_requests(arrivals, prompt, output), options


@given(seed=st.integers(0, 2**32 - 1))
def test_the_core_does_what_the_slow_one_does(seed: int) -> None:
    requests, options = random_case(seed)
    slow = Engine(requests, options, slow_cost)
    slow.run()
    run = serve(requests, COSTS, options)
    assert run.counters.steps == slow.steps
    assert run.counters.preemptions == slow.preemptions
    np.testing.assert_array_equal(run.first_ms, [one.first for one in slow.all])
    np.testing.assert_array_equal(run.last_ms, [one.last for one in slow.all])


VARIANTS = (
    EngineSettings(asynchronous=False),
    EngineSettings(padded_graphs=False),
    EngineSettings(batching="continuous"),
    EngineSettings(batching="continuous", start_at=4),
    EngineSettings(batching="selective"),
    EngineSettings(swap_ms_per_token=0.01),
    EngineSettings(cached_share=0.5),
    EngineSettings(long_prefill_token_threshold=64),
    EngineSettings(speculation=Speculation(2, 0.6, 0.3)),
    *(EngineSettings(order=Order(name)) for name in ("sjf", "slo", "fair", "switch")),
    EngineSettings(order=Order("priority", ageing_ms=400.0)),
)
"""One of every kind; the limits are set by `crowded`."""


def crowded(options: EngineSettings, n: int = 300, seed: int = 1) -> tuple[Requests, EngineSettings]:
    """A load that fills the cache, and settings under which it does."""
    rng = np.random.default_rng(seed)
    requests = make_requests(
        np.sort(rng.uniform(0, 8_000, n)),
        rng.integers(1, 300, n),
        rng.integers(1, 200, n),
        class_id=rng.integers(0, 3, n),
        user_id=rng.integers(0, 5, n),
        deadline_ms=np.array([500.0, 2000.0, np.inf])[rng.integers(0, 3, n)],
    )
    return requests, replace(options, max_num_seqs=24, max_num_batched_tokens=256, kv_blocks=180)


def name_of(options: EngineSettings) -> str:
    return f"{options.batching}-{options.order.name}-{options.speculation.draft_tokens}-{options.start_at}"


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_the_short_cut_changes_not_one_bit(options: EngineSettings) -> None:
    requests, options = crowded(options)
    costs = linear_costs(3.1, 0.07, 0.013)
    fast, slow = (serve(requests, costs, replace(options, fast=way)) for way in (True, False))
    for column in ("seen_ms", "start_ms", "first_ms", "last_ms", "batch_sizes"):
        np.testing.assert_array_equal(getattr(fast, column), getattr(slow, column))
    assert fast.counters == slow.counters
    assert fast.busy_ms == slow.busy_ms
    assert fast.itl == slow.itl
    for mine, other in zip(fast.timelines, slow.timelines, strict=True):
        np.testing.assert_allclose(mine.kv_usage, other.kv_usage, rtol=1e-12)


def in_system_ms(run: EngineRun) -> float:
    return float(np.sum(run.latency_ms))


@pytest.mark.parametrize("options", [*VARIANTS, EngineSettings(batching="static")], ids=name_of)
def test_requests_tokens_and_blocks_are_conserved(options: EngineSettings) -> None:
    requests, options = crowded(options)
    run = serve(requests, linear_costs(3.1, 0.07, 0.013), options)
    assert np.all(np.isfinite(run.last_ms))
    assert np.all(run.seen_ms >= requests.arrival_ms)
    assert np.all(run.start_ms >= run.seen_ms)
    assert np.all(run.first_ms > run.start_ms)
    assert np.all(run.last_ms >= run.first_ms)
    assert run.counters.generated_tokens == int(requests.output_tokens.sum())
    assert run.counters.free_blocks == options.kv_blocks - options.null_blocks
    assert run.busy_ms <= run.makespan_ms * (1 + 1e-12)
    assert int(run.batch_sizes.sum()) == run.counters.steps
    if options.speculation.draft_tokens == 0 and options.batching != "static":
        again = run.counters.preemptions > 0
        needed = int((requests.prompt_tokens + requests.output_tokens - 1).sum())
        saved = int((options.cached_share * requests.prompt_tokens // 16 * 16).sum())
        assert run.counters.computed_tokens >= needed - saved
        assert again or run.counters.computed_tokens == needed - saved


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_littles_law(options: EngineSettings) -> None:
    """The time integral of requests in the system is the sum of their times in it (H = sum of N(t) dt)."""
    requests, options = crowded(options)
    run = serve(requests, linear_costs(3.1, 0.07, 0.013), options)
    moments = np.concatenate([requests.arrival_ms, run.last_ms])
    change = np.concatenate([np.ones(len(requests)), -np.ones(len(requests))])
    order = np.argsort(moments, kind="stable")
    number = np.cumsum(change[order])
    area = float(np.sum(number[:-1] * np.diff(moments[order])))
    assert area == pytest.approx(in_system_ms(run), rel=1e-9)
    assert int(number[-1]) == 0
    # What the engine tallied of itself says the same, up to what arrives or ends within a step.
    seen = sum(float(np.nansum((t.running + t.waiting) * t.busy * t.slice_ms)) for t in run.timelines)
    assert seen == pytest.approx(area, rel=0.1)
