"""The least engines that keep the targets, and the settings with which they do.

More engines never keep less, so the least number is found by bisection, from what an engine does that always has enough
to do: fewer than rate / throughput cannot carry the load. Settings are compared at one number of engines by the load
that they could carry: a setting takes the place of the one at hand where it keeps the targets at a load that is higher
by more than GAIN. So a candidate costs one simulation where it is no better, which is nearly always, and the settings
change for a reason only. One setting is varied at a time, again and again until none changes (coordinate ascent); the
order is that in which settings matter. What the steps of an engine cost is measured up to so many requests and tokens;
settings that would make larger ones are not tried.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from latfit.errors import WrongUsage
from latfit.planning.serving.evaluate import Evaluator, Measured, Setup
from latfit.simulation import EngineSettings, Order
from latfit.units import format_rate
from latfit.workload import RecordedLoad

GAIN = 1.03
"""Load that a setting has to carry more than the one at hand for certain does not, as a ratio."""

PRECISION = 1.03
"""Of the highest load that is carried, as a ratio."""

GALLOP = 1.15
"""First step of a search for a number, as a ratio."""

LEAST_SCALE = 1e-6
"""Of the planned load, below which no load is looked for, nor above its inverse."""

MOST_REPLICAS, USUAL_MOST, IDLE = 4096, 256, 64
"""Engines of a plan at most; those that are tried at most where a quarter of them would carry the load; and times those
without which it is not carried: then they are idle, and more of them change nothing."""

FINE = 256
"""Engines from which on the last search for a number goes by more than one."""

ROUNDS = 3

SEQUENCES = tuple(2**k for k in range(2, 13))
BUDGETS = tuple(2**k for k in range(8, 15))
CHUNKS = (0, 256, 512, 1024, 2048)
"""Of a prompt, while others prefill; 0 for no limit."""


@dataclass(frozen=True)
class Room:
    """What may be tried. fixed: settings that are given.  most_requests, most_tokens: of a measured step.  longest: the
    longest prompt.  longest_sequence: prompt and output.  classes: whether requests are of several."""

    fixed: frozenset[str] = frozenset()
    most_requests: float = math.inf
    most_tokens: float = math.inf
    longest: int = 0
    longest_sequence: int = 0
    classes: bool = False

    def alternatives(self, at: EngineSettings, axis: str) -> list[EngineSettings]:
        """Settings that differ in one axis."""
        if axis in self.fixed:
            return []
        found: Iterator[EngineSettings] = {
            "max_num_seqs": self._sequences,
            "max_num_batched_tokens": self._budgets,
            "long_prefill_token_threshold": self._chunks,
            "batching": self._batchings,
            "order": self._orders,
        }[axis](at)
        return [each for each in found if each != at]

    def _sequences(self, at: EngineSettings) -> Iterator[EngineSettings]:
        for count in SEQUENCES:
            if count <= min(self.most_requests, at.max_num_batched_tokens):
                yield replace(at, max_num_seqs=count)

    def _budgets(self, at: EngineSettings) -> Iterator[EngineSettings]:
        for tokens in BUDGETS:
            whole = at.batching == "chunked-prefill" or tokens >= self.longest_sequence
            if at.max_num_seqs <= tokens <= max(self.most_tokens, at.max_num_seqs) and whole:
                chunk = at.long_prefill_token_threshold
                # A chunk as large as the budget limits nothing.
                chunk = chunk if chunk < tokens or "long_prefill_token_threshold" in self.fixed else 0
                yield replace(at, max_num_batched_tokens=tokens, long_prefill_token_threshold=chunk)

    def _chunks(self, at: EngineSettings) -> Iterator[EngineSettings]:
        for tokens in CHUNKS if at.batching == "chunked-prefill" else ():
            if tokens < min(at.max_num_batched_tokens, self.longest):
                yield replace(at, long_prefill_token_threshold=tokens)

    def _batchings(self, at: EngineSettings) -> Iterator[EngineSettings]:
        yield replace(at, batching="chunked-prefill")
        # Without chunks engines ask that a whole sequence fits into a step.
        if at.max_num_batched_tokens >= self.longest_sequence:
            yield replace(at, batching="continuous", long_prefill_token_threshold=0)

    def _orders(self, at: EngineSettings) -> Iterator[EngineSettings]:
        for name in ("fcfs", "priority") if self.classes else ():
            yield replace(at, order=Order(name))


AXES = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "batching", "order")


@dataclass(frozen=True, eq=False)
class Found:
    """What a search ends with. best: the setup that keeps the targets, as it was verified; None where none does.
    fewer: one engine less, where there was more than one.  usual: the least engines with the settings that the search
    began with; None where no number does.  alone: the best that a request by itself gets.  carries: loads, as ratios of
    the planned one: up to the first best keeps the targets for certain, beyond the second it misses one."""

    best: Measured | None
    alone: Measured
    fewer: Measured | None = None
    usual: int | None = None
    carries: tuple[float, float] = (math.nan, math.nan)


@dataclass(eq=False)
class Search:
    """A search for the least engines. start: the settings that it begins with."""

    evaluator: Evaluator
    start: EngineSettings
    room: Room = Room()
    replicas: int | None = None

    def run(self) -> Found:
        """Search; at a given number of engines for settings alone."""
        alone = self._best_alone()
        if not alone.met:
            return Found(None, alone)
        settings = alone.setup.settings
        usual = self.least(settings) if self.replicas is None else self._at(settings, self.replicas)
        begun = usual if usual is not None else self._at(settings, self._guess(settings))
        settings, carried = self.ascend(begun.setup, 1.0 if begun.met else self.highest(begun.setup, 1.0))
        if self.replicas is not None:
            best: Measured | None = self.evaluator.measure(Setup(settings, self.replicas), verify=True)
        else:
            guess = max(1, math.ceil(begun.setup.replicas / carried * 1.01))
            best = self._verified(settings, guess)
        if best is None or not best.met:
            return Found(best, alone, usual=_count(usual))
        count = best.setup.replicas
        fewer = self._at(settings, count - 1) if count > 1 else None
        return Found(best, alone, fewer, _count(usual), self.spare(best.setup))

    def least(self, settings: EngineSettings, guess: int | None = None) -> Measured | None:
        """The least engines with these settings; None where more of them do not help."""
        at = guess or self._guess(settings)
        most = min(MOST_REPLICAS, max(USUAL_MOST, 4 * at), IDLE * at)
        found, step, low = self._at(settings, at), max(1, round(at * (GALLOP - 1))), 0
        while not found.met:
            low = at
            if at >= most:
                return None
            at, step = min(at + step, most), 2 * step
            found = self._at(settings, at)
        step = max(1, round(at * (GALLOP - 1)))
        while low == 0 and at > 1:
            below = max(at - step, 1)
            tried = self._at(settings, below)
            if not tried.met:
                low = below
                break
            at, found, step = below, tried, 2 * step
        while at - low > 1:
            middle = (at + low) // 2
            tried = self._at(settings, middle)
            if tried.met:
                at, found = middle, tried
            else:
                low = middle
        return found

    def highest(self, setup: Setup, known: float) -> float:
        """The highest load, as a ratio of the planned one, at which the targets are kept; `known` is tried first."""
        return self._bracket(setup, known)[0]

    def spare(self, setup: Setup) -> tuple[float, float]:
        """The load up to which the targets are kept, and the one from which on they are missed, each for certain. Of
        recorded requests, which are one course of events, as it is estimated."""
        low, high = self._bracket(setup, 1.0)
        if isinstance(self.evaluator.load, RecordedLoad):
            return low, high
        while low > LEAST_SCALE and not self._sure(setup, low, met=True):
            low /= PRECISION
        verified = self.evaluator.measure(setup, verify=True)
        if verified.met and verified.certain:
            low = max(low, 1.0)
        while high < 1 / LEAST_SCALE and not self._sure(setup, high, met=False):
            high *= PRECISION
        return low, high

    def _sure(self, setup: Setup, scale: float, *, met: bool) -> bool:
        found = self.evaluator.measure(setup, scale)
        return found.certain and found.met == met

    def _bracket(self, setup: Setup, known: float) -> tuple[float, float]:
        """Loads at which the targets are kept and missed, PRECISION apart."""
        low, high, factor, at = 0.0, math.inf, GALLOP, known
        while math.isinf(high) or low == 0.0:
            if not LEAST_SCALE < at < 1 / LEAST_SCALE:
                return low, at
            if self.evaluator.measure(setup, at).met:
                low, at = at, at * factor
            else:
                high, at = at, at / factor
            factor = factor**1.5
        while high / low > PRECISION:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.evaluator.measure(setup, middle).met else (low, middle)
        return low, high

    def ascend(self, begun: Setup, carried: float) -> tuple[EngineSettings, float]:
        """The settings that carry most at this number of engines, and the load that they carry."""
        at, load = begun.settings, self.highest(begun, carried)
        for _ in range(ROUNDS):
            before = at
            for axis in AXES:
                at, load = self._better(at, load, axis, begun)
            if at == before:
                break
        return at, load

    def _better(self, at: EngineSettings, load: float, axis: str, begun: Setup) -> tuple[EngineSettings, float]:
        """The best along one axis."""
        left = [replace(begun, settings=each) for each in self.room.alternatives(at, axis)]
        while left:
            asked = load * PRECISION * GAIN
            met = [each for each in self._tried(left, asked) if each.met]
            if not met:
                break
            # Of several the one with most room goes on; the others are asked again at what it carries.
            best = min(met, key=lambda each: each.ratio)
            at, load = best.setup.settings, self.highest(best.setup, asked)
            left = [each.setup for each in met if each is not best]
        return at, load

    def _tried(self, setups: Sequence[Setup], scale: float) -> list[Measured]:
        return self.evaluator.each([each for each in setups if self.evaluator.carries(each, scale)], scale)

    def _best_alone(self) -> Measured:
        """How a request does alone with the first settings that keep the targets then, else with the best ones."""
        best = self.evaluator.alone(self.start)
        settings = [each for axis in AXES for each in self.room.alternatives(self.start, axis)]
        for each in settings if not best.met else ():
            found = self.evaluator.alone(each)
            best = min(best, found, key=lambda one: one.ratio)
            if best.met:
                break
        return best

    def _verified(self, settings: EngineSettings, guess: int) -> Measured | None:
        """The least engines for which the verification agrees."""
        found = self.least(settings, guess)
        if found is None:
            return None
        step = max(1, found.setup.replicas // FINE)
        for count in range(found.setup.replicas, MOST_REPLICAS + 1, step):
            found = self.evaluator.measure(Setup(settings, count), verify=True)
            if found.met:
                break
        return found

    def _guess(self, settings: EngineSettings) -> int:
        """Engines without which the load is not carried."""
        rate = self.evaluator.rate_per_s
        found = max(1, math.ceil(rate / self.evaluator.saturated(settings).requests_per_s))
        if found > MOST_REPLICAS:
            share = math.ceil(found / MOST_REPLICAS)
            raise WrongUsage(
                f"{format_rate(rate)} need {found:,} replicas or more; a plan has up to {MOST_REPLICAS:,}",
                where="--rate",
                remedy=f"Plan one of {share} parts (--rate {rate / share:.4g}/s) and take {share} times its replicas.",
            )
        return found

    def _at(self, settings: EngineSettings, replicas: int) -> Measured:
        return self.evaluator.measure(Setup(settings, replicas))


def _count(found: Measured | None) -> int | None:
    return None if found is None or not found.met else found.setup.replicas
