"""How sure a response's percentile is: what the simulation, the measured steps and the fitted curve leave open.

The percentile is computed again for DRAWS of the machines that the data allow: a curve drawn from those that the fit
keeps, its scatter drawn anew from the measured steps (`StepRatios.drawn`), and, where repeated steps show that the
curve misses them by more than noise, a level that is off by as much. All of them meet the same arrivals and the same
random numbers as the machine as it was fitted, so that their ratios to its percentile hold what the data leave open and
little else. The interval multiplies the percentile by the 2.5 % and 97.5 % quantiles of these ratios and, in logarithms
at right angles to them, by what the simulation itself leaves open.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from latfit.hardware import ExecutionPath, HardwareProfile, phase_of, scatter
from latfit.planning.load.compare import cutoff_system
from latfit.planning.load.strategies import (
    AS_FITTED,
    ONE_AT_A_TIME,
    Machine,
    System,
    Target,
    Variation,
    law_or_none,
    machine_of,
    simple_systems,
)
from latfit.planning.request import Wishes
from latfit.planning.result import Alternative, Cutoff, Interval
from latfit.queueing import FINE, QUICK, USUAL, Effort, ResponseLaw

DRAWS, FEWER_DRAWS = 100, 50
FEW, BISECTIONS = 0.2, 6
"""Share of the rate that is carried by the fit from which a promised one is searched, and how finely."""

CERTAIN = (0.025, 0.975)
DECIDES = 0.25
"""Share of E[F^2] due to the slowest hundredth of the steps from which their tail decides how long requests wait."""


@dataclass(frozen=True)
class Promise:
    """percentile_ms: of the response.  interval: 95 %, None where nothing is left open.  doubts: in sentences, why it
    is not to be promised whatever the interval."""

    percentile_ms: float
    interval: Interval | None
    doubts: tuple[str, ...] = ()

    def holds(self, sla_ms: float) -> str:
        """yes, no or in doubt."""
        limit = sla_ms * (1 + 1e-6)
        if self.percentile_ms > limit:
            return "no"
        high = self.percentile_ms if self.interval is None else self.interval[1]
        return "yes" if high is not None and high <= limit and not self.doubts else "in doubt"


@dataclass(frozen=True)
class Asked:
    """A way to run the load, by its name, on a profile. at: another rate per ms than the wishes'."""

    profile: HardwareProfile
    target: Target
    wishes: Wishes
    waiting: Cutoff | None
    name: str
    at: float | None = None

    @property
    def rate(self) -> float:
        rate = self.wishes.rate_each if self.at is None else self.at
        assert rate is not None
        return rate

    def law(self, variation: Variation, effort: Effort) -> ResponseLaw | None:
        """Its law; None where it is overloaded."""
        system = self.system(machine_of(self.profile, self.target.tokens, self.wishes, variation))
        return None if system is None else law_or_none(system, self.rate, effort)

    def system(self, machine: Machine) -> System | None:
        """The way on another machine."""
        if self.waiting is not None and "T_cut" in self.name and (both := machine.both) is not None:
            return cutoff_system(both, self.waiting.shown_ms)
        return next((system for system in simple_systems(machine, self.rate) if system.name == self.name), None)


def promised(asked: Asked) -> Promise | None:
    """What can be promised of a way; None where the load is more than it carries."""
    law = asked.law(AS_FITTED, FINE)
    return None if law is None else _with_interval(asked, law)


def _with_interval(asked: Asked, law: ResponseLaw, draws: int = DRAWS) -> Promise:
    value = law.percentile(asked.target.q)
    own = _of_the_run(law, asked.target.q)
    ratios = _ratios(asked, draws)
    doubts = tuple(_doubts(asked, law))
    if own is None and ratios is None:
        return Promise(value, None, doubts)
    low, high = (_joined(value, *ends) for ends in zip(own or (value, value), ratios or (1.0, 1.0), strict=True))
    return Promise(value, (low, high), doubts)


def promised_rate(asked: Asked, most: float) -> float | None:
    """Rate per ms, up to `most`, that a way carries with the slow end of what is left open within the SLA, by
    bisection; None where there is none, or a tail was not seen."""
    low, high = FEW * most, most
    if _kept(asked, high):
        return high
    if not _kept(asked, low):
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _kept(asked, middle) else (low, middle)
    return low


def _kept(asked: Asked, rate: float) -> bool:
    there = replace(asked, at=rate)
    law = there.law(AS_FITTED, USUAL)
    return law is not None and _with_interval(there, law, FEWER_DRAWS).holds(asked.target.sla_ms) == "yes"


