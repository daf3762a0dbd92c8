"""Find the smallest pair of prefill and decode fleets that meets the targets (disaggregated prefill).

Each fleet's minimum is found by bisection with the other fleet large; no pair below both minima is feasible. Pairs are
then tried by rising total. Both fleets share settings and cost. Derivation: docs/theory/planning.md, "Prefill apart".
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

from latfit.planning.serving.evaluate import VERIFIED, Evaluator, Measured, Setup
from latfit.planning.serving.result import ApartPlan, settings_of
from latfit.planning.serving.search import Search, SearchSpace
from latfit.simulation import EngineSettings, StepCosts, Transfer

AMPLE = 4
"""First size of an ample fleet, relative to the smallest that sustains the load plus one; doubled as needed."""

MOST_APART = 64
"""Largest total of both fleets that is searched."""

TRIED_AGAIN = 8
"""Engines added while verification rejects a pair."""


@dataclass(frozen=True, eq=False)
class PrefillApart:
    """Step costs of prefill and of decode engines, and the KV transfer between them."""

    prefill: StepCosts
    decode: StepCosts
    transfer: Transfer


@dataclass(eq=False)
class Pairs:
    """Search for the smallest pair.

    Attributes
    ----------
    evaluator
        Of separate prefill and decode engines.
    together
        Engines needed if each does both; None if no number meets the targets.
    contents
        Whether recorded prompt contents determine what is cached.
    """

    evaluator: Evaluator
    space: SearchSpace
    together: int | None = None
    contents: bool = False

    def run(self, starts: Iterable[EngineSettings], transfer: Transfer) -> ApartPlan:
        """Find the smallest pair with the best settings, at most `together` engines in all.

        starts: settings to begin with; those of engines that do both can be poor ones for prefill alone.
        """
        tried = [self._least(each) for each in dict.fromkeys(starts) if self.evaluator.alone(each).met]
        if not tried:
            return _no_pair((0, 0), transfer)
        lower = min((each for each, _ in tried), key=sum)
        found = min((each for _, each in tried if each is not None), key=_by_engines, default=None)
        if found is not None:
            space, start = replace(self.space, fixed=self.space.fixed | {"batching"}), found.setup.settings
            settings, _ = Search(self.evaluator, start, space).ascend(found.setup, 1.0)
            if settings != start:
                _, other = self._least(settings)
                found = min((each for each in (found, other) if each is not None), key=_by_engines)
            found = self._verified(found.setup)
        if found is None:
            return _no_pair(lower, transfer)
        setup, rate = found.setup, self.evaluator.rate_per_s
        carries, at_most = Search(self.evaluator, setup.settings, self.space).spare(setup)
        return ApartPlan(
            feasible=True,
            prefill_replicas=setup.prefill,
            replicas=setup.replicas,
            transfer_ms=(transfer.fixed_ms, transfer.ms_per_token),
            targets=list(found.reached),
            outcome=found.summary,
            highest_rate_per_s=carries * rate,
            missed_from_rate_per_s=at_most * rate,
            **settings_of(setup.settings, feasible=True, contents=self.contents),
        )

    @property
    def _most(self) -> int:
        return MOST_APART if self.together is None else min(self.together, MOST_APART)

    def _least(self, settings: EngineSettings) -> tuple[tuple[int, int], Measured | None]:
        """Return the minimum of each fleet, and the smallest feasible pair or None."""
        rates = self.evaluator.of_kinds(settings)
        lower = [max(1, math.ceil(self.evaluator.rate_per_s / each)) for each in rates]
        if sum(lower) > self._most:
            return (lower[0], lower[1]), None
        ample = [AMPLE * (each + 1) for each in lower]

        def at(prefill: int, decode: int) -> Measured:
            return self.evaluator.measure(Setup(settings, decode, prefill=prefill))

        while not at(ample[0], ample[1]).met:
            if max(ample) >= MOST_APART:
                return (0, 0), None
            ample = [2 * each for each in ample]
        prefill = bisect_left(range(ample[0]), True, lower[0], key=lambda count: at(count, ample[1]).met)
        decode = bisect_left(range(ample[1]), True, lower[1], key=lambda count: at(ample[0], count).met)
        if prefill + decode > self._most:
            return (prefill, decode), None
        enough = bisect_left(range(ample[1]), True, decode, key=lambda count: at(prefill, count).met)
        for total in range(prefill + decode, min(prefill + enough, self._most + 1)):
            kept = [at(total - count, count) for count in range(decode, total - prefill + 1)]
            kept = [each for each in kept if each.met]
            if kept:
                return (prefill, decode), min(kept, key=_by_engines)
        last = at(prefill, enough)
        return (prefill, decode), last if last.setup.total <= self._most else None

    def _verified(self, setup: Setup) -> Measured | None:
        """Verify a pair with more replications; add an engine where that rejects it."""
        asked = [setup]
        for _ in range(TRIED_AGAIN):
            found = min((self.evaluator.measure(each, replications=VERIFIED) for each in asked), key=_by_engines)
            if found.met:
                return found
            at = found.setup
            if at.total >= self._most:
                break
            asked = [replace(at, prefill=at.prefill + 1), replace(at, replicas=at.replicas + 1)]
        return None


def _no_pair(lower: tuple[int, int], transfer: Transfer) -> ApartPlan:
    """Return an infeasible plan. lower: minimum of each fleet."""
    return ApartPlan(
        feasible=False,
        prefill_replicas=lower[0],
        replicas=lower[1],
        transfer_ms=(transfer.fixed_ms, transfer.ms_per_token),
        targets=[],
        engine=None,
        highest_rate_per_s=None,
    )


def _by_engines(found: Measured) -> tuple[bool, int, float]:
    """Sort key: feasible first, then fewest engines, then most slack."""
    return not found.met, found.setup.total, found.ratio
