"""`python -m benchmarks.equal_seeds`: a digest of the events of some fifty simulations, policies and engines.

Run it with two versions of latfit and compare the output: equal seeds must give equal event sequences.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from latfit.model.step_noise import noise_of
from latfit.policies import POLICIES, DispatchTable, Settings, named_policy
from latfit.simulation import (
    Cluster,
    EngineSettings,
    Options,
    Order,
    Routing,
    Schedule,
    Speculation,
    StepCosts,
    System,
    Transfer,
    linear_costs,
    linear_path,
    parse_autoscaler,
    path_times,
    replicate,
    simulate,
    table_path,
)
from latfit.simulation.engine.step_cost import scatter_from
from latfit.simulation.policies.replication import draw, run
from latfit.workload import ClosedLoad, Gamma, Load, OpenLoad, Poisson, PrefixBlocks, RecordedLoad, RequestClass
from latfit.workload.load import Streams
from latfit.workload.requests import Lognormal, make_requests

RNG = np.random.default_rng(5)
NOISE = noise_of(RNG.lognormal(0, 0.1, 5000), np.ones(5000))
GPU = replace(linear_path("gpu", 8.0, 0.2, 32), noise=NOISE)
BOTH = System(GPU, table_path("cpu", [4.0, 7.0, 9.0], exponential=True))
CLASSES = (RequestClass(0.3, deadline_ms=40.0), RequestClass(0.7, deadline_ms=400.0))
COSTS = linear_costs(6.0, 0.02, 0.03)._replace(scatter=scatter_from(NOISE, NOISE, NOISE))
ENGINE = EngineSettings(kv_blocks=220, max_num_seqs=24, max_num_batched_tokens=256)
ORDERS = ("fcfs", "sjf", "slo", "priority", "fair", "switch")
ROUTES = ("least-loaded", "shortest-queue", "prefix", "predicted-latency")
TRAFFIC = OpenLoad(Poisson(0.012), Lognormal((4.5, 3.5), (0.8, 0.6)), users=7, classes=CLASSES)


def digest(*columns: Any) -> str:
    found = hashlib.sha256()
    for column in columns:
        found.update(column if isinstance(column, bytes) else np.ascontiguousarray(column).tobytes())
    return found.hexdigest()[:16]


def policy_runs() -> Iterator[tuple[str, str]]:
    """Every policy under five loads, event by event; results with intervals of three."""
    arrivals = np.cumsum(RNG.exponential(2.0, 3000))
    loads: dict[str, Load] = {
        "poisson": OpenLoad(Poisson(0.8)),
        "bursts": OpenLoad(Gamma(0.6, 3.0)),
        "classes": OpenLoad(Poisson(0.8), classes=CLASSES),
        "closed": ClosedLoad(20, 10.0),
        "recorded": RecordedLoad(make_requests(arrivals, class_id=RNG.integers(0, 3, 3000), deadline_ms=50.0)),
    }
    table = DispatchTable((0, 0, 2, 3, 4, 4), 0.8, 32)
    for name in POLICIES:
        policy = named_policy(name, 0.8, path_times(BOTH), Settings(ageing_ms=50.0), lambda rate, T: table)
        served = []
        for load in loads.values():
            streams = Streams(3, 1)
            served.append(run(policy, BOTH, draw(load, 3000, 0.1, BOTH, streams), streams))
        parts = (part for each in served for part in (each.response_ms, each.path, each.totals.busy))
        yield f"policy {name}", digest(*parts)
    for name in ("gpu-only", "cutoff", "split"):
        policy = named_policy(name, 0.8, path_times(BOTH))
        for kind, load in (("poisson", loads["poisson"]), ("recorded", loads["recorded"])):
            result = simulate(policy, BOTH, load, Options(seed=2, replications=3, sla_ms=60.0))
            numbers = [[each.value, each.low, each.high] for _, each in result.latency.items()]
            more = [result.requests, result.throughput_per_s, result.slo_attainment, result.in_system.mean]
            yield f"result {name} {kind}", digest(np.array(numbers), np.array(more))


def engine_runs() -> Iterator[tuple[str, str]]:
    """Engines by batching, order, route and more; times of requests and counters."""
    drafts, plain = Speculation(3, 0.6, 0.2), replace(ENGINE, padded_graphs=False, asynchronous=False)
    settings = {f"{b} sync={s}": replace(ENGINE, batching=b, asynchronous=not s) for b in BATCHINGS for s in (0, 1)}
    settings |= {f"order {name}": replace(ENGINE, order=Order(name, 0.3, 200.0, 4)) for name in ORDERS}
    settings |= {
        "swap": replace(plain, swap_ms_per_token=0.01),
        "drafts": replace(ENGINE, speculation=drafts),
        "chunks": replace(ENGINE, long_prefill_token_threshold=64),
        "cached": replace(ENGINE, cached_share=0.4),
        "start at 4": replace(ENGINE, batching="continuous", start_at=4),
    }
    for name, each in settings.items():
        yield f"engine {name}", engine_digest(TRAFFIC, COSTS, each, Cluster())
    several = {f"route {name}": Cluster(Routing(3, name)) for name in ROUTES}
    several |= {
        "round-robin": Cluster(Routing(3)),
        "autoscale": Cluster(
            Routing(1, "least-loaded", scaling=parse_autoscaler("requests:6:1..5:5s:20s"), start_up_ms=900.0)
        ),
        "schedule": Cluster(Routing(1, scaling=Schedule((0.0, 9000.0, 20_000.0), (1, 4, 2)), start_up_ms=500.0)),
        "apart": Cluster(Routing(2), COSTS, Transfer(2.0, 0.01), 2),
    }
    for name, cluster in several.items():
        yield f"cluster {name}", engine_digest(TRAFFIC.at_rate(0.03), COSTS, ENGINE, cluster)
    closed = ClosedLoad(30, 100.0, lengths=TRAFFIC.lengths, classes=CLASSES)
    for route in ("round-robin", "least-loaded"):
        yield f"closed {route}", engine_digest(closed, COSTS, ENGINE, Cluster(Routing(2, route)))
    yield "closed static", engine_digest(closed, COSTS, replace(ENGINE, batching="static"), Cluster())
    ids = np.concatenate([[k % 5, 10 + k % 11, 100 + k % 40, 1000 + k] for k in range(500)])
    prefix = PrefixBlocks(32, np.arange(0, 2001, 4), ids)
    contents = RecordedLoad(replace(make_requests([70.0 * k for k in range(500)], 150, 30), prefix=prefix))
    for route in ("round-robin", "prefix"):
        yield f"contents {route}", engine_digest(contents, COSTS, ENGINE, Cluster(Routing(2, route)))


BATCHINGS = ("chunked-prefill", "continuous", "selective", "static")


def engine_digest(load: Load, costs: StepCosts, settings: EngineSettings, cluster: Cluster) -> str:
    found = replicate(load, costs, settings, Options(requests=600, seed=4), cluster, [0, 1])
    parts: list[Any] = []
    for each in found.runs:
        counts = [each.counters.steps, each.counters.preemptions, each.counters.computed_tokens]
        counts += [each.counters.reused_tokens, each.counters.cached_tokens, each.counters.free_blocks]
        parts += [each.seen_ms, each.start_ms, each.first_ms, each.last_ms, each.replica, np.array(counts)]
        parts += [np.array([each.busy_ms, each.replica_ms, *each.itl.values()]), each.batch_sizes]
        parts += [column for line in each.timelines for column in (line.running, line.kv_usage, line.busy)]
    summary = found.summary()
    times = [each.value for name in ("ttft", "tpot", "latency") for _, each in getattr(summary, name).items()]
    return digest(*parts, np.round([*times, summary.kv_usage, summary.queue, summary.throughput_per_s], 9))


if __name__ == "__main__":
    for runs in (policy_runs(), engine_runs()):
        for name, found in runs:
            print(name, found, flush=True)
