"""How sure a response's percentile is: what the simulation, the measured steps and the fitted curve leave open.

The percentile is computed again for DRAWS of the machines that the data allow: a curve drawn from those that the fit
keeps, its noise drawn anew from the measured steps (`StepNoise.drawn`), and, where repeated steps show that the
curve misses them by more than noise, a level that is off by as much. All of them meet the same arrivals and the same
random numbers as the machine as it was fitted, so that their ratios to its percentile hold what the data leave open and
little else. The interval multiplies the percentile by the 2.5 % and 97.5 % quantiles of these ratios and, in logarithms
at right angles to them, by what the simulation itself leaves open.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.hardware import CERTAIN, HardwareProfile
from latfit.planning import wording
from latfit.planning.load.compare import highest_kept
from latfit.planning.load.strategies import Machine, Part, System, Target, law_or_none, machine_of, system_of
from latfit.planning.request import PlanRequest
from latfit.planning.result import Interval, Kind, Strategy
from latfit.queueing import FINE, QUICK, USUAL, Effort, ResponseDistribution, SampledDistribution
from latfit.stats import FloatArray
from latfit.warning import LatfitWarning

DRAWS, FEWER_DRAWS = 100, 50
SLOWEST = 8
"""Draws that a rate is searched with: the slowest at the plan's rate, which the quantile of all of them is one of at
most rates. What is found is then asked of FEWER_DRAWS."""

FEW, BISECTIONS = 0.2, 6
"""Share of the rate that is carried by the fit from which a promised one is searched, and how finely."""

ROUNDING = 1e-6


@dataclass(frozen=True)
class Promise:
    """percentile_ms: of the response.  interval: 95 %, None where nothing is left open.  doubts: in sentences, why it
    is not to be promised whatever the interval.  slowest: seeds of the machines that were drawn, the slowest first."""

    percentile_ms: float
    interval: Interval | None
    doubts: tuple[str, ...] = ()
    slowest: tuple[int, ...] = ()

    def holds(self, sla_ms: float) -> str:
        """yes, no or in doubt."""
        limit = sla_ms * (1 + ROUNDING)
        if self.percentile_ms > limit:
            return "no"
        high = self.percentile_ms if self.interval is None else self.interval[1]
        return "yes" if high is not None and high <= limit and not self.doubts else "in doubt"


@dataclass(frozen=True)
class Asked:
    """A strategy on a machine at a rate per ms. drawn: machines that the data allow, by a seed.  laws_only: whether
    nothing is run, so that what steps scatter is left out."""

    machine: Machine
    target: Target
    strategy: Strategy
    rate: float
    drawn: Callable[[int], Machine] = field(repr=False)
    laws_only: bool = False

    def law(self, effort: Effort) -> ResponseDistribution | None:
        """Its distribution on the machine as fitted; None where it is overloaded."""
        system = self.system()
        return None if system is None else law_or_none(system, self.rate, effort)

    def quick(self, seed: int | None = None) -> ResponseDistribution | None:
        """Its distribution by a short run where it has one, for ratios of runs on the same numbers."""
        system = self.system(seed)
        if system is None or system.run_at is None:
            return None if system is None else law_or_none(system, self.rate, QUICK)
        with suppress(SlaOutOfReach):
            return system.run_at(self.rate)
        return None

    def system(self, seed: int | None = None) -> System | None:
        return system_of(self.strategy, self.machine if seed is None else self.drawn(seed), self.rate)

    @property
    def parts(self) -> list[Part]:
        """The paths that the strategy runs on."""
        return [part for part in self.machine.parts if part.label in self.strategy.paths]


def asked_of(machine: Machine, target: Target, strategy: Strategy, rate: float, *, laws_only: bool = False) -> Asked:
    return Asked(machine, target, strategy, rate, cache(machine.drawn), laws_only)


def promised_by_batches(profile: HardwareProfile, rate: float, q: float, slower: float) -> Promise | None:
    """What a plan promises of greedy batches on the main path at a rate per ms, for a share `q` of the responses; None
    where that is more than it carries. slower: by how much every step takes longer than fitted."""

    def machine(drawn: Machine) -> Machine:
        return replace(drawn, cpu=None, gpu=drawn.main.scaled(slower))

    fitted = machine_of(profile, 1, PlanRequest(rate=rate))
    strategy = Strategy(Kind.GREEDY, (fitted.main.label,))
    target = Target(math.inf, q, 1)
    return promised(Asked(machine(fitted), target, strategy, rate, lambda seed: machine(fitted.drawn(seed))))


def promised(asked: Asked, law: ResponseDistribution | None = None) -> Promise | None:
    """What can be promised of a strategy; None where the load is more than it carries. law: its distribution by a long
    run, where it is known."""
    law = law or asked.law(FINE)
    return None if law is None else _with_interval(asked, law)


def _with_interval(asked: Asked, law: ResponseDistribution) -> Promise:
    value = law.percentile(asked.target.q)
    own = _of_the_run(law, asked.target.q)
    ratios = _ratios(asked, range(DRAWS))
    doubts = tuple(_doubts(asked, law))
    if own is None and ratios is None:
        return Promise(value, None, doubts)
    slowest = () if ratios is None else tuple(np.argsort(-ratios, kind="stable").tolist())
    ends = (1.0, 1.0) if ratios is None else _ends(ratios)
    low, high = (_joined(value, *each) for each in zip(own or (value, value), ends, strict=True))
    return Promise(value, (low, high), doubts, slowest)


def promised_rate(asked: Asked, promise: Promise, most: float) -> float | None:
    """Rate per ms, up to `most`, that a strategy carries with the slow end of what is left open within the SLA; None
    where there is none, or a tail was not seen. promise: at the plan's rate.

    It is bisected with the SLOWEST of the draws there, and lowered until all FEWER_DRAWS keep it.
    """
    every = [seed for seed in promise.slowest if seed < FEWER_DRAWS]
    few = every[:SLOWEST]
    low, high, step = FEW * most, most, (1 - FEW) * most / 2**BISECTIONS
    if not _kept(asked, high, few):
        if not _kept(asked, low, few):
            return None
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _kept(asked, middle, few) else (low, middle)
        high = low
    found = highest_kept(lambda rate: _kept(asked, rate, every), high, FEW * most, step)
    return None if found <= FEW * most else found


def _kept(asked: Asked, rate: float, seeds: Sequence[int]) -> bool:
    """Whether the slow end is within the SLA at a rate per ms, of FEWER_DRAWS of which those not asked are quicker than
    those with these seeds."""
    there, limit = replace(asked, rate=rate), asked.target.sla_ms * (1 + ROUNDING)
    law = there.law(USUAL)
    if law is None or any(_doubts(there, law)):
        return False
    value, own = law.percentile(asked.target.q), _of_the_run(law, asked.target.q)
    end = value if own is None else own[1]
    if max(value, end) > limit:
        return False
    # The ratio at which the slow end meets the SLA.
    most = math.exp(math.sqrt(max(math.log(limit / value) ** 2 - math.log(end / value) ** 2, 0.0)))
    ratios = _ratios(there, seeds, most)
    if ratios is None:
        return True
    return _ends(np.concatenate([ratios, np.zeros(FEWER_DRAWS - len(ratios))]))[1] <= most


def _of_the_run(law: ResponseDistribution, q: float) -> tuple[float, float] | None:
    """What a simulation leaves open of its percentile; None for a closed form."""
    return law.percentile_interval(q) if isinstance(law, SampledDistribution) else None


def _joined(value: float, end_ms: float, ratio: float) -> float | None:
    """Two ends of intervals as one; None where either has none."""
    if not math.isfinite(end_ms) or not math.isfinite(ratio):
        return None
    reach = math.hypot(math.log(end_ms / value), math.log(ratio))
    return value * math.exp(math.copysign(reach, math.log(ratio) if ratio != 1 else math.log(end_ms / value)))


def _ratios(asked: Asked, seeds: Sequence[int], enough: float = math.inf) -> FloatArray | None:
    """The percentile of each machine drawn over that of the machine as fitted, as many as `seeds`; None where nothing
    varies. Once more than a share of FEWER_DRAWS is above `enough`, the others count as above it too."""
    known = [part.path.fit.draws.get("values") or part.latency.noise is not None for part in asked.machine.parts]
    if asked.laws_only or not any(known):
        return None
    found, first = np.full(len(seeds), math.inf), asked.quick()
    if first is None:
        return found
    base = first.percentile(asked.target.q)
    above = 0
    for place, seed in enumerate(seeds):
        law = asked.quick(seed)
        found[place] = math.inf if law is None else law.percentile(asked.target.q) / base
        above += found[place] > enough
        if above > (1 - CERTAIN[1]) * FEWER_DRAWS:
            break
    return found


def _ends(ratios: FloatArray) -> tuple[float, float]:
    """2.5 % and 97.5 % quantiles of ratios; those of 0 are of machines that nobody ran, since they are quick."""
    low, high = np.quantile(ratios, CERTAIN, method="closest_observation")
    # Pieces of a recording lose what reaches from one into the next: where all that is drawn is quicker, or slower,
    # than the machine as fitted, the interval is that about their own middle.
    middle = float(np.quantile(ratios, 0.5, method="closest_observation"))
    centre = middle if math.isfinite(middle) and middle > 0 else 1.0
    return min(float(low), float(low) / centre, 1.0), max(float(high), float(high) / centre, 1.0)


def _doubts(asked: Asked, law: ResponseDistribution) -> Iterator[str]:
    """Why the percentile is not to be promised: a tail that nobody saw, or runs that were too short."""
    if asked.laws_only:
        yield wording.LAWS_ONLY_DOUBT
        return
    percentile = asked.target.percentile
    for part in asked.parts:
        noise, latency = part.latency.noise, part.latency
        if noise is None:
            if part.path.nominal is None:
                yield wording.unknown_scatter(part.label)
            continue
        if few := wording.few_pauses(part.label, noise, float(part.times.at(np.ones(1))[0])):
            yield few
        largest = 1 if asked.strategy.kind is Kind.ONE_AT_A_TIME else part.times.max_batch
        noise = noise.up_to(math.inf if largest is None else largest)
        if not noise.sees(asked.target.q):
            wanted = math.ceil(1 / (1 - asked.target.q) - 1e-9)
            fewest = min(each.independent for each in noise.groups)
            yield wording.tail_not_seen((part.label, latency.phase, len(noise.groups) > 1), percentile, fewest, wanted)
    arrivals = asked.machine.arrivals
    if not arrivals.poisson and arrivals.grows:
        yield wording.BURSTS_TOO_LONG
    if isinstance(law, SampledDistribution) and not law.settled:
        yield wording.NOT_SETTLED


def tail_warnings(asked: Asked) -> list[LatfitWarning]:
    """Where a few slow steps decide how long requests wait, and where the data do not show what pauses are."""
    found = []
    for part in asked.parts:
        noise = part.times.noise
        if noise is None:
            continue
        share = noise.slow_share(float(part.times.at(np.ones(1))[0]))
        if share > wording.DECIDES:
            found.append(wording.slow_steps_decide(part.label, noise, share))
        found += wording.unclear_pauses(part.label, noise.pauses)
    return found
