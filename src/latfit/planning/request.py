"""What a plan is asked for beside its SLA. Time in ms, rates per ms."""

import math
from dataclasses import dataclass

from latfit.errors import WrongUsage, refuse
from latfit.queueing import POISSON, Arrivals
from latfit.stats import FloatArray


@dataclass(frozen=True)
class Objective:
    """p99·p99_ms + mean·mean_ms - throughput·requests/s, to be minimised."""

    p99: float = 1.0
    mean: float = 0.0
    throughput: float = 0.0

    def __post_init__(self) -> None:
        weights = (self.p99, self.mean, self.throughput)
        wrong = not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights)
        refuse(wrong, "weights must be 0 or more, and not all 0", "--set objective", "Write p99=1,mean=0.5.")

    def of(self, p99_ms: float, mean_ms: float, rate: float) -> float:
        return self.p99 * p99_ms + self.mean * mean_ms - self.throughput * rate * 1e3


@dataclass(frozen=True)
class Load:
    """Rates per ms (n,) of windows of `window_ms`, and arrivals within a window."""

    rates: FloatArray
    window_ms: float
    source: str
    arrivals: Arrivals = POISSON
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> float:
        return float(self.rates.max())


@dataclass(frozen=True)
class PlanOptions:
    """Everything optional about a plan.

    rate: requests per ms, for all replicas. context: cached tokens of a request. max_batch: of the GPU. transfer_ms,
    wait_ms: before the GPU begins. ttft_ms, tpot_ms, prompt_tokens: of engine settings. laws_only: no noise and Poisson
    arrivals.
    """

    rate: float | None = None
    replicas: int = 1
    context: float | None = None
    max_batch: int | None = None
    transfer_ms: float = 0.0
    wait_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    prompt_tokens: int = 512
    objective: Objective | None = None
    load: Load | None = None
    laws_only: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "--replicas": (self.replicas, 1),
            "--context": (self.context, 0),
            "--set max_batch": (self.max_batch, 1),
            "--prompt-tokens": (self.prompt_tokens, 1),
        }
        for name, (value, least) in limits.items():
            if value is not None and value < least:
                raise WrongUsage(f"{value:g} is too small", where=name, remedy=f"Give {least} or more.")

    @property
    def arrivals(self) -> Arrivals:
        return POISSON if self.load is None or self.laws_only else self.load.arrivals.split(self.replicas)

    @property
    def rate_each(self) -> float | None:
        """Requests per ms at each replica; of a varying load in its busiest window."""
        whole = self.load.peak if self.load is not None else self.rate
        return None if whole is None else whole / self.replicas


def parse_objective(text: str) -> Objective:
    """Parse `p99=1,mean=0.5,throughput=0.1`. Raises WrongUsage."""
    try:
        weights = {name.strip(): float(value) for name, value in (part.split("=") for part in text.split(","))}
        return Objective(**{"p99": 0.0, **weights})
    except (ValueError, TypeError):
        raise WrongUsage(f"{text!r} is no objective", where="--set objective", remedy="Write p99=1,mean=0.5.") from None
