"""What binds a running engine, by what its counters prove; what would help, what would do nothing, and what is unknown.

Over some readings, seconds apart:

- **idle**: nothing ran. Nothing can be said of limits.
- **sequences**: requests wait although the KV cache has room, and `limit_shown` finds the limit in how many run, or the
  mean step holds the most that ran in any reading, or as many run as the known limit (within `SHORT`).
- **kv_cache**: requests are preempted, or wait while the cache is full (`FULL`).
- **token_budget**: requests wait while the mean step is nearly as large as the budget (`NEAR`), where it is known.
- **steps**: hardly any request waits. No limit binds; latency is the time of steps, and raising limits does nothing.
  The queue time that requests had is the most that any limit could save of TTFT.
- **unknown**: requests wait, and the counters do not prove why.

How much a setting helps is no matter of counters: a limit that moves changes batch sizes, and what larger batches cost
is what a fit knows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from latfit.metrics.interval import Interval, between
from latfit.metrics.server import Reading
from latfit.units import format_ms, format_percent, format_rate, number

Binding = Literal["idle", "sequences", "kv_cache", "token_budget", "steps", "unknown"]
Effect = Literal["helps", "nothing", "unknown"]

WAITS = 0.5
"""Share of readings with waiting requests from which on they are said to wait."""
FLAT, SHORT = 0.05, 0.1
NEARLY_ALL = 0.9
"""Share of readings with waiting requests that reach a limit: one that ended makes room until the next step."""
FULL = 0.9
NEAR = 0.8
GROWS = 5
"""Requests by which a queue must grow to be called growing, and 20 % of what waited."""
SHORT_MS = 1.0
MUCH = 0.2
"""Share of TTFT that a queue has where it matters although requests wait in few readings."""

SEQUENCES, CACHE, BUDGET = "max_num_seqs", "KV cache", "max_num_batched_tokens"


@dataclass(frozen=True)
class Lever:
    """A setting, and whether moving it helps, by what reason."""

    setting: str
    effect: Effect
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """binding: what limits the engine; why: the readings that show it.  figures: what was seen, by name; NaN where the
    engine does not tell.  limits: settings that are known.  growing: requests a second by which the queue grew.
    engines: how many the figures sum up; a limit is of each."""

    engine: str
    binding: Binding
    why: str
    levers: Sequence[Lever]
    figures: Mapping[str, float]
    limits: Mapping[str, int] = field(default_factory=dict)
    growing: float = 0.0
    engines: int = 1

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "binding": self.binding,
            "why": self.why,
            "growing_per_s": self.growing,
            "levers": [asdict(each) for each in self.levers],
            "figures": dict(self.figures),
            "limits": dict(self.limits),
        }


def diagnose(readings: Sequence[Reading], limits: Mapping[str, int] | None = None) -> Diagnosis:
    """What binds an engine. readings: two or more of one run, in their order.  limits: settings that are known besides
    what the engine says, by the names of a recorder's provenance."""
    seen = between(readings[0], readings[-1])
    facts = {**seen.last.facts, **(limits or {})}
    known = {name: int(facts[name]) for name in (SEQUENCES, BUDGET) if facts.get(name)}
    view = _View(seen, readings, known)
    binding, why = view.binding()
    levers, engines = view.levers(binding), seen.last.engines
    return Diagnosis(seen.last.engine, binding, why, levers, view.figures(), known, view.growing(), engines)


def limit_shown(running: Sequence[float]) -> float | None:
    """Return the sequence limit that readings show at which requests waited although the KV cache had room: the most
    that ran in any of them, where nearly as many ran in nearly all. None where they show none."""
    most = max(running, default=0.0)
    return most if most > 0 and _reached(running, most) else None


def _reached(running: Sequence[float], limit: float, short: float = FLAT) -> bool:
    """Whether as many run as a limit allows, within one or a share of it, in nearly all readings."""
    return sum(n >= limit - max(1.0, short * limit) for n in running) >= NEARLY_ALL * len(running)


