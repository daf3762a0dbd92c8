"""Prefill and decoding on engines of their own: the least of both kinds that keep the targets.

Engines that prefill know nothing of those that decode. So the least that prefill are those that keep the targets beside
as many that decode as help at all, and the other way round; no pair below these two keeps them. From there on pairs are
tried by their sum, the least first, up to the pair of the least that prefill with those that it takes then. Settings
are the same for both kinds and searched as for engines that do both, at the pair that the first settings need: how many
requests and tokens a step may hold. Engines of both kinds cost the same.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from latfit.planning.engine_settings import serving_flags
from latfit.planning.serving.evaluate import Evaluator, Measured, Setup
from latfit.planning.serving.search import Room, Search
from latfit.planning.serving.targets import Reached
from latfit.simulation import EngineSettings, EngineSummary, StepCosts, Transfer
from latfit.units import format_ms

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


@dataclass(frozen=True, eq=False)
class ApartPlan:
    """Engines that prefill and engines that decode. feasible: whether they keep the targets.  prefill, decode: how
    many; where none keep them, or they are more than engines that do both, those below which no pair does (0 where
    nothing is known).  reached, summary, settings: as they were simulated, None where nothing was.  carries,
    carries_at_most: as of a `ServingPlan`."""

    feasible: bool
    prefill: int
    decode: int
    transfer: Transfer
    settings: EngineSettings
    reached: Sequence[Reached] = ()
    summary: EngineSummary | None = None
    carries: float = math.nan
    carries_at_most: float = math.nan
    price_per_million_tokens: float | None = None

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    @property
    def engines(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings under the names that serving engines use."""
        return serving_flags(self.settings)

    @property
    def transfer_text(self) -> str:
        """As it is written."""
        return f"{format_ms(self.transfer.fixed_ms)} and {format_ms(self.transfer.ms_per_token)} a token"

    def to_json(self, rate_per_s: float, engine: Mapping[str, Any]) -> dict[str, Any]:
        """engine: the settings, by the options of `latfit simulate engine`."""
        known = self.feasible and not math.isnan(self.carries)
        return {
            "feasible": self.feasible,
            "prefill_replicas": self.prefill,
            "replicas": self.decode,
            "transfer_ms": [self.transfer.fixed_ms, self.transfer.ms_per_token],
            "engine": dict(engine) if self.feasible else None,
            "engines": self.engines if self.feasible else {},
            "targets": [each.to_json() for each in self.reached],
            "outcome": None if self.summary is None else self.summary.to_json(),
            "highest_rate_per_s": self.carries * rate_per_s if known else None,
            "missed_from_rate_per_s": self.carries_at_most * rate_per_s if known else None,
            "price_per_million_tokens": self.price_per_million_tokens,
        }


@dataclass(eq=False)
class Pairs:
    """A search for the least pair. evaluator: of engines apart.  together: engines that do both, None where no number
    keeps the targets."""

    evaluator: Evaluator
    room: Room
    together: int | None = None

    def run(self, start: EngineSettings, transfer: Transfer) -> ApartPlan:
        """The least pair with the best settings; one that is more than `together` is not looked for."""
        if not self.evaluator.alone(start).met:
            return ApartPlan(False, 0, 0, transfer, start)
        lower, found = self._least(start)
        if found is not None:
            room = replace(self.room, fixed=self.room.fixed | {"batching"})
            settings, _ = Search(self.evaluator, start, room).ascend(found.setup, 1.0)
            if settings != start:
                _, other = self._least(settings)
                found = min((each for each in (found, other) if each is not None), key=_by_engines)
            found = self._verified(found.setup)
        if found is None:
            return ApartPlan(False, *lower, transfer, start)
        setup = found.setup
        spare = Search(self.evaluator, setup.settings, self.room).spare(setup)
        return ApartPlan(
            True, setup.prefill, setup.replicas, transfer, setup.settings, found.reached, found.summary, *spare
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


def _by_engines(found: Measured) -> tuple[bool, int, float]:
    """The fewest that keep the targets first, of equals those with most room."""
    return not found.met, found.setup.total, found.ratio
