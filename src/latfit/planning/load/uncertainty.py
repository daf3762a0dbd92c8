"""Uncertainty of a percentile, from DRAWS machines (curve, noise and recording redrawn).

The 95 % interval of the ratios is joined with that of the simulation, in logarithms at right angles.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from latfit.hardware import CERTAIN, HardwareProfile
from latfit.messages import Message, message
from latfit.planning import wording
from latfit.planning.load.strategies import Machine, Target, machine_of
from latfit.planning.request import PlanOptions
from latfit.planning.result import Interval, Kind, Strategy
from latfit.planning.verdict import Verdict, probability_within, verdict_of
from latfit.queueing import COARSE, FINE, QUICK, ResponseDistribution, bisect
from latfit.stats import FloatArray
from latfit.threads import map_on_threads
from latfit.units import format_ms

DRAWS = 100
MISSED_DRAWS = int((1 - CERTAIN[1]) * DRAWS)  # that may miss the target at a robust rate
MIN_SHARE = 0.2  # of the capacity of the fit: a robust rate below it is not searched
PRECISION = 0.01
ROUNDING = 1e-6


@dataclass(frozen=True)
class PercentileEstimate:
    """A percentile of the response. interval: 95 %. slowest: seeds of the drawn machines, the slowest first."""

    percentile_ms: float
    interval: Interval
    doubts: tuple[Message, ...] = ()
    slowest: tuple[int, ...] = ()

    def probability(self, sla_ms: float) -> float | None:
        return probability_within(self.percentile_ms, *self.interval, sla_ms * (1 + ROUNDING))

    def promise(self, sla_ms: float) -> Verdict:
        met = self.percentile_ms <= sla_ms * (1 + ROUNDING)
        return verdict_of(met=met, probability=self.probability(sla_ms), doubted=bool(self.doubts))


def estimate_percentile(
    machine: Machine, strategy: Strategy, target: Target, rate: float, law: ResponseDistribution | None = None
) -> PercentileEstimate | None:
    """Return the percentile at a rate per ms; None for overload. law: of a long run, where known."""
    law = law or machine.simulate(strategy, rate, FINE)
    if law is None:
        return None
    value, own = law.percentile(target.q), law.percentile_interval(target.q)
    doubts = tuple(_find_doubts(machine, strategy, target, law))
    ratios = None if machine.steady else percentile_ratios(machine, strategy, target, rate, range(DRAWS))
    if ratios is None:
        return PercentileEstimate(value, (own[0], own[1] if math.isfinite(own[1]) else None), doubts)
    low, high = (_join(value, *each) for each in zip(own, _ends_of(ratios), strict=True))
    return PercentileEstimate(value, (low, high), doubts, tuple(np.argsort(-ratios, kind="stable").tolist()))


def promised_by_batches(profile: HardwareProfile, rate: float, q: float, slower: float) -> PercentileEstimate | None:
    """Return the percentile of greedy batches with steps `slower` times as long; None for overload."""
    fitted = machine_of(profile, 1, PlanOptions(rate=rate))
    machine = replace(fitted, cpu=None, gpu=fitted.main.scaled(slower))
    return estimate_percentile(machine, Strategy(Kind.GREEDY, (fitted.main.label,)), Target(math.inf, q, 1), rate)


def robust_rate(
    machine: Machine, strategy: Strategy, target: Target, slowest: Sequence[int], most: float
) -> float | None:
    """Return the rate per ms up to `most` at which all but the 2.5 % slowest drawn machines meet the target.

    slowest: seeds, the slowest first; near saturation the one with the lowest stability limit is the slowest.
    """
    if not slowest:
        return most
    drawn = [machine.drawn(seed) for seed in slowest]
    slow = {drawn[MISSED_DRAWS], sorted(drawn, key=lambda each: each.rate_limit(strategy))[MISSED_DRAWS]}

    def met(rate: float) -> bool:
        return all(target.is_met(each.simulate(strategy, rate, COARSE)) for each in slow)

    if met(most):
        return most
    return bisect(met, MIN_SHARE * most, most, PRECISION) if met(MIN_SHARE * most) else None


def percentile_ratios(
    machine: Machine, strategy: Strategy, target: Target, rate: float, seeds: Sequence[int]
) -> FloatArray | None:
    """Return percentiles of drawn machines over the fitted one's; None if nothing varies."""
    parts = machine.parts_of(strategy)
    if not any(part.path.fit.draws.get("values") or part.times.noise is not None for part in parts):
        return None
    base = machine.simulate(strategy, rate, QUICK)
    if base is None:
        return np.full(len(seeds), math.inf)

    def ratio(seed: int) -> float:
        law = machine.drawn(seed).simulate(strategy, rate, QUICK)
        return math.inf if law is None else law.percentile(target.q) / base.percentile(target.q)

    return np.array(map_on_threads(ratio, seeds))


def _join(value: float, end_ms: float, ratio: float) -> float | None:
    if not math.isfinite(end_ms) or not math.isfinite(ratio):
        return None
    reach = math.hypot(math.log(end_ms / value), math.log(ratio))
    return value * math.exp(math.copysign(reach, math.log(ratio) if ratio != 1 else math.log(end_ms / value)))


def _ends_of(ratios: FloatArray) -> tuple[float, float]:
    low, middle, high = np.quantile(ratios, (CERTAIN[0], 0.5, CERTAIN[1]), method="closest_observation").tolist()
    # Pieces of a recording lose what reaches from one into the next: where all that is drawn is quicker, or slower,
    # than the machine as fitted, the interval is that about their own median.
    centre = middle if math.isfinite(middle) else 1.0
    return min(low, low / centre, 1.0), max(high, high / centre, 1.0)


def _find_doubts(machine: Machine, strategy: Strategy, target: Target, law: ResponseDistribution) -> Iterator[Message]:
    if machine.steady:
        yield message("closed_forms")
        return
    for part in machine.parts_of(strategy):
        noise = part.latency.noise
        if noise is None:
            if part.path.nominal is None:
                yield message("noise_unknown", path=part.label)
            continue
        if few := wording.few_pauses(part.label, noise, float(part.times.typical_ms[0])):
            yield message("few_pauses", what=few)
        noise = noise.up_to(1 if strategy.kind is Kind.ONE_AT_A_TIME else part.times.max_batch)
        if not noise.sees(target.q):
            yield message(
                "tail_not_seen",
                path=part.label,
                phase=part.latency.phase,
                sizes=" of some batch sizes" if len(noise.groups) > 1 else "",
                independent=min(each.independent for each in noise.groups),
                wanted=math.ceil(1 / (1 - target.q) - 1e-9),
                percentile=target.percentile,
            )
    if not machine.arrivals.poisson and machine.arrivals.grows:
        yield message("bursts_too_long")
    if not law.settled:
        yield message("not_settled")


def tail_warnings(machine: Machine) -> list[Message]:
    """Warn where a few slow steps decide how long requests wait, or the kind of pauses is unclear."""
    found = []
    for part in machine.parts:
        if (noise := part.times.noise) is None:
            continue
        share, steps = noise.slow_share(float(part.times.typical_ms[0])), noise.pooled.steps
        if share > wording.DECIDES:
            longest = f"{float(noise.pooled.values.max()):.3g} times the typical"
            if noise.pauses is not None:
                longest += f", with pauses of up to {format_ms(float(noise.pauses.ms.max()))}"
            about = {"slow": 0.01 * steps, "steps": steps, "longest": longest, "share": share}
            found.append(message("stalls", path=part.label, **about))
        found += wording.unclear_pauses(part.label, noise.pauses)
    return found
