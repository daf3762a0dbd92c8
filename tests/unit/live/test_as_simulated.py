"""The live router decides as the simulator does: the same arrivals, the same exact service times, on virtual time, give
every request the same path and the same response."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from latfit.live import Request, Router, RouterOptions
from latfit.policies import POLICIES, Policy, Settings, named_policy
from latfit.queueing import ServiceTimes, optimal_rule
from latfit.simulation import System, linear_path
from latfit.simulation.policies.event_loop import Load
from latfit.simulation.policies.replication import Replication, draw, run
from latfit.simulation.policies.service import path_times
from latfit.workload import OpenLoad, Poisson, RequestClass, Streams
from tests.unit.live.virtual import ExactExecutor, clock_s, on_virtual_time

MAIN = linear_path("gpu", 6.0, 0.25, 32)
SIDE = linear_path("amx", 0.9, 1.7, 8)
REQUESTS = 1500


def served_live(policy: Policy, system: System, drawn: Load) -> tuple[list[float], list[str]]:
    """Responses in ms and paths, in order of arrival."""
    arrive = drawn.arrive
    classes = drawn.class_id if len(drawn.class_id) else np.zeros(len(arrive), np.int32)
    ended: dict[int, Request] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        executors = [ExactExecutor(path.name, path.typical_ms[1:], path.servers) for path in system.paths]
        router = Router(
            executors,
            [path.typical_ms[1:] for path in system.paths],
            policy,
            RouterOptions(deadlines_ms=tuple(drawn.deadlines)),
            clock_s,
        )
        router.listeners.append(lambda request: ended.__setitem__(request.input, request))
        await router.start()
        sent: list[asyncio.Task[object]] = []
        for i, moment in enumerate(arrive / 1000):
            await asyncio.sleep(max(0.0, moment - loop.time()))
            sent.append(loop.create_task(router.submit(i, int(classes[i]), arrived_s=moment)))
        await asyncio.wait(sent, timeout=60.0)
        await router.close()
        assert router.done == router.submitted == len(arrive)

    on_virtual_time(main())
    found = [ended[i] for i in range(len(arrive))]
    return [each.ended_ms - each.arrived_ms for each in found], [each.path for each in found]


def compared(policy: Policy, system: System, rate: float, load: OpenLoad | None = None) -> None:
    streams = Streams(7)
    drawn = draw(load or OpenLoad(Poisson(rate)), REQUESTS, 0.0, system, streams)
    simulated: Replication = run(policy, system, drawn, streams)
    responses, paths = served_live(policy, system, drawn)
    known = simulated.path >= 0
    assert known.sum() >= REQUESTS - 64  # a fixed batch may never be full at the end
    names = np.array([path.name for path in system.paths])
    assert (names[simulated.path[known]] == np.array(paths)[known]).all()
    np.testing.assert_allclose(np.array(responses)[known], simulated.response_ms[known], atol=1e-5, rtol=0)


@pytest.mark.parametrize("load", [0.5, 0.85])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy(name: str, load: float) -> None:
    system = System(MAIN, SIDE if POLICIES[name].needs_side else None)
    rate = load * MAIN.rate_limit(MAIN.largest)
    times = path_times(system)
    policy = named_policy(name, rate, times, Settings(), lambda asked, T: optimal_rule(asked, ServiceTimes(T)).table)
    with_deadlines = OpenLoad(Poisson(rate), classes=(RequestClass(deadline_ms=60.0),)) if name == "deadline" else None
    compared(policy, system, rate, with_deadlines)


def test_several_servers_share_a_path() -> None:
    system = System(replace(MAIN, servers=3), SIDE)
    rate = 0.7 * system.main.rate_limit(32)
    compared(named_policy("three-stage", rate, path_times(system)), system, rate)


@pytest.mark.parametrize("ageing", [5.0, 50.0, math.inf])
def test_classes_and_their_ageing(ageing: float) -> None:
    system, rate = System(MAIN, SIDE), 3.0
    policy = replace(named_policy("cutoff", rate, path_times(system)), ageing_ms=ageing)
    classes = (RequestClass(0.3, 40.0), RequestClass(0.7, 400.0))
    compared(policy, system, rate, OpenLoad(Poisson(rate), classes=classes))