def _of_the_run(law: ResponseLaw, q: float) -> tuple[float, float] | None:
    """What a simulation leaves open of its percentile; None for a law in closed form."""
    from latfit.queueing import SampledLaw

    return law.percentile_interval(q) if isinstance(law, SampledLaw) else None


def _joined(value: float, end_ms: float, ratio: float) -> float | None:
    """Two ends of intervals as one; None where either has none."""
    if not math.isfinite(end_ms) or not math.isfinite(ratio):
        return None
    reach = math.hypot(math.log(end_ms / value), math.log(ratio))
    return value * math.exp(math.copysign(reach, math.log(ratio) if ratio != 1 else math.log(end_ms / value)))


def _ratios(asked: Asked, draws: int) -> tuple[float, float] | None:
    """2.5 % and 97.5 % quantiles of the percentile over that of the machine as fitted; None where nothing varies."""
    paths = asked.profile.paths.values()
    phase = phase_of(asked.target.tokens)
    if not any(path.fit.draws.get("values") or scatter(path, phase) is not None for path in paths):
        return None
    first = asked.law(AS_FITTED, QUICK)
    if first is None:
        return 1.0, math.inf
    base = first.percentile(asked.target.q)
    found = []
    for seed in range(draws):
        law = asked.law(Variation(seed), QUICK)
        found.append(math.inf if law is None else law.percentile(asked.target.q) / base)
    low, middle, high = np.quantile(found, (CERTAIN[0], 0.5, CERTAIN[1]), method="closest_observation")
    # Pieces of a recording lose what reaches from one into the next: where all that is drawn is quicker, or slower,
    # than the machine as fitted, the interval is that about their own middle.
    centre = float(middle) if math.isfinite(middle) else 1.0
    return min(float(low), float(low) / centre, 1.0), max(float(high), float(high) / centre, 1.0)


def _doubts(asked: Asked, law: ResponseLaw) -> Iterator[str]:
    """Why the percentile is not to be promised: a tail that nobody saw, or runs that were too short."""
    phase = phase_of(asked.target.tokens)
    percentile = asked.target.percentile
    for path in _used(asked):
        ratios = scatter(path, phase)
        if ratios is None:
            if path.quote is None:
                yield f"how steps on {path.label} scatter is not known: fit its trace again"
            continue
        largest = 1 if asked.name.endswith(ONE_AT_A_TIME) else asked.wishes.max_batch
        ratios = ratios.up_to(math.inf if largest is None else largest)
        if not ratios.sees(asked.target.q):
            wanted = math.ceil(1 / (1 - asked.target.q) - 1e-9)
            fewest = min(part.independent for part in ratios.parts)
            some = " with some batch sizes" if len(ratios.parts) > 1 else ""
            yield (
                f"the tail of {phase} steps on {path.label}{some} beyond p{percentile:g} was not seen"
                f" ({fewest:,.0f} independent steps; {wanted:,} or more could show it)"
            )
    arrivals = asked.wishes.arrivals
    if not arrivals.poisson and arrivals.grows:
        yield "the recorded arrivals are too few to show how long their bursts last"
    from latfit.queueing import SampledLaw

    if isinstance(law, SampledLaw) and not law.settled:
        yield "the load is so near its limit that the simulation was too short to settle"


def _used(asked: Asked) -> list[ExecutionPath]:
    """The paths that the way runs on."""
    system = asked.system(machine_of(asked.profile, asked.target.tokens, asked.wishes))
    return [] if system is None else list(system.paths)


def tail_notes(asked: Asked) -> list[str]:
    """Where a few slow steps decide how long requests wait, in sentences."""
    found = []
    for path in _used(asked):
        ratios = scatter(path, phase_of(asked.target.tokens))
        if ratios is not None and ratios.slow_share > DECIDES:
            slow = ratios.steps * 0.01
            found.append(
                f"{path.label}: the slowest 1 % of the measured steps ({slow:,.0f} of {ratios.steps:,.0f}, up to"
                f" {ratios.values.max():.3g} times the typical) decide how long requests wait: they make"
                f" {ratios.slow_share:.0%} of the mean square of a step's time. Find what stalls them, or measure more."
            )
    return found


def with_promise(row: Alternative, promise: Promise, sla_ms: float) -> Alternative:
    """The chosen way with the percentile that was computed with more effort."""
    return replace(row, percentile_ms=promise.percentile_ms, margin=1 - promise.percentile_ms / sla_ms)