@dataclass(frozen=True)
class _View:
    """The readings as they are asked about."""

    seen: Interval
    readings: Sequence[Reading]
    known: Mapping[str, int]

    def gauge(self, name: str) -> list[float]:
        return [value for each in self.readings if math.isfinite(value := getattr(each.state, name))]

    def most(self, name: str) -> float:
        return max(self.gauge(name), default=math.nan)

    @property
    def waits(self) -> bool:
        waiting = self.gauge("waiting")
        return bool(waiting) and sum(value > 0 for value in waiting) >= WAITS * len(waiting)

    @property
    def preempted(self) -> float:
        found = self.seen.count("preemptions")
        return found if found > 0 else 0.0

    @property
    def step(self) -> dict[str, float]:
        return self.seen.mean_step() or {}

    def growing(self) -> float:
        """Requests a second by which the queue grew; 0 where it did not clearly, or was none for most of the time."""
        waiting = self.gauge("waiting")
        more = waiting[-1] - waiting[0] if self.waits else 0.0
        return more / self.seen.seconds if more >= max(GROWS, 0.2 * waiting[0]) else 0.0

    def binding(self) -> tuple[Binding, str]:
        running, waiting = self.gauge("running"), self.gauge("waiting")
        if not self.seen.steps > 0 and max([0.0, *running, *waiting]) <= 0:
            return "idle", "Nothing ran in this time, so nothing can be said of limits."
        usage = self.most("kv_usage")
        said = f"{_range(running)} running and {_range(waiting)} waiting"
        cache = "how full the KV cache is, is not told"
        if math.isfinite(usage):
            cache = f"the KV cache is at most {format_percent(100 * usage)} full"
        if self.preempted or (self.waits and usage >= FULL):
            lost = f"; {number(self.preempted)} preempted" if self.preempted else ""
            return "kv_cache", f"{said}{lost}; {cache}."
        if not self.waits:
            why = "Hardly any request waits, so no limit binds: latency is the time of steps."
            return "steps", f"{said}; {cache}. {why}"
        queued = [each.state.running for each in self.readings if each.state.waiting > 0]
        limit, budget = self.known.get(SEQUENCES), self.known.get(BUDGET)
        B, S = self.step.get("B", 0.0), self.step.get("S", 0.0)
        if limit is not None:
            limit *= self.seen.last.engines
            if limit * (1 - SHORT) <= B or _reached(queued, limit, SHORT):
                return "sequences", f"{said} at a limit of {limit:,} sequences; {cache}."
        if budget is not None and S / budget >= NEAR:
            return "token_budget", f"{said} while a step has {number(S, 3)} of {budget:,} tokens in the mean; {cache}."
        flat = limit_shown(queued) is not None or B >= (1 - FLAT) * max(queued) > 0
        if limit is None and flat and math.isfinite(usage):
            return "sequences", f"{said}, and how many run does not move; {cache}."
        return "unknown", f"{said}; {cache}. These counters do not prove which limit they wait for."

    def levers(self, binding: Binding) -> list[Lever]:
        if binding == "idle":
            return []
        return [self._sequences(binding), self._cache(binding), self._budget(binding), *self._load()]

    def _sequences(self, binding: Binding) -> Lever:
        if binding == "sequences":
            why = f"raising it starts requests that wait{self._saved()}; each token then takes longer."
            return Lever(SEQUENCES, "helps", why)
        if binding == "kv_cache":
            why = "raising it does nothing: more sequences would wait for KV blocks, or be preempted."
            return Lever(SEQUENCES, "nothing", why)
        if binding == "steps":
            if self.seen.mean("queue") > MUCH * self.seen.mean("ttft"):
                return Lever(SEQUENCES, "unknown", f"raising it may start requests that wait at times{self._saved()}.")
            return Lever(SEQUENCES, "nothing", f"raising it does nothing: {self._hardly_waited()}.")
        if SEQUENCES in self.known:
            why = f"requests wait below its {self.known[SEQUENCES]:,}: look at the queue's other causes{self._saved()}."
            return Lever(SEQUENCES, "unknown", why)
        return Lever(SEQUENCES, "unknown", f"give --max-num-seqs as the engine has it{self._saved()}.")

    def _saved(self) -> str:
        """The most that a limit can save of TTFT."""
        queue, ttft = self.seen.mean("queue"), self.seen.mean("ttft")
        if math.isnan(queue) or queue <= SHORT_MS:
            return ""
        return f"; the queue is {format_ms(queue)} of {format_ms(ttft)} TTFT in the mean, which is the most to be saved"

    def _hardly_waited(self) -> str:
        queue = self.seen.mean("queue")
        if math.isnan(queue):
            return "no request waited for a place"
        return f"requests waited {format_ms(queue)} in the mean" if queue > SHORT_MS else "requests did not wait"

    def _cache(self, binding: Binding) -> Lever:
        usage = self.most("kv_usage")
        if binding == "kv_cache":
            why = "more of it (gpu_memory_utilization, an fp8 cache, more GPUs) starts requests that wait for blocks."
            return Lever(CACHE, "helps", why)
        if math.isnan(usage):
            return Lever(CACHE, "unknown", "the engine does not say how full it is.")
        why = f"more of it does nothing: at most {format_percent(100 * usage)} used, nothing preempted."
        return Lever(CACHE, "nothing", why)

    def _budget(self, binding: Binding) -> Lever:
        largest, budget = self._largest_step(), self.known.get(BUDGET)
        if binding == "token_budget":
            why = "raising it lets more of the prompts that wait into a step, which then takes longer."
            return Lever(BUDGET, "helps", why)
        if budget is not None and largest <= budget / 2:
            why = f"raising it does nothing: no step had more than {number(largest)} of {budget:,} tokens."
            return Lever(BUDGET, "nothing", why)
        told = "" if math.isnan(largest) else f"up to {number(largest)} in a step; "
        return Lever(BUDGET, "unknown", f"{told}a fit tells what less saves.")

    def _load(self) -> list[Lever]:
        if not self.growing():
            return []
        came, went = self.seen.arrived / self.seen.seconds, self.seen.finished / self.seen.seconds
        why = f"the queue grows: {format_rate(came)} come and {format_rate(went)} are served."
        if not math.isfinite(came):
            why = f"the queue grows by {format_rate(self.growing())}."
        return [Lever("replicas", "helps", why)]

    def _largest_step(self) -> float:
        """The edge that no step's tokens were above; NaN where nobody tells."""
        found = self.seen.histogram("step_tokens")
        if found is None or not found.count > 0:
            return math.nan
        return next((edge for edge, n in zip(found.edges, found.reached, strict=True) if n >= found.count), math.inf)

    def figures(self) -> dict[str, float]:
        seen, step = self.seen, self.step
        return {
            "seconds": seen.seconds,
            "running": _mean(self.gauge("running")),
            "running_most": self.most("running"),
            "waiting": _mean(self.gauge("waiting")),
            "kv_usage": self.most("kv_usage"),
            "arrived_per_s": seen.arrived / seen.seconds,
            "finished_per_s": seen.finished / seen.seconds,
            "generated_per_s": seen.generated_tokens / seen.seconds,
            "prefill_per_s": seen.prefill_tokens / seen.seconds,
            "B": step.get("B", math.nan),
            "S": step.get("S", math.nan),
            "T_ms": step.get("T_ms", math.nan) if seen.was_busy else math.nan,
            "worked": min(seen.worked, 1.0),
            "preemptions": self.preempted,
            "queue_ms": seen.mean("queue"),
            "ttft_ms": seen.mean("ttft"),
            "tpot_ms": tpot_ms(seen),
            "latency_ms": seen.mean("latency"),
            "prompt_tokens": seen.mean("prompt_lengths"),
            "output_tokens": seen.mean("output_lengths"),
        }


def tpot_ms(seen: Interval) -> float:
    """Mean time per output token: over requests, else over tokens."""
    found = seen.mean("tpot")
    return seen.mean("itl") if math.isnan(found) else found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _range(values: Sequence[float]) -> str:
    if not values:
        return "an unknown number of"
    low, high = min(values), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"
