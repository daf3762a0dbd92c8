"""Prefill and decoding on engines of their own: the least of both kinds that keep the targets.

Engines that prefill know nothing of those that decode. So the least that prefill are those that keep the targets beside
as many that decode as help at all, and the other way round; no pair below these two keeps them. From there on pairs are
tried by their sum, the least first, up to the pair of the least that prefill with those that it takes then. Settings
are the same for both kinds and searched as for engines that do both, at the pair that the first settings need: how many
requests and tokens a step may hold. Engines of both kinds cost the same.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from latfit.planning.serving.evaluate import Evaluator, Measured, Setup
from latfit.planning.serving.result import ApartPlan, settings_of
from latfit.planning.serving.search import Room, Search
from latfit.simulation import EngineSettings, StepCosts, Transfer

AMPLE = 4
"""Times the engines of a kind without which the load is not carried, and as many more, that are taken as others than
too few at first; then twice as many, again and again."""

MOST_APART = 64
"""Engines of both kinds together, beyond which no pair is looked for."""

TRIED_AGAIN = 8
"""Engines that are added where the last verification of a pair does not agree."""


@dataclass(frozen=True, eq=False)
class PrefillApart:
    """Step costs of engines that prefill and of those that decode, and how keys and values get to the latter."""

    prefill: StepCosts
    decode: StepCosts
    transfer: Transfer


@dataclass(eq=False)
class Pairs:
    """A search for the least pair. evaluator: of engines apart.  together: engines that do both, None where no number
    keeps the targets.  contents: whether recorded contents of prompts say what is cached."""

    evaluator: Evaluator
    room: Room
    together: int | None = None
    contents: bool = False

    def run(self, start: EngineSettings, transfer: Transfer) -> ApartPlan:
        """The least pair with the best settings; one that is more than `together` is not looked for."""
        if not self.evaluator.alone(start).met:
            return _no_pair((0, 0), transfer)
        lower, found = self._least(start)
        if found is not None:
            room = replace(self.room, fixed=self.room.fixed | {"batching"})
            settings, _ = Search(self.evaluator, start, room).ascend(found.setup, 1.0)
            if settings != start:
                _, other = self._least(settings)
                found = min((each for each in (found, other) if each is not None), key=_by_engines)
            found = self._verified(found.setup)
        if found is None:
            return _no_pair(lower, transfer)
        setup, rate = found.setup, self.evaluator.rate_per_s
        carries, at_most = Search(self.evaluator, setup.settings, self.room).spare(setup)
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
        """What no pair may go below, and the least pair; None where that is too many, or none does."""
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
        """The pair with more replications, or one with an engine more."""
        asked = [setup]
        for _ in range(TRIED_AGAIN):
            found = min((self.evaluator.measure(each, verify=True) for each in asked), key=_by_engines)
            if found.met:
                return found
            at = found.setup
            if at.total >= self._most:
                break
            asked = [replace(at, prefill=at.prefill + 1), replace(at, replicas=at.replicas + 1)]
        return None


def _no_pair(lower: tuple[int, int], transfer: Transfer) -> ApartPlan:
    """lower: what no pair may go below."""
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
    """The fewest that keep the targets first, of equals those with most room."""
    return not found.met, found.setup.total, found.ratio
