"""Find the fewest engines that meet the targets, and the best engine settings.

The replica count is found by bisection from rate / saturated throughput. Settings are found by coordinate ascent on the
highest feasible load at a fixed replica count. Before a replica count is refused, token budgets and sequences are
searched for settings that meet the targets with it. Settings beyond the measured steps are not tried. Derivation:
docs/theory/planning.md, "Searching replicas and settings".
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from latfit.errors import WrongUsage
from latfit.planning.serving.evaluate import VERIFIED, Evaluator, Measured, Setup
from latfit.simulation import EngineSettings, Order
from latfit.units import format_rate
from latfit.workload import RecordedLoad

GAIN = 1.03
"""Ratio by which a setting's feasible load must exceed a load that the current setting misses."""

PRECISION = 1.03
"""Ratio between the ends of the bracket of the highest feasible load."""

GALLOP = 1.15
"""First step of an exponential search, as a ratio."""

LEAST_SCALE = 1e-6
"""Smallest load searched, relative to the planned one; its inverse is the largest."""

MOST_REPLICAS, USUAL_MOST, IDLE = 4096, 256, 64
"""Replicas tried at most: in any plan; beyond four times the number that sustains the load; and as a multiple of that
number, above which replicas idle.
"""

FINE = 256
"""Verification adds replicas in steps of 1/FINE of them, at least one."""

ROUNDS = 3

POINTS = 6
"""Batch limits compared at a time when the best one is narrowed down."""

NEAR = 1.05
"""Ratio of value to limit in one replication up to which settings are verified."""

FAR = 1.5
"""The same ratio beyond which a token budget is given up after its first batch limits."""

FLAT = 1.001
"""Ratio of neighbouring batch limits' results up to which the limit does not matter."""

SEQUENCES = tuple(2**k for k in range(2, 13))
BUDGETS = tuple(2**k for k in range(8, 15))
MOST_SEQUENCES = SEQUENCES[-1]
CHUNKS = (0, 256, 512, 1024, 2048)
"""Tokens of a long prompt per step; 0 for no limit."""


@dataclass(frozen=True)
class SearchSpace:
    """Engine settings that the search may vary.

    Attributes
    ----------
    fixed
        Settings given by the user.
    most_requests, most_tokens
        Largest measured step.
    longest, longest_sequence
        Longest prompt, and longest prompt plus output, in tokens.
    classes
        Whether requests have several priority classes.
    """

    fixed: frozenset[str] = frozenset()
    most_requests: float = math.inf
    most_tokens: float = math.inf
    longest: int = 0
    longest_sequence: int = 0
    classes: bool = False

    def alternatives(self, at: EngineSettings, axis: str) -> list[EngineSettings]:
        """Return the settings that differ from `at` along one axis."""
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
        # Without chunked prefill engines require that a whole sequence fits into a step.
        if at.max_num_batched_tokens >= self.longest_sequence:
            yield replace(at, batching="continuous", long_prefill_token_threshold=0)

    def _orders(self, at: EngineSettings) -> Iterator[EngineSettings]:
        for name in ("fcfs", "priority") if self.classes else ():
            yield replace(at, order=Order(name))


AXES = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "batching", "order")


@dataclass(frozen=True, eq=False)
class Found:
    """Result of a search.

    Attributes
    ----------
    best
        The verified setup; None if no setup is feasible.
    alone
        The best result of a request without contention.
    fewer
        The setup with one replica less, if there is one.
    usual
        Replicas needed with the initial settings; None if no number is enough.
    carries
        Loads, relative to the planned one: the targets are met up to the first and missed beyond the second, both by
        their intervals.
    capacity
        Highest load, relative to the planned one, at which the estimates meet the targets.
    """

    best: Measured | None
    alone: Measured
    fewer: Measured | None = None
    usual: int | None = None
    carries: tuple[float, float] = (math.nan, math.nan)
    capacity: float = math.nan


