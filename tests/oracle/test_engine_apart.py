"""Prefill and decoding apart, several engines of each, against slow engines in plain Python."""

from dataclasses import replace

import numpy as np
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from latfit.simulation import EngineSettings, Routing, Transfer
from latfit.simulation.engine.cluster.replicas import serve_apart
from latfit.workload import Requests
from tests.oracle.engine_reference import Engine, One
from tests.oracle.test_engine_reference import COSTS, random_case, slow_cost

TRANSFER = Transfer(2.0, 0.125)
"""Sums of eighths, exact in binary."""


class Handed(Engine):
    """An engine of whose requests those apart (n,) come with their prompt computed and their first token."""

    def __init__(self, requests: Requests, options: EngineSettings, apart: NDArray[np.bool_]) -> None:
        super().__init__(requests, options, slow_cost)
        self.given = [one for one, elsewhere in zip(self.all, apart.tolist(), strict=True) if elsewhere]
        for one in self.given:
            one.generated = 1

    def start(self, one: One, budget: int) -> int:
        if not one.preempted and any(one is each for each in self.given):
            one.computed = one.known - 1
        return super().start(one, budget)


def slow(
    requests: Requests, options: EngineSettings, engines: tuple[int, int], prompts: tuple[float, float]
) -> tuple[list[float], list[float]]:
    """When the first and the last tokens come, by engines that take turns."""
    elsewhere = (requests.prompt_tokens >= prompts[0]) & (requests.prompt_tokens <= prompts[1])
    given = np.flatnonzero(elsewhere)
    alone = replace(requests, output_tokens=np.ones(len(requests), dtype=np.int64))
    first = np.full(len(requests), np.nan)
    for k in range(min(engines[0], len(given))):
        engine = Engine(alone.select(given[k :: engines[0]]), options, slow_cost)
        engine.run()
        first[given[k :: engines[0]]] = [one.first for one in engine.all]
    last = first.copy()
    moved = first + TRANSFER.fixed_ms + TRANSFER.ms_per_token * requests.prompt_tokens
    arrived = np.where(elsewhere, moved, requests.arrival_ms)
    more = [row for row in np.argsort(arrived, kind="stable") if requests.output_tokens[row] > 1 or not elsewhere[row]]
    for k in range(min(engines[1], len(more))):
        rows = np.array(more[k :: engines[1]])
        columns = {name: getattr(requests, name)[rows] for name in ("prompt_tokens", "output_tokens")}
        handed = replace(requests.select(slice(0, len(rows))), arrival_ms=arrived[rows], **columns)
        engine = Handed(handed, options, elsewhere[rows])
        engine.run()
        last[rows] = [one.last for one in engine.all]
        first[rows] = np.where(elsewhere[rows], first[rows], [one.first for one in engine.all])
    return first.tolist(), last.tolist()


@given(
    seed=st.integers(0, 2**32 - 1),
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
    ends=st.sampled_from([(0.0, 1.0), (0.0, 0.5), (0.4, 1.0), (0.3, 0.6), (2.0, 3.0)]),
)
def test_the_core_does_what_slow_engines_apart_do(
    seed: int, prefill: int, decode: int, ends: tuple[float, float]
) -> None:
    """ends: the shortest and the longest prompt that is prefilled apart, as a share of the longest of all."""
    requests, options = random_case(seed)
    longest = float(requests.prompt_tokens.max())
    prompts = (ends[0] * longest, ends[1] * longest)
    first, last = slow(requests, options, (prefill, decode), prompts)
    routing = (Routing(prefill), Routing(decode))
    moved = replace(TRANSFER, prompts=prompts)
    run = serve_apart(requests, (COSTS, COSTS), (options, options), moved, 0, routing)
    np.testing.assert_array_equal(run.first_ms, first)
    np.testing.assert_array_equal(run.last_ms, last)
