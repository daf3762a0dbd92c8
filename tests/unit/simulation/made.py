"""Results of simulations with numbers made up."""

import math
from typing import Any

from latfit.simulation.policies.result import InSystem, SimResult
from latfit.simulation.summary import Interval, times_of


def made_result(policy: str, p99: float, **more: Any) -> SimResult:
    """A result with a p99 in ms, known within 1 ms."""
    latency = {"mean": p99 / 4, "p50": p99 / 5, "p90": p99 / 2, "p99": p99}
    common: dict[str, Any] = {
        "settings": {}, "rate_per_s": 500.0, "requests": 1000, "throughput_per_s": 500.0,
        "utilisation": {"gpu": 0.5}, "share": {"gpu": 1.0}, "slo_attainment": None,
        "batch_size": {"p50": 4.0, "p90": 4.0, "p99": 4.0}, "in_system": InSystem(math.nan, 9),
        "unserved": 0, "replications": 1, "warmup_requests": 0, "seed": 0, "stable": True,
        "batches": dict.fromkeys(latency, 60), "trusted": dict.fromkeys(latency, True),
    }  # fmt: skip
    spans = {name: Interval(value, value - 1, value + 1) for name, value in latency.items()}
    return SimResult(policy=policy, latency=times_of(spans), **(common | more))