@dataclass(eq=False)
class Search:
    """A search for the fewest engines. start: initial settings.  replicas: a fixed number of them."""

    evaluator: Evaluator
    start: EngineSettings
    space: SearchSpace = SearchSpace()
    replicas: int | None = None

    def run(self) -> Found:
        """Search replicas and settings; with fixed replicas, settings only."""
        alone = self._best_alone()
        if not alone.met:
            return Found(None, alone)
        settings = alone.setup.settings
        usual = self.least(settings) if self.replicas is None else self._at(settings, self.replicas)
        begun = usual if usual is not None else self._at(settings, self._guess(settings))
        settings, carried = self.ascend(begun.setup, 1.0 if begun.met else self.highest(begun.setup, 1.0))
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
        if best is None or not best.met:
            return Found(best, alone, usual=_count(usual))
        count = best.setup.replicas
        below = self._at(best.setup.settings, count - 1) if count > 1 else None
        return Found(best, alone, below, _count(usual), self.spare(best.setup), max(1.0, self.highest(best.setup, 1.0)))

    def settle(self, replicas: int, near: EngineSettings) -> Measured | None:
        """Return settings that meet the targets with so many replicas, verified; None if none were found.

        The ratio of value to limit is lowest at one batch limit: smaller batches wait longer for admission, larger
        ones take longer per step. So the limit is narrowed down on ever finer grids, for each token budget.
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
        """Return the batch limit of least ratio, from one replication each; None if the load exceeds the throughput."""
        high = int(min(self.space.most_requests, settings.max_num_batched_tokens, MOST_SEQUENCES))
        low = min(SEQUENCES[0], high)
        if "max_num_seqs" in self.space.fixed:
            low = high = settings.max_num_seqs
        known: dict[int, Measured] = {}
        while True:
            grid = [Setup(replace(settings, max_num_seqs=count), replicas) for count in _geometric(low, high)]
            tried = self.evaluator.sustainable(grid)
            known |= {each.setup.settings.max_num_seqs: each for each in self.evaluator.each(tried, replications=1)}
            if not known:
                return None
            best = min(known, key=lambda count: known[count].ratio)
            counts = sorted({*known, *(each.settings.max_num_seqs for each in grid)})
            at = counts.index(best)
            low, high = counts[max(at - 1, 0)], counts[min(at + 1, len(counts) - 1)]
            level = any(
                known[each].ratio <= FLAT * known[best].ratio for each in (low, high) if each in known and each != best
            )
            if known[best].ratio <= 1 or known[best].ratio > FAR or high - low < POINTS or level:
                return known[best]

    def least(self, settings: EngineSettings, guess: int | None = None) -> Measured | None:
        """Return the fewest engines that meet the targets with these settings; None if more do not help."""
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
        """Return the highest feasible load, relative to the planned one; `known` is tried first."""
        return self._bracket(setup, known)[0]

    def spare(self, setup: Setup) -> tuple[float, float]:
        """Return the load up to which the targets are met and the one from which on one is missed.

        Both are confirmed by intervals; for recorded requests, a single course of events, by the estimate.
        """
        low, high = self._bracket(setup, 1.0)
        if isinstance(self.evaluator.load, RecordedLoad):
            return low, high
        while low > LEAST_SCALE and not self._sure(setup, low, met=True):
            low /= PRECISION
        verified = self.evaluator.measure(setup, replications=VERIFIED)
        if verified.met and verified.certain:
            low = max(low, 1.0)
        while high < 1 / LEAST_SCALE and not self._sure(setup, high, met=False):
            high *= PRECISION
        return low, high

    def _sure(self, setup: Setup, scale: float, *, met: bool) -> bool:
        found = self.evaluator.measure(setup, scale)
        return found.certain and found.met == met

    def _bracket(self, setup: Setup, known: float) -> tuple[float, float]:
        """Return a feasible and an infeasible load, PRECISION apart."""
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
        """Return the settings with the highest feasible load at this replica count, and that load."""
        at, load = begun.settings, self.highest(begun, carried)
        for _ in range(ROUNDS):
            before = at
            for axis in AXES:
                at, load = self._better(at, load, axis, begun)
            if at == before:
                break
        return at, load

    def _better(self, at: EngineSettings, load: float, axis: str, begun: Setup) -> tuple[EngineSettings, float]:
        """Return the best settings along one axis, and their feasible load."""
        left = [replace(begun, settings=each) for each in self.space.alternatives(at, axis)]
        while left:
            asked = load * PRECISION * GAIN
            tried = self.evaluator.sustainable(left, asked)
            met = [each for each in self.evaluator.each(tried, asked) if each.met]
            if not met:
                break
            # Continue with the candidate of most slack; retry the others at its feasible load.
            best = min(met, key=lambda each: each.ratio)
            at, load = best.setup.settings, self.highest(best.setup, asked)
            left = [each.setup for each in met if each is not best]
        return at, load

    def _best_alone(self) -> Measured:
        """Simulate without contention: the initial settings, then others until one meets the targets, else the best."""
        best = self.evaluator.alone(self.start)
        settings = [each for axis in AXES for each in self.space.alternatives(self.start, axis)]
        for each in settings if not best.met else ():
            found = self.evaluator.alone(each)
            best = min(best, found, key=lambda one: one.ratio)
            if best.met:
                break
        return best

    def _verified(self, settings: EngineSettings, guess: int) -> Measured | None:
        """Return the fewest engines that pass verification."""
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
        """Return the fewest engines that sustain the load."""
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


def _geometric(low: int, high: int) -> list[int]:
    """Return POINTS whole numbers from low to high in equal ratios, fewer where they agree."""
    ratio = high / low
    return sorted({round(low * ratio ** (k / (POINTS - 1))) for k in range(POINTS)})


def _count(found: Measured | None) -> int | None:
    return None if found is None or not found.met else found.setup.replicas
