"""Plan a load: strategy, T_cut, capacity, and how sure they are.

Of the strategies that meet the SLA the one with the least objective, else percentile, is selected; of two within a
thousandth, the first listed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from latfit.messages import Message, message, note
from latfit.planning import wording
from latfit.planning.load.capacity import (
    ROUNDING,
    RateRange,
    capacity_of,
    confirm_end,
    feasible_rates,
    plan_cutoff,
    range_of,
    replicas_within,
)
from latfit.planning.load.strategies import Machine, Part, Target, cutoff_strategy, single_path_strategies
from latfit.planning.load.uncertainty import PercentileEstimate, estimate_percentile, robust_rate, tail_warnings
from latfit.planning.request import PlanOptions
from latfit.planning.result import (
    FALLS_BACK,
    NEEDS_PATHS,
    Alternative,
    Change,
    Cutoff,
    Kind,
    Plan,
    Strategy,
    Threshold,
)
from latfit.planning.steps.thresholds import gpu_threshold
from latfit.planning.verdict import Verdict
from latfit.queueing import COARSE, FINE, ResponseDistribution, simulate_batches
from latfit.stats import FloatArray
from latfit.units import format_ms, format_rate

TIE, CAPACITY_TIE = 1e-3, 0.01  # relative; within it the first strategy listed is taken
FASTER = 0.9  # of a path's time: the improvement that sensitivity shows


@dataclass(eq=False)
class Candidate:
    """A strategy, its responses at the rate (None: unstable), and the ranges of feasible rates."""

    strategy: Strategy
    law: ResponseDistribution | None
    ranges: Sequence[RateRange]


@dataclass(frozen=True)
class LoadPlanner:
    """A load on a machine: rate per ms at one replica."""

    machine: Machine
    rate: float
    target: Target
    request: PlanOptions

    def plan(self, plan: Plan) -> tuple[Plan, list[Message]]:
        two_paths, cutoff = len(self.machine.parts) == 2, None
        if two_paths:
            cutoff = plan_cutoff(self.machine, self.rate, self.target, self.request.objective)
        candidates = self.simulate_strategies(cutoff)
        best = self.choose(candidates)
        most, at_most = self.confirm_capacity(candidates, best)
        shown, highest = best or most, self.capacity(most)
        estimate, robust = None, None
        if best is not None:
            estimate = estimate_percentile(self.machine, best.strategy, self.target, self.rate, best.law)
        if estimate is not None and not estimate.doubts and highest > 0:
            robust = robust_rate(self.machine, at_most, self.target, estimate.slowest, highest)
        promise: Verdict = "misses" if estimate is None else estimate.promise(self.target.sla_ms)
        if promise == "meets" and shown is most:
            robust = max(robust or 0.0, self.rate)  # the planned rate is confirmed itself
        rows = [self.describe(each, chosen=each is best) for each in candidates]
        of_most = rows[candidates.index(most)]
        alone = self.machine.simulate(most.strategy, 0.0, COARSE)
        assert alone is not None
        limit = wording.describe_limit(of_most, alone.percentile(self.target.q))
        capacity = capacity_of(of_most, self.request, limit, None if robust is None else robust * 1e3)
        carried = "" if capacity is None else f"capacity {capacity.shown} per replica, "
        threshold = self.threshold() if two_paths else None
        reasons = {
            "T_cut_ms": "GPU and CPU together are overloaded. Lower the rate." if two_paths else FALLS_BACK,
            "B1_at_rate": "the GPU alone does not carry this rate" if two_paths else NEEDS_PATHS,
            "capacity": "no strategy for this load meets the SLA at any rate",
        }
        values = {"T_cut_ms": cutoff, "B1_at_rate": threshold, "capacity": capacity}
        plan = structs.replace(
            plan,
            percentile=self.target.percentile,
            feasible=best is not None and promise != "misses",
            promise=promise,
            probability=None if estimate is None else estimate.probability(self.target.sla_ms),
            binding=f"{carried}{limit}",
            remedy=wording.suggest_remedy(of_most, self.rate * 1e3, self.request.replicas)
            if promise == "misses"
            else "",
            rate_per_s=self.rate * 1e3,
            interval_ms=None if estimate is None else estimate.interval,
            strategies=rows,
            capacity=capacity,
            T_cut=cutoff,
            B1_at_rate=threshold,
            sensitivity=self.sensitivity(shown),
            unknown={name: reason for name, reason in reasons.items() if values[name] is None},
        )
        answer = wording.load_answer(plan, self.request.replicas, laws_only=self.request.laws_only)
        messages = [*self.why_in_doubt(estimate, promise), *tail_warnings(self.machine)]
        messages += self.notes(cutoff)
        return structs.replace(plan, answer=answer), messages

    def capacity(self, candidate: Candidate) -> float:
        """Return the highest feasible rate per ms of a strategy; 0 for none."""
        return range_of(candidate.ranges, self.rate)[1]

    def simulate_strategies(self, cutoff: Cutoff | None) -> list[Candidate]:
        strategies = single_path_strategies(self.machine, self.rate)
        if cutoff is not None:
            strategies.append(cutoff_strategy(self.machine, cutoff.shown_ms))
        ranges = [feasible_rates(self.machine, each, self.target) for each in strategies]
        laws = [self.machine.simulate(each, self.rate, FINE) for each in strategies]
        return [Candidate(*each) for each in zip(strategies, laws, ranges, strict=True)]

    def choose(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the first feasible candidate whose cost is within TIE of the least."""
        met = self.target.is_met
        costs = [self.cost(each.law) if each.law is not None and met(each.law) else math.inf for each in candidates]
        least = min(costs)
        if math.isinf(least):
            return None
        return next(each for each, cost in zip(candidates, costs, strict=True) if cost <= least + TIE * abs(least))

    def cost(self, law: ResponseDistribution) -> float:
        late, objective = law.percentile(self.target.q), self.request.objective
        return late if objective is None else objective.of(late, law.mean_ms, self.rate)

    def confirm_capacity(self, candidates: Sequence[Candidate], best: Candidate | None) -> tuple[Candidate, Strategy]:
        """Confirm the capacity of the best strategy by a long run; return it, and its form at that rate."""
        highest = max(self.capacity(each) for each in candidates)
        most = next(each for each in candidates if self.capacity(each) >= (1 - CAPACITY_TIE) * highest)
        low, high = ends = range_of(most.ranges, self.rate)
        if high <= 0:
            return most, most.strategy
        floor = self.rate if most is best and low <= self.rate <= high else low
        end, there = confirm_end(self.machine, most.strategy, self.target, (floor, high))
        others = [each for each in most.ranges if each != ends]
        most.ranges = sorted([*others, (low, end)]) if end > low else others
        return most, there

    def describe(self, candidate: Candidate, *, chosen: bool) -> Alternative:
        rate, sla_ms, law, strategy = self.rate, self.target.sla_ms, candidate.law, candidate.strategy
        limit, capacity = self.machine.rate_limit(strategy), self.capacity(candidate)
        replicas, price = replicas_within(candidate.ranges, rate, limit), self.machine.price_per_hour(strategy)
        late = None if law is None else law.percentile(self.target.q)
        verdict = "selected" if chosen else "meets the SLA, but not better"
        if late is None:
            verdict = f"unstable from {format_rate(limit * 1e3)} on"
        elif not self.target.is_met(law):
            verdict = f"misses the SLA by {format_ms(late - sla_ms)}"
        return Alternative(
            name=strategy.name,
            **vars(strategy),
            percentile_ms=late,
            mean_ms=None if law is None else law.mean_ms,
            margin=None if late is None else 1 - late / sla_ms,
            rate_limit_per_s=limit * 1e3,
            sustainable_per_s=capacity * 1e3 if capacity > 0 else None,
            utilisation=law.utilisation if law is not None and strategy.kind is Kind.CUTOFF else rate / limit,
            goodput_per_s=None if law is None else rate * (1 - law.tail(sla_ms)) * 1e3,
            replicas=replicas,
            price_per_hour=None if price is None or replicas is None else price * replicas,
            chosen=chosen,
            verdict=verdict,
            feasible_per_s=[(low * 1e3, high * 1e3) for low, high in candidate.ranges],
            source=None if law is None else "simulated",
        )

    def extra_ms(self, gpu: Part, rate: float) -> float:
        """Return transfer and mean wait before the GPU begins; infinite if the GPU is overloaded."""
        wait = self.request.wait_ms
        if wait is None:
            if rate >= gpu.times.rate_limit():
                return math.inf
            law = simulate_batches(rate, gpu.times, 1, self.machine.arrivals, COARSE)
            served = max(1, min(round(law.mean_batch), gpu.times.max_batch))
            wait = max(0.0, law.mean_ms - float(gpu.times.mean_ms[served - 1]))
        return wait + self.request.transfer_ms

    def threshold(self) -> Threshold | None:
        """Return B1 with the wait at this rate; None if the GPU is overloaded."""
        gpu, cpu = self.machine.parts
        extra = self.extra_ms(gpu, self.rate)
        if math.isinf(extra):
            return None
        idle = gpu_threshold(cpu.latency, gpu.latency, extra_ms=extra)
        waits = f"{idle.reason}, with {format_ms(extra)} of wait and transfer before the GPU begins"
        return structs.replace(idle, reason=waits)

    def sensitivity(self, shown: Candidate) -> list[Change]:
        machine = self.machine
        rows = [self.change("unchanged", machine, shown, self.rate)]
        for part in reversed(machine.parts):
            faster = part.scaled(FASTER)
            changed = replace(machine, cpu=faster) if part is machine.cpu else replace(machine, gpu=faster)
            rows.append(self.change(f"{part.label} {100 * (1 - FASTER):.0f} % faster", changed, shown, self.rate))
        return [*rows, self.change("twice the rate", machine, shown, 2 * self.rate)]

    def change(self, label: str, machine: Machine, shown: Candidate, rate: float) -> Change:
        """Return the shown strategy under a change, at its T_cut; its capacity is with the best T_cut."""
        strategy, ranges = shown.strategy, shown.ranges
        if any(part not in self.machine.parts for part in machine.parts_of(strategy)):
            ranges = feasible_rates(machine, strategy, self.target)
        law, highest = machine.simulate(strategy, rate, COARSE), range_of(ranges, self.rate)[1]
        late = None if law is None else law.percentile(self.target.q)
        needed = replicas_within(ranges, rate * self.request.replicas, machine.rate_limit(strategy))
        return Change(label, self.first_batch(machine, rate), late, highest * 1e3 if highest > 0 else None, needed)

    def first_batch(self, machine: Machine, rate: float) -> int | None:
        if len(machine.parts) < 2:
            return None
        gpu, cpu = machine.parts
        B = min(cpu.latency.batches, gpu.latency.batches, key=len)
        slow, fast = (part.slowdown * part.latency.typical_ms(B) for part in (cpu, gpu))
        wins = np.flatnonzero(fast + self.extra_ms(gpu, rate) <= slow)
        return int(B[wins[0]]) if len(wins) else None

    def notes(self, cutoff: Cutoff | None) -> list[Message]:
        machine = self.machine
        steady = [part.label for part in machine.parts if part.times.noise is None]
        text = f"Responses are for {machine.arrivals.label}"
        if len(steady) < len(machine.parts):
            text += ", and steps that scatter as measured, independently of each other"
        if steady:
            text += f"; steps on {' and '.join(steady)} take their mean time"
        if machine.cpu is not None and machine.cpu.times.noise is None:
            text += f", one request at a time on {machine.cpu.label} an exponential one"
        of_cpu = [] if cutoff is None else [str(cutoff.service["sentence"])]
        return [note(each) for each in (f"{text}.", *of_cpu)]

    def why_in_doubt(self, estimate: PercentileEstimate | None, promise: Verdict) -> list[Message]:
        if estimate is None:
            return []
        low, high = estimate.interval
        if promise != "likely" or (high is not None and high <= self.target.sla_ms * (1 + ROUNDING)):
            return [*estimate.doubts]
        points = [self.least_certain_step(part) for part in self.machine.parts if part.path.fit.draws.get("values")]
        about = {
            "sla": self.target.sla_ms,
            "percentile": self.target.percentile,
            "low": None if low is None else format_ms(low),
            "high": "without an upper end" if high is None else format_ms(high),
            "measure": f"measure these points: {', '.join(points)}" if points else "measure more steps",
        }
        return [message("interval_open", **about), *estimate.doubts]

    def least_certain_step(self, part: Part) -> str:
        """Return the least certain of the steps that this load is likely to make."""
        top, reach = part.times.max_batch, 1
        while reach < top and reach < 2 * self.rate * part.times.mean_ms[reach - 1]:
            reach = min(2 * reach, top)
        B: FloatArray = np.arange(1.0, reach + 1)
        T, fast, slow = part.latency.range_ms(B)
        batch = int(B[int(np.argmax((slow - fast) / T))])
        return f"B={batch} S={batch * self.target.tokens:,} on {part.label}"
