"""Diagnose which limit binds a running engine from its counters, and which settings would help.

- **kv_cache**: requests are preempted, or wait while the cache is full.
- **steps**: hardly any request waits; step times determine latency.
- **sequences**: requests wait at the sequence limit, known or inferred.
- **token_budget**: requests wait and the mean step nearly fills a known budget.
- **idle**, **unknown**: nothing ran; the counters do not show the limit.
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

MIN_WAITING_SHARE = 0.5  # of readings with waiting requests, from which on requests are said to wait
MIN_FULL_SHARE = 0.5  # of readings with waiting requests: the cache binds if it is full in as many
FLAT_SHARE = 0.05  # running requests that differ by less from the most show a limit
KNOWN_LIMIT_SHARE = 0.1  # the same where the limit is known
NEARLY_ALL = 0.9  # of readings with waiting requests: one that ended makes room until the next step
FULL = 0.9  # share of the KV cache
NEAR_BUDGET = 0.8  # share of the token budget that the mean step has
MIN_GROWTH = 5  # requests by which a queue must grow, and 20 % of what waited
SHORT_QUEUE_MS = 1.0
LONG_QUEUE_SHARE = 0.2  # of TTFT that a queue has where it matters although requests wait in few readings

SEQUENCES, CACHE, BUDGET = "max_num_seqs", "KV cache", "max_num_batched_tokens"


@dataclass(frozen=True)
class Lever:
    setting: str
    effect: Effect
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """The limit of an engine, the readings that show it, settings, figures (NaN if unknown), known limits.

    growing: requests per second by which the queue grew; engines: how many the figures sum up, a limit is of each.
    """

    engine: str
    binding: Binding
    why: str
    levers: Sequence[Lever]
    figures: Mapping[str, float]
    limits: Mapping[str, int] = field(default_factory=dict)
    growing: float = 0.0
    engines: int = 1

    def to_json(self) -> dict[str, Any]:
        names = ("engine", "binding", "why", "figures", "limits")
        levers = [asdict(each) for each in self.levers]
        return {name: getattr(self, name) for name in names} | {"growing_per_s": self.growing, "levers": levers}


def diagnose(readings: Sequence[Reading], limits: Mapping[str, int] | None = None) -> Diagnosis:
    """Find the limit that binds an engine, from two or more readings of one run; limits: further known settings."""
    seen = between(readings[0], readings[-1])
    facts = {**seen.last.facts, **(limits or {})}
    known = {name: int(facts[name]) for name in (SEQUENCES, BUDGET) if facts.get(name)}
    view = _Readings(seen, readings, known)
    binding, why = view.binding()
    levers = [] if binding == "idle" else view.levers(binding)
    return Diagnosis(seen.last.engine, binding, why, levers, view.figures(), known, view.growing(), seen.last.engines)


def limit_shown(running: Sequence[float]) -> float | None:
    """Infer the sequence limit from running counts while requests wait: the largest, if nearly all are close to it."""
    most = max(running, default=0.0)
    return most if most > 0 and _reach(running, most, FLAT_SHARE) else None


def _reach(running: Sequence[float], limit: float, short: float) -> bool:
    """Return whether nearly all running counts are within one, or the share `short`, of a limit."""
    return sum(n >= limit - max(1.0, short * limit) for n in running) >= NEARLY_ALL * max(len(running), 1)


@dataclass(frozen=True)
class _Readings:
    seen: Interval
    readings: Sequence[Reading]
    known: Mapping[str, int]

    def gauge(self, name: str) -> list[float]:
        return [value for each in self.readings if math.isfinite(value := getattr(each.state, name))]

    def most(self, name: str) -> float:
        return max(self.gauge(name), default=math.nan)

    @property
    def waits(self) -> bool:
        """Whether requests wait: in enough readings, or on average as many as run (a queue that has just begun)."""
        running, waiting = self.gauge("running"), self.gauge("waiting")
        is_often = sum(value > 0 for value in waiting) >= MIN_WAITING_SHARE * len(waiting)
        return any(waiting) and (is_often or _mean(waiting) >= _mean(running))

    def growing(self) -> float:
        """Return the requests per second by which the queue clearly grew, else 0."""
        waiting = self.gauge("waiting")
        more = waiting[-1] - waiting[0] if self.waits else 0.0
        return more / self.seen.seconds if more >= max(MIN_GROWTH, 0.2 * waiting[0]) else 0.0

    def binding(self) -> tuple[Binding, str]:
        running, waiting, usage = self.gauge("running"), self.gauge("waiting"), self.most("kv_usage")
        if not self.seen.steps > 0 and max([0.0, *running, *waiting]) <= 0:
            return "idle", "Nothing ran in this time, so no limit can be found."
        said = f"{_range(running)} running, {_range(waiting)} waiting"
        cache = "KV cache use unknown"
        if math.isfinite(usage):
            cache = f"KV cache at most {format_percent(100 * usage)} full"
        preempted = self.seen.count("preemptions")
        queueing = [each.state for each in self.readings if each.state.waiting > 0]
        full = sum(state.kv_usage >= FULL for state in queueing)
        if preempted > 0 or (self.waits and full >= MIN_FULL_SHARE * len(queueing)):
            lost = f"; {number(preempted)} preempted" if preempted > 0 else ""
            return "kv_cache", f"{said}{lost}; {cache}."
        if not self.waits:
            why = "Hardly any request waits: step times determine latency."
            return "steps", f"{said}; {cache}. {why}"
        queued = [state.running for state in queueing]
        step = self.seen.mean_step() or {"B": 0.0, "S": 0.0}
        limit, budget, engines = self.known.get(SEQUENCES), self.known.get(BUDGET), self.seen.last.engines
        in_step = engines * step["B"]  # requests in a step of every engine
        if limit is not None:
            limit *= engines
            if limit * (1 - KNOWN_LIMIT_SHARE) <= in_step or _reach(queued, limit, KNOWN_LIMIT_SHARE):
                return "sequences", f"{said} at a limit of {limit:,} sequences; {cache}."
        if budget is not None and step["S"] / budget >= NEAR_BUDGET:
            mean = number(step["S"], 3)
            return "token_budget", f"{said}; the mean step has {mean} of {budget:,} tokens; {cache}."
        is_flat = limit_shown(queued) is not None or in_step >= (1 - FLAT_SHARE) * max(queued) > 0
        if limit is None and is_flat and math.isfinite(usage):
            return "sequences", f"{said}; {cache}. The number running stays at its maximum."
        return "unknown", f"{said}; {cache}. The counters do not prove which limit they wait for."

    def levers(self, binding: Binding) -> list[Lever]:
        known, usage = self.known, self.most("kv_usage")
        queue, ttft = self.seen.mean("queue"), self.seen.mean("ttft")
        saved = " starts waiting requests"
        waited = "no queueing was counted" if math.isnan(queue) else "requests did not queue"
        if queue > SHORT_QUEUE_MS:
            waited = f"mean queueing is {format_ms(queue)}"
            saved = f" saves up to {format_ms(min(queue, ttft))} of {format_ms(ttft)} mean TTFT"
        asked = "give --max-num-seqs as the engine has it."
        if SEQUENCES in known:
            asked = f"requests wait below its {known[SEQUENCES]:,}, so the queue has another cause."
        sequences: dict[str, tuple[Effect, str]] = {
            "sequences": ("helps", f"raising it{saved}; TPOT rises."),
            "kv_cache": ("nothing", "no effect: more sequences would wait for KV blocks, or be preempted."),
            "steps": ("nothing", f"no effect: {waited}."),
        }
        if queue > LONG_QUEUE_SHARE * ttft:
            sequences["steps"] = "unknown", f"raising it possibly{saved}."
        cache: tuple[Effect, str] = "nothing", f"no effect: at most {format_percent(100 * usage)} used, no preemptions."
        if binding == "kv_cache":
            ways = "gpu_memory_utilization, an fp8 cache, more GPUs"
            cache = "helps", f"more of it ({ways}) starts waiting requests."
        elif self.waits and usage >= FULL:
            cache = "unknown", f"up to {format_percent(100 * usage)} used, but not while most requests wait."
        elif math.isnan(usage):
            cache = "unknown", "the engine does not publish its use."
        steps, budget = self.seen.histogram("step_tokens"), known.get(BUDGET)
        largest = steps.bucket(1.0)[1] if steps is not None else math.nan
        seen = "" if math.isnan(largest) else f"steps have up to {number(largest)} tokens; "
        tokens: tuple[Effect, str] = "unknown", f"{seen}the effect of another budget needs --fit."
        if binding == "token_budget":
            tokens = "helps", "raising it starts more waiting prompts in a step; TPOT rises."
        elif budget is not None and largest <= budget / 2:
            tokens = "nothing", f"no effect: no step has more than {number(largest)} of {budget:,} tokens."
        levers = [
            Lever(SEQUENCES, *sequences.get(binding, ("unknown", asked))),
            Lever(CACHE, *cache),
            Lever(BUDGET, *tokens),
        ]
        if self.growing():
            came, went = self.seen.arrived / self.seen.seconds, self.seen.finished / self.seen.seconds
            why = f"add some: {format_rate(came)} arrive, {format_rate(went)} are served; the queue grows."
            if not math.isfinite(came):
                why = f"add some: the queue grows by {format_rate(self.growing())}."
            levers.append(Lever("replicas", "helps", why))
        return levers

    def figures(self) -> dict[str, float]:
        seen, step = self.seen, self.seen.mean_step() or {}
        rates = {"arrived_per_s": seen.arrived, "finished_per_s": seen.finished}
        rates |= {"generated_per_s": seen.generated_tokens, "prefill_per_s": seen.prefill_tokens}
        return {
            "seconds": seen.seconds,
            "running": _mean(self.gauge("running")),
            "running_most": self.most("running"),
            "waiting": _mean(self.gauge("waiting")),
            "kv_usage": self.most("kv_usage"),
            **{name: value / seen.seconds for name, value in rates.items()},
            "B": step.get("B", math.nan),
            "S": step.get("S", math.nan),
            "T_ms": step.get("T_ms", math.nan) if seen.was_busy else math.nan,
            "worked": min(seen.worked, 1.0),
            "preemptions": max(seen.count("preemptions"), 0.0),
            "tpot_ms": tpot_ms(seen),
            **{f"{name}_ms": seen.mean(name) for name in ("queue", "ttft", "latency")},
            "prompt_tokens": seen.mean("prompt_lengths"),
            "output_tokens": seen.mean("output_lengths"),
        }


def tpot_ms(seen: Interval) -> float:
    """Return the mean time per output token: over requests, else over tokens."""
    found = seen.mean("tpot")
    return seen.mean("itl") if math.isnan(found) else found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _range(values: Sequence[float]) -> str:
    if not values:
        return "an unknown number of"
    low, high = min(values), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"
