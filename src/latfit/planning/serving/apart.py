"""The smallest pair of prefill and decode fleets: docs/theory/planning.md, "Disaggregated prefill"."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from latfit.planning.serving.evaluate import MOST, VERIFIED, Evaluator, Measured, Setup
from latfit.planning.serving.result import ApartPlan, settings_of
from latfit.planning.serving.search import Search, SearchSpace
from latfit.simulation import EngineSettings, StepCosts, Transfer

MOST_APART = 64  # largest total of both fleets that is searched


@dataclass(frozen=True, eq=False)
class PrefillApart:
    prefill: StepCosts
    decode: StepCosts
    transfer: Transfer


@dataclass(eq=False)
class Pairs:
    """Search for the smallest pair. together: engines needed if each does both.

    contents: whether recorded prompt contents determine what is cached.
    """

    evaluator: Evaluator
    space: SearchSpace
    together: int | None = None
    contents: bool = False

    def run(self, starts: Iterable[EngineSettings], transfer: Transfer) -> ApartPlan:
        """Find the smallest pair of at most `together` engines. starts: settings to try."""
        lower, pairs, moved = (0, 0), [], (transfer.fixed_ms, transfer.ms_per_token)
        for settings in dict.fromkeys(starts):
            least = self._sustaining(settings)
            most = Setup(settings, MOST_APART, prefill=MOST_APART)
            can_meet = sum(least) > self._most or self.evaluator.measure(most, replications=1).met
            if self.evaluator.alone(settings).met and can_meet:
                lower = least if not any(lower) else min(lower, least, key=sum)
                pairs.append(self._grow(Setup(settings, least[1], prefill=least[0])))
        best = _fewest(pairs)
        if best is not None:
            space, start = replace(self.space, fixed=self.space.fixed | {"batching"}), best.setup.settings
            settings, _ = Search(self.evaluator, start, space).ascend(best.setup)
            prefill, decode = self._sustaining(settings)
            other = self._grow(Setup(settings, decode, prefill=prefill)) if settings != start else None
            best = self._grow((_fewest([best, other]) or best).setup, VERIFIED)
        if best is None:
            return ApartPlan(feasible=False, prefill_replicas=lower[0], replicas=lower[1], transfer_ms=moved)
        setup, rate = best.setup, self.evaluator.rate_per_s
        carries, _, at_most = Search(self.evaluator, setup.settings, self.space).spare(setup)
        return ApartPlan(
            feasible=True,
            prefill_replicas=setup.prefill,
            replicas=setup.replicas,
            transfer_ms=moved,
            targets=list(best.reached),
            outcome=best.summary,
            highest_rate_per_s=carries * rate,
            missed_from_rate_per_s=at_most * rate,
            **settings_of(setup.settings, contents=self.contents),
        )

    @property
    def _most(self) -> int:
        return MOST_APART if self.together is None else min(self.together, MOST_APART)

    def _sustaining(self, settings: EngineSettings) -> tuple[int, int]:
        """Return the fewest prefill and decode engines that sustain the load."""
        rate = self.evaluator.rate_per_s
        prefill, decode = (max(1, math.ceil(rate / each)) for each in self.evaluator.of_kinds(settings))
        return prefill, decode

    def _grow(self, setup: Setup, replications: int = MOST) -> Measured | None:
        """Add engines where the tightest target gains most, then drop each that is not needed."""

        def measure(setups: Iterable[Setup]) -> list[Measured]:
            return [self.evaluator.measure(each, replications=replications) for each in setups]

        if setup.total > self._most:
            return None
        (best,) = measure([setup])
        while not best.met:
            best = min(measure(_neighbours(best.setup, 1)), key=lambda each: (not each.met, each.tightest.ratio))
            if best.setup.total > self._most:
                return None
        while fewer := [each for each in measure(_neighbours(best.setup, -1)) if each.met]:
            best = min(fewer, key=_by_engines)
        return best


def _neighbours(setup: Setup, step: int) -> list[Setup]:
    pairs = [replace(setup, prefill=setup.prefill + step), replace(setup, replicas=setup.replicas + step)]
    return [each for each in pairs if min(each.prefill, each.replicas) >= 1]


def _fewest(pairs: Iterable[Measured | None]) -> Measured | None:
    return min((each for each in pairs if each is not None), key=_by_engines, default=None)


def _by_engines(measured: Measured) -> tuple[bool, int, float]:
    return not measured.met, measured.setup.total, measured.ratio
