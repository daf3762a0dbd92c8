"""The compiled core against the plain reference, on random small systems under every policy."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from latfit.model.step_noise import StepNoise, noise_of
from latfit.policies import policy as policies
from latfit.policies.policy import DispatchTable, Limits, Policy
from latfit.simulation.policies.replication import draw, run
from latfit.simulation.policies.service import ServicePath, System, bucketed, linear_path, table_path
from latfit.workload.arrivals import Gamma, Modulated, Poisson
from latfit.workload.load import ClosedLoad, Load, OpenLoad, RequestClass, Streams
from latfit.workload.requests import Lognormal
from tests.oracle.policies_reference import Reference

N = 300
CLASSES = (RequestClass(0.3, 12.0, "chat"), RequestClass(0.7, 60.0, "batch"))
LIMITS = Limits(6, 3)

POLICIES: list[Policy] = [
    policies.gpu_only(LIMITS),
    replace(policies.gpu_only(LIMITS), ageing_ms=20.0),
    policies.fixed(4, LIMITS),
    policies.window(3.0, LIMITS),
    replace(policies.window(0.0, LIMITS), ageing_ms=5.0),
    *(policies.marginal_cost(0.4, LIMITS, rule) for rule in ("literal", "amortised", "total delay")),
    policies.marginal_cost(0.4, LIMITS, "total delay", longest_ms=2.0),
    policies.cutoff(4.0, LIMITS),
    policies.three_stage(3, 5.0, LIMITS),
    policies.three_stage(1, 1.0, LIMITS),
    policies.optimal(DispatchTable((0, 0, 2, 1, 4, 5, 3), 0.4, 6), LIMITS),
    policies.split(LIMITS),
    policies.split(LIMITS, merge_below=3, longest_ms=2.0),
    policies.deadline(LIMITS),
    replace(policies.deadline(LIMITS), ageing_ms=10.0),
]

LOADS: dict[str, Load] = {
    "poisson": OpenLoad(Poisson(0.5)),
    "gamma": OpenLoad(Gamma(0.6, 2.0)),
    "classes": OpenLoad(Poisson(0.5), classes=CLASSES),
    "bursts of classes": OpenLoad(Modulated([0.1, 2.0], [40.0, 10.0]), classes=CLASSES),
    "closed": ClosedLoad(7, 8.0),
    "closed, of classes": ClosedLoad(9, 4.0, exponential=False, classes=CLASSES),
}


def spread(path: ServicePath) -> ServicePath:
    ratios, steps = np.array([0.5, 0.8, 1.0, 1.3, 3.0]), np.array([1.0, 4.0, 8.0, 2.0, 1.0])
    return replace(path, noise=noise_of(ratios, steps))


def spread_by_batch(path: ServicePath) -> ServicePath:
    """One request alone, two or three, and more: each with ratios of their own."""
    laws = [noise_of(np.array(ratios), np.array([3.0, 1.0])) for ratios in ([0.9, 1.1], [0.5, 4.0], [1.0, 1.3])]
    return replace(path, noise=StepNoise(tuple(law.pooled for law in laws), np.sqrt([1.0 * 2.0, 3.0 * 4.0])))


SYSTEMS: dict[str, System] = {
    "plain": System(linear_path("gpu", 4, 0.5, 6), linear_path("amx", 0.2, 1.8, 3)),
    "random": System(spread(linear_path("gpu", 4, 0.5, 6)), linear_path("amx", 0, 2, 3, exponential=True)),
    "random by batch": System(
        spread_by_batch(linear_path("gpu", 4, 0.5, 6)), spread_by_batch(linear_path("amx", 0.2, 1.8, 3))
    ),
    "buckets by batch": System(
        bucketed(spread_by_batch(linear_path("gpu", 4, 0.5, 8)), [1, 4, 6]), spread(linear_path("amx", 0.2, 1.8, 3))
    ),
    "servers": System(linear_path("gpu", 6, 0.5, 6, servers=2), linear_path("amx", 0, 3, 3, servers=3)),
    "faster in two": System(table_path("gpu", [6, 4.5, 4.6, 4.8, 5, 5.5]), table_path("amx", [2, 2.1, 9])),
    "buckets": System(bucketed(linear_path("gpu", 4, 0.5, 8), [1, 2, 6]), linear_path("amx", 0.2, 1.8, 3)),
}


def agree(policy: Policy, system: System, load: Load, seed: int) -> None:
    streams = Streams(seed)
    found = run(policy, system, draw(load, N, 0.1, system, streams), streams, log=True)
    again = Streams(seed)
    expected = Reference(policy, system, draw(load, N, 0.1, system, again), again).run()
    served = {i: float(found.response_ms[i]) for i in np.flatnonzero(found.path >= 0).tolist()}
    assert served == pytest.approx(expected.response, rel=1e-9, abs=1e-9)
    assert {i: int(found.path[i]) for i in served} == expected.path
    for i, arrived in expected.arrive.items():
        assert math.isclose(arrived, found.arrive_ms[i], rel_tol=1e-12, abs_tol=1e-12)


@pytest.mark.parametrize("load", range(len(LOADS)), ids=LOADS)
@pytest.mark.parametrize("number", range(len(POLICIES)), ids=[f"{p.name} {p.settings} {p.ageing_ms}" for p in POLICIES])
def test_every_policy(number: int, load: int) -> None:
    """On three systems each, so that every policy meets every system, and so does every load."""
    systems, drawn = list(SYSTEMS.values()), list(LOADS.values())[load]
    for shift in (0, 2, 4):
        which = (number + load + shift) % len(systems)
        agree(POLICIES[number], systems[which], drawn, which)


def random_path(rng: np.random.Generator, name: str) -> ServicePath:
    """Times in any order, one to three servers, any of the three laws."""
    path = table_path(name, rng.uniform(0.5, 9.0, int(rng.integers(1, 7))), servers=int(rng.integers(1, 4)))
    law = int(rng.integers(3))
    return spread(path) if law == 0 else replace(path, exponential=law == 1)


def random_table(seed: int, rate: float, largest: int) -> DispatchTable:
    """Any number of those that wait, or none; never none at the end."""
    rng = np.random.default_rng([seed, 1])
    batches = [int(rng.integers(0, min(q, largest) + 1)) for q in range(8)]
    return DispatchTable((*batches, int(rng.integers(1, largest + 1))), rate, largest)


@given(st.integers(0, 2**32 - 1))
def test_anything(seed: int) -> None:
    """Any paths, settings and loads, overload included."""
    rng = np.random.default_rng(seed)
    system = System(random_path(rng, "gpu"), random_path(rng, "amx"))
    limits = Limits(int(rng.integers(1, system.main.largest + 1)), system.side.largest if system.side else 0)
    wait, few, rate = float(rng.uniform(0, 8)), int(rng.integers(1, 5)), float(rng.uniform(0.05, 2.0))
    made = [
        policies.gpu_only(limits),
        policies.fixed(min(few, limits.main), limits),
        policies.window(wait, limits),
        policies.marginal_cost(rate, limits, str(rng.choice(["literal", "amortised", "total delay"]))),
        policies.cutoff(wait + 0.01, limits),
        policies.three_stage(few, wait + 0.01, limits),
        policies.optimal(random_table(seed, rate, limits.main), limits),
        policies.split(limits, merge_below=few, longest_ms=wait),
        policies.deadline(limits),
    ]
    policy = replace(made[int(rng.integers(len(made)))], ageing_ms=float(rng.choice([1.0, 30.0, math.inf])))
    classes = CLASSES if rng.random() < 0.5 else CLASSES[:1]
    closed = ClosedLoad(int(rng.integers(1, 9)), float(rng.uniform(0, 9)), classes=classes)
    agree(policy, system, closed if rng.random() < 0.3 else OpenLoad(Poisson(rate), classes=classes), seed)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name} {p.settings} {p.ageing_ms}")
def test_times_that_go_by_tokens(policy: Policy) -> None:
    grid = np.array([1.0, 50.0, 200.0, 2000.0])
    b = np.arange(7.0)[:, None]
    gpu = ServicePath("gpu", (b > 0) * (3 + 0.1 * b + 0.01 * grid), grid, 60.0)
    amx = ServicePath("amx", ((b > 0) * (0.2 + 0.1 * b + 0.05 * grid))[:4], grid, 60.0)
    load = OpenLoad(Poisson(0.4), Lognormal((4.0, 3.0), (0.7, 0.5)))
    agree(policy, System(gpu, amx), load, 3)
