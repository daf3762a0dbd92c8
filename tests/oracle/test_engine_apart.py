"""Prefill and decoding apart, several engines of each, against slow engines in plain Python."""

from dataclasses import replace

import numpy as np
from hypothesis import given, strategies as st

from latfit.simulation import EngineSettings, Routing, Transfer
from latfit.simulation.engine.replicas import serve_apart
from latfit.workload import Requests
from tests.oracle.engine_reference import Engine, One
from tests.oracle.test_engine_reference import COSTS, random_case, slow_cost

TRANSFER = Transfer(2.0, 0.125)
"""Sums of eighths, exact in binary."""


class Handed(Engine):
    """An engine whose requests come with their prompt computed and their first token."""

    def __init__(self, requests: Requests, options: EngineSettings) -> None:
        super().__init__(requests, options, slow_cost)
        for one in self.all:
            one.generated = 1

    def start(self, one: One, budget: int) -> int:
        if not one.preempted:
            one.computed = one.known - 1
        return super().start(one, budget)


def slow(requests: Requests, options: EngineSettings, engines: tuple[int, int]) -> tuple[list[float], list[float]]:
    """When the first and the last tokens come, by engines that take turns."""
    alone = replace(requests, output_tokens=np.ones(len(requests), dtype=np.int64))
    first = np.full(len(requests), np.nan)
    for k in range(min(engines[0], len(requests))):
        engine = Engine(alone.select(slice(k, None, engines[0])), options, slow_cost)
        engine.run()
        first[k :: engines[0]] = [one.first for one in engine.all]
    last = first.copy()
    arrived = first + TRANSFER.fixed_ms + TRANSFER.ms_per_token * requests.prompt_tokens
    more = [row for row in np.argsort(arrived, kind="stable") if requests.output_tokens[row] > 1]
    for k in range(min(engines[1], len(more))):
        rows = np.array(more[k :: engines[1]])
        columns = {name: getattr(requests, name)[rows] for name in ("prompt_tokens", "output_tokens")}
        handed = replace(requests.select(slice(0, len(rows))), arrival_ms=arrived[rows], **columns)
        engine = Handed(handed, options)
        engine.run()
        last[rows] = [one.last for one in engine.all]
    return first.tolist(), last.tolist()


@given(seed=st.integers(0, 2**32 - 1), prefill=st.integers(1, 3), decode=st.integers(1, 3))
def test_the_core_does_what_slow_engines_apart_do(seed: int, prefill: int, decode: int) -> None:
    requests, options = random_case(seed)
    first, last = slow(requests, options, (prefill, decode))
    routing = (Routing(prefill), Routing(decode))
    run = serve_apart(requests, (COSTS, COSTS), (options, options), TRANSFER, 0, routing)
    np.testing.assert_array_equal(run.first_ms, first)
    np.testing.assert_array_equal(run.last_ms, last)
