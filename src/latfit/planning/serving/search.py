"""Find the fewest engines that meet the targets, and the best engine settings.

Derivation: docs/theory/planning.md, "Searching replicas and settings".
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from latfit.errors import WrongUsage
from latfit.model import FitResult
from latfit.planning.engine_settings import MIN_CHUNK
from latfit.planning.serving.evaluate import (
    FIRST,
    MOST,
    MOST_REQUESTS,
    VERIFIED,
    Evaluator,
    Measured,
    Setup,
    draw_lengths,
)
from latfit.planning.verdict import MOST_IDLE
from latfit.queueing import bracket
from latfit.simulation import SENT_LEAST, EngineSettings, EngineSetup, Order
from latfit.units import format_rate
from latfit.workload import ClosedLoad, Load, RecordedLoad

GAIN = 1.03  # feasible load of an accepted setting over a load that the current one misses
PRECISION = 1.03  # ratio between the ends of the bracket of the highest feasible load
GALLOP = 1.15  # first step of an exponential search
LEAST_SCALE = 1e-6  # smallest load searched, relative to the planned one; its inverse is the largest
MOST_REPLICAS = 4096  # replicas tried at most
FINE = 256  # verification adds replicas in steps of 1/FINE of them, at least one
ROUNDS = 3
POINTS = 6  # batch limits compared at a time when the best one is narrowed down
NEAR = 1.05  # ratio of value to limit in one replication up to which settings are verified
FAR = 1.5  # the same ratio beyond which a token budget is given up after its first batch limits
FLAT = 1.001  # ratio of neighbouring batch limits' results up to which the limit does not matter

SEQUENCES = tuple(2**k for k in range(13))
BUDGETS = tuple(2**k for k in range(8, 15))
CHUNKS = (0, 256, 512, 1024, 2048)  # tokens of a long prompt per step; 0 for no limit
AXES = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "batching", "order")


@dataclass(frozen=True)
class SearchSpace:
    """Engine settings that the search may vary.

    fixed: settings of the user. most_requests, most_tokens: largest measured step. longest, longest_sequence: in
    tokens. classes: whether requests have several priority classes.
    """

    fixed: frozenset[str] = frozenset()
    most_requests: float = math.inf
    most_tokens: float = math.inf
    longest: int = 0
    longest_sequence: int = 0
    classes: bool = False

    def alternatives(self, at: EngineSettings, axis: str) -> list[EngineSettings]:
        """Return the settings that differ from `at` along one axis."""
        chunks, threshold = at.batching == "chunked-prefill", "long_prefill_token_threshold"
        changes: list[dict[str, Any]] = []
        if axis == "max_num_seqs":
            top = min(self.most_requests, at.max_num_batched_tokens)
            changes = [{axis: count} for count in SEQUENCES if count <= top]
        elif axis == "max_num_batched_tokens":
            low, high = at.max_num_seqs, max(self.most_tokens, at.max_num_seqs)
            for tokens in BUDGETS:
                if low <= tokens <= high and (chunks or tokens >= self.longest_sequence):
                    # A chunk as large as the budget limits nothing.
                    kept = at.long_prefill_token_threshold < tokens or threshold in self.fixed
                    changes.append({axis: tokens} if kept else {axis: tokens, threshold: 0})
        elif axis == threshold and chunks:
            top = min(at.max_num_batched_tokens, self.longest)
            changes = [{axis: tokens} for tokens in CHUNKS if tokens < top]
        elif axis == "batching":
            # Without chunked prefill engines require that a whole sequence fits into a step.
            whole = [{axis: "continuous", threshold: 0}] if at.max_num_batched_tokens >= self.longest_sequence else []
            changes = [{axis: "chunked-prefill"}, *whole]
        elif axis == "order" and self.classes and at.batching != "static":
            changes = [{axis: Order(name)} for name in ("fcfs", "priority")]
        settings = [] if axis in self.fixed else [replace(at, **change) for change in changes]
        return [each for each in settings if each != at]


@dataclass(frozen=True, eq=False)
class Found:
    """Result of a search.

    best: the verified setup; None if none is feasible. alone: without contention. fewer: with one replica less. usual:
    replicas with the initial settings. carries, capacity, missed_from: relative loads, as of `Search.spare`.
    """

    best: Measured | None
    alone: Measured
    fewer: Measured | None = None
    usual: int | None = None
    carries: float = math.nan
    capacity: float = math.nan
    missed_from: float = math.nan


@dataclass(eq=False)
class Search:
    """A search for the fewest engines. start: initial settings. replicas: a fixed number of them."""

    evaluator: Evaluator
    start: EngineSettings
    space: SearchSpace = SearchSpace()
    replicas: int | None = None

    def run(self) -> Found:
        alone = self._best_alone()
        if not alone.met and (alone.certain or alone.ratio > NEAR or isinstance(self.evaluator.load, RecordedLoad)):
            return Found(None, alone)
        settings = alone.setup.settings
        usual = self.least(settings) if self.replicas is None else self._at(settings, self.replicas)
        begun = usual if usual is not None else self._at(settings, self._guess(settings))
        settings, carried = self.ascend(begun.setup)
        if self.replicas is not None:
            given = self.evaluator.measure(Setup(settings, self.replicas), replications=VERIFIED)
            best: Measured | None = given if given.met else self.settle(self.replicas, settings) or given
        else:
            guess = max(1, math.ceil(begun.setup.replicas / carried * 1.01))
            best = self._verified(settings, guess)
            while best is not None and best.setup.replicas > 1:
                fewer = self.settle(best.setup.replicas - 1, best.setup.settings)
                if fewer is None:
                    break
                best = fewer
        of_usual = usual.setup.replicas if usual is not None and usual.met else None
        if best is None or not best.met:
            return Found(best, alone, usual=of_usual)
        count = best.setup.replicas
        below = self._at(best.setup.settings, count - 1) if count > 1 else None
        return Found(best, alone, below, of_usual, *self.spare(best.setup, carried * count / begun.setup.replicas))

    def settle(self, replicas: int, near: EngineSettings) -> Measured | None:
        """Return settings that meet the targets with so many replicas, verified; None if none were found.

        The ratio of value to limit is lowest at one batch limit: smaller batches wait longer for admission, larger ones
        take longer per step.
        """
        budgets = [near, *self.space.alternatives(near, "max_num_batched_tokens")]
        budgets.sort(key=lambda each: abs(math.log(each.max_num_batched_tokens / near.max_num_batched_tokens)))
        for settings in budgets:
            found = self._best_batch(replicas, settings)
            if found is not None and found.ratio <= NEAR:
                verified = self.evaluator.measure(found.setup, replications=VERIFIED)
                if verified.met:
                    return verified
        return None

    def _best_batch(self, replicas: int, settings: EngineSettings) -> Measured | None:
        """Return the batch limit of least ratio, from one replication each; None if overloaded."""
        high = int(min(self.space.most_requests, settings.max_num_batched_tokens, SEQUENCES[-1]))
        low = min(SEQUENCES[0], high)
        if "max_num_seqs" in self.space.fixed:
            low = high = settings.max_num_seqs
        known: dict[int, Measured] = {}
        while True:
            counts = {round(low * (high / low) ** (k / (POINTS - 1))) for k in range(POINTS)}
            grid = [Setup(replace(settings, max_num_seqs=count), replicas) for count in sorted(counts)]
            measured = self.evaluator.measure_sustained(grid, replications=1)
            known |= {each.setup.settings.max_num_seqs: each for each in measured}
            if not known:
                return None
            best = min(known, key=lambda count: known[count].ratio)
            tried = sorted({*known, *counts})
            at = tried.index(best)
            low, high = tried[max(at - 1, 0)], tried[min(at + 1, len(tried) - 1)]
            level = any(
                known[each].ratio <= FLAT * known[best].ratio for each in (low, high) if each in known and each != best
            )
            if known[best].ratio <= 1 or known[best].ratio > FAR or high - low < POINTS or level:
                return known[best]

    def least(self, settings: EngineSettings, guess: int | None = None) -> Measured | None:
        """Return the fewest engines that meet the targets with these settings; None if more do not help."""
        at, missed = min(guess or self._guess(settings), MOST_REPLICAS), 0
        most, growth = min(MOST_REPLICAS, MOST_IDLE * at), GALLOP
        while not self._at(settings, at, FIRST).met:
            if at >= most:
                return None
            missed, at, growth = at, min(max(at + 1, round(at * growth)), most), growth**1.5
        between = range(missed + 1, at)
        count = missed + 1 + bisect_left(between, True, key=lambda each: self._at(settings, each, FIRST).met)
        return self._at(settings, count, FIRST)

    def spare(self, setup: Setup, known: float = 1.0) -> tuple[float, float, float]:
        """Return the load up to which the targets are met with certainty, the capacity, and where one is surely missed.

        known: a load near the capacity. Recorded requests are a single course of events, without intervals.
        """
        low, high = self.bracket(setup, max(known, 1.0), growth=PRECISION)
        capacity = max(low, 1.0)
        if isinstance(self.evaluator.load, RecordedLoad):
            return low, capacity, high
        low = self.bracket(setup, low, lambda each: each.met and each.certain, growth=PRECISION)[0]
        high = self.bracket(setup, high, lambda each: each.met or not each.certain, growth=PRECISION)[1]
        planned = self.evaluator.measure(setup, replications=VERIFIED)
        return max(low, 1.0 if planned.met and planned.certain else low), capacity, high

    def bracket(
        self,
        setup: Setup,
        known: float,
        holds: Callable[[Measured], bool] = lambda each: each.met,
        replications: int = MOST,
        growth: float = GALLOP,
    ) -> tuple[float, float]:
        """Return loads PRECISION apart at which something holds and does not; `known` is tried first."""
        most = 1 / LEAST_SCALE
        if isinstance(self.evaluator.load, ClosedLoad):
            # Every user sends requests, whether or not they are served.
            most = max(2.0, MOST_REQUESTS / (SENT_LEAST * self.evaluator.load.users))
        return bracket(
            lambda scale: holds(self.evaluator.measure(setup, scale, replications=replications)),
            known,
            growth=growth,
            precision=PRECISION,
            least=LEAST_SCALE,
            most=most,
        )

    def ascend(self, begun: Setup) -> tuple[EngineSettings, float]:
        """Return the settings with the highest feasible load and the smallest token budget for it, and that load."""
        at, load = begun.settings, self.bracket(begun, 1.0, replications=FIRST)[0]
        for _ in range(ROUNDS):
            before = at
            for axis in AXES:
                at, load = self._better(at, load, axis, begun)
            if at == before:
                break
        budget = AXES[1]
        less = [each for each in self.space.alternatives(at, budget) if getattr(each, budget) < getattr(at, budget)]
        found = self.evaluator.measure_sustained(
            [replace(begun, settings=each) for each in less], load, replications=FIRST
        )
        # Of budgets that carry the load the smallest: its steps stall decoding requests for the shortest time.
        carry = [at, *(each.setup.settings for each in found if each.met)]
        return min(carry, key=lambda each: each.max_num_batched_tokens), load

    def _better(self, at: EngineSettings, load: float, axis: str, begun: Setup) -> tuple[EngineSettings, float]:
        left = [replace(begun, settings=each) for each in self.space.alternatives(at, axis)]
        while left:
            scale = load * PRECISION * GAIN
            found = self.evaluator.measure_sustained(left, scale, replications=FIRST)
            if not (met := [each for each in found if each.met]):
                break
            # Continue with the candidate of most slack; retry the others at its feasible load.
            best = min(met, key=lambda each: each.ratio)
            at, load = best.setup.settings, self.bracket(best.setup, scale, replications=FIRST)[0]
            left = [each.setup for each in met if each is not best]
        return at, load

    def _best_alone(self) -> Measured:
        tried = [self.start, *(each for axis in AXES for each in self.space.alternatives(self.start, axis))]
        met = next((found for each in tried if (found := self.evaluator.alone(each)).met), None)
        return met or min(map(self.evaluator.alone, tried), key=lambda each: each.ratio)

    def _verified(self, settings: EngineSettings, guess: int) -> Measured | None:
        found = self.least(settings, guess)
        if found is None:
            return None
        step = max(1, found.setup.replicas // FINE)
        for count in range(found.setup.replicas, MOST_REPLICAS + 1, step):
            found = self.evaluator.measure(Setup(settings, count), replications=VERIFIED)
            if found.met:
                break
        return found

    def _guess(self, settings: EngineSettings) -> int:
        rate = self.evaluator.rate_per_s
        found = max(1, math.ceil(rate / self.evaluator.saturated(settings).requests_per_s))
        if found > MOST_REPLICAS:
            raise WrongUsage(
                f"{format_rate(rate)} need {found:,} replicas or more; a plan has up to {MOST_REPLICAS:,}",
                where="--rate",
                remedy="Check its unit, or plan a part of the load and multiply its replicas.",
            )
        return found

    def _at(self, settings: EngineSettings, replicas: int, replications: int = MOST) -> Measured:
        return self.evaluator.measure(Setup(settings, replicas), replications=replications)


def within_measured(setup: EngineSetup, load: Load, fits: Sequence[FitResult]) -> EngineSettings:
    """Return the settings that a search begins with; defaults no larger than the measured steps.

    A step has room for MIN_CHUNK tokens, or the longest prompt, whatever was measured.
    """
    start, least = setup.settings, min(MIN_CHUNK, int(draw_lengths(load)[0].max()))

    def within(default: int, name: str, column: str) -> int:
        most = max((fit.domain[column][1] for fit in fits), default=math.inf)
        rounded = int(2 ** math.floor(math.log2(max(most, 1))))
        return rounded if default > most and not setup.is_known(name) else default

    sequences, tokens = within(start.max_num_seqs, "max_num_seqs", "B"), start.max_num_batched_tokens
    if not setup.is_known("max_num_batched_tokens"):
        tokens = max(within(tokens, "max_num_batched_tokens", "S"), sequences, least)
    return replace(start, max_num_seqs=sequences, max_num_batched_tokens=tokens)
