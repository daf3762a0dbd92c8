"""The literature's claims on serving engines, put to the test: static against continuous batching, and the orders.

A step with S tokens takes tau + alpha S, the straight line through the main path's T(1) and its T of the largest batch.
Prompts are log-normal, outputs geometric, as language-model traffic roughly is. Batching is compared on requests that
are all there from the start, so that throughput is what the engine can do; orders at LOAD of that throughput, above
it so that somebody has to wait, where one of USERS users sends half of the requests and three in ten requests are
promised PROMISE times the engine's own time for a typical one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.sim.engine.cost import StepCosts, linear_costs
from latfit.sim.engine.result import summary
from latfit.sim.engine.serve import serve
from latfit.sim.engine.settings import EngineSettings, Order
from latfit.sim.machine import ServicePath
from latfit.sim.study import Finding
from latfit.stats import FloatArray
from latfit.workload.requests import Requests, make_requests

REQUESTS = 3000
PROMPT_LOG_MEAN, PROMPT_LOG_SD, OUTPUT_MEAN = 5.0, 1.0, 150
SEQUENCES = 32
USERS = 10
LOAD = 1.05
PROMISE = 2.5
PADDED_EXAMPLE = (100, 500, 50)

ORDERS = (Order("fcfs"), Order("sjf"), Order("sjf", length_error=0.8), Order("slo"), Order("fair"))


@dataclass(frozen=True, eq=False)
class ServingStudy:
    """Entries of `simulate --json` by name, and what they say of the claims."""

    runs: Sequence[dict[str, Any]]
    findings: Sequence[Finding]


def serving_study(path: ServicePath, seed: int = 0) -> ServingStudy:
    """Run engines whose steps cost what the path's batches do."""
    times = path.typical_ms
    alpha = max(0.0, float(times[-1] - times[1]) / max(1, path.largest - 1))
    costs = linear_costs(max(float(times[1]) - alpha, 1e-6), 0.0, alpha)
    together = _requests(np.zeros(REQUESTS), seed, float("inf"))
    batching = {
        name: _run(f"{name} batching", together, costs, _settings(name), seed)
        for name in ("static", "continuous", "chunked-prefill")
    }
    rate = LOAD * REQUESTS / _makespan_ms(together, costs, seed)
    arrivals = np.cumsum(np.random.default_rng([seed, 2]).exponential(1 / rate, REQUESTS))
    promise_ms = PROMISE * OUTPUT_MEAN * float(times[min(SEQUENCES, path.largest)])
    offered = _requests(arrivals, seed, promise_ms)
    ordered = [
        _run(_order_name(order), offered, costs, replace(_settings("chunked-prefill"), order=order), seed)
        for order in ORDERS
    ]
    example = make_requests(np.zeros(3), 1, np.array(PADDED_EXAMPLE))
    padded = _run("padded example", example, costs, _settings("static"), seed)
    found = [_padding(padded), _continuous(batching), *_orders(ordered)]
    return ServingStudy([*batching.values(), padded, *ordered], found)


def _requests(arrivals: FloatArray, seed: int, promise_ms: float) -> Requests:
    """The same lengths, users and classes whatever the arrivals."""
    n, rng = len(arrivals), np.random.default_rng([seed, 1])
    prompt = np.maximum(1, np.rint(np.exp(rng.normal(PROMPT_LOG_MEAN, PROMPT_LOG_SD, n)))).astype(np.int64)
    output = rng.geometric(1 / OUTPUT_MEAN, n)
    user = np.where(rng.random(n) < 0.5, 0, rng.integers(1, USERS, n))
    urgent = rng.random(n) < 0.3
    deadline = np.where(urgent, promise_ms, np.inf)
    return make_requests(arrivals, prompt, output, class_id=~urgent, user_id=user, deadline_ms=deadline)


def _settings(batching: str) -> EngineSettings:
    """Memory for all, so that only the batching differs."""
    return EngineSettings(batching=batching, max_num_seqs=SEQUENCES, kv_blocks=200_000, padded_graphs=False)


def _run(name: str, requests: Requests, costs: StepCosts, settings: EngineSettings, seed: int) -> dict[str, Any]:
    run = serve(requests, costs, settings, seed)
    rate = None if requests.arrival_ms[-1] == 0 else requests.rate * 1000
    heavy = requests.user_id == 0
    entry = {"policy": name, "rate_per_s": rate, "settings": {}, **summary([run])}
    if heavy.any() and not heavy.all():
        entry["mean_of_heavy_user_ms"] = float(run.latency_ms[heavy].mean())
        entry["mean_of_others_ms"] = float(run.latency_ms[~heavy].mean())
    return entry


def _makespan_ms(requests: Requests, costs: StepCosts, seed: int) -> float:
    return float(serve(requests, costs, _settings("chunked-prefill"), seed).last_ms.max())


def _order_name(order: Order) -> str:
    return f"{order.name} (length error {order.length_error:g})" if order.length_error else order.name


def _padding(run: dict[str, Any]) -> Finding:
    lengths = ", ".join(map(str, PADDED_EXAMPLE))
    return Finding(
        "A static batch with outputs of 100, 500 and 50 tokens is 43.3 % efficient.",
        f"Of the tokens that the padded batch ({lengths}) computes {100 * run['useful_share']:.1f} % are of use.",
    )


def _continuous(batching: dict[str, dict[str, Any]]) -> Finding:
    base = batching["static"]["output_tokens_per_s"]
    gains = {name: run["output_tokens_per_s"] / base for name, run in batching.items() if name != "static"}
    parts = ", ".join(f"{name} {gain:.2f} times" for name, gain in gains.items())
    return Finding(
        "Continuous batching gives 2.5 times the throughput of static batches.",
        f"With up to {SEQUENCES} requests in a batch and geometric outputs: {parts}. The gain is what padding wastes"
        f" ({100 * batching['static']['useful_share']:.0f} % of the static tokens are of use): it grows with the batch"
        " and with the spread of the outputs, and no single figure holds.",
    )


def _orders(runs: Sequence[dict[str, Any]]) -> list[Finding]:
    by_name = {run["policy"]: run for run in runs}
    first, shortest, fair = by_name["fcfs"], by_name["sjf"], by_name["fair"]
    means = {name: run["latency_ms"]["mean"] / first["latency_ms"]["mean"] for name, run in by_name.items()}
    tail = shortest["latency_ms"]["p99"] / first["latency_ms"]["p99"]
    met = ", ".join(f"{name} {100 * run['slo_attainment']:.0f} %" for name, run in by_name.items())
    (guessed,) = (name for name in by_name if "length error" in name)
    return [
        Finding(
            "Shortest job first beats first come, first served.",
            f"At {LOAD:g} times what the engine serves it lowers the mean latency to {means['sjf']:.2f} of that, with"
            f" lengths guessed badly to {means[guessed]:.2f}, and raises p99 to {tail:.2f} of it: long ones starve.",
        ),
        Finding("An SLO-aware order meets more deadlines.", f"Deadlines met: {met}."),
        Finding(
            "A fair order protects users from a heavy one.",
            f"Mean latency of the user who sends half of the requests, and of the others: {_two(first)} under fcfs,"
            f" {_two(fair)} under fair.",
        ),
    ]


def _two(run: dict[str, Any]) -> str:
    return f"{run['mean_of_heavy_user_ms'] / 1e3:.2f} and {run['mean_of_others_ms'] / 1e3:.2f} s"
