"""The part of a plan that needs a rate: which strategy meets the SLA, T_cut, how much load fits, and how sure that is.

All strategies are simulated on the same random numbers. Of those that meet the SLA the one with the least objective
(else percentile) is selected; of two within a thousandth, the first listed.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from latfit.errors import SlaOutOfReach
from latfit.hardware import HardwareProfile
from latfit.messages import Message, message
from latfit.planning import wording
from latfit.planning.load.capacity import (
    RateRange,
    capacity_of,
    confirmed_end,
    feasible_rates,
    range_of,
    replicas_within,
)
from latfit.planning.load.cutoff import plan_cutoff
from latfit.planning.load.strategies import Machine, Part, Target, cutoff_strategy, machine_of, single_path_strategies
from latfit.planning.load.uncertainty import PercentileEstimate, estimate_percentile, robust_rate, tail_warnings
from latfit.planning.load.varying import replicas_for
from latfit.planning.request import PlanRequest
from latfit.planning.result import (
    FALLS_BACK,
    NEEDS_PATHS,
    Alternative,
    Change,
    Cutoff,
    FrontierPoint,
    Kind,
    Plan,
    RuleChoice,
    Strategy,
    Threshold,
    Unknown,
)
from latfit.planning.steps.thresholds import gpu_threshold
from latfit.planning.verdict import Verdict
from latfit.policies import RULES, stopping_batch
from latfit.queueing import COARSE, FINE, ResponseDistribution, optimal_rule, settling_ms, simulate_batches
from latfit.stats import FloatArray
from latfit.units import format_ms, format_rate

TIE, CAPACITY_TIE = 1e-3, 0.01  # relative; within it the first strategy listed is taken
ROUNDING = 1e-6
OBJECTIVE_RATES = 25
FASTER = 0.9  # of a path's time: the improvement that sensitivity shows
MIN_SETTLING_RESPONSES = 20.0  # mean responses from empty to the stationary state, above which it is a warning


@dataclass(frozen=True)
class Judged:
    """A strategy, its responses at the rate (None: unstable), the rates that meet the target, and its row."""

    strategy: Strategy
    law: ResponseDistribution | None
    ranges: Sequence[RateRange]
    row: Alternative


@dataclass(frozen=True)
class LoadPlanner:
    """A load on a machine: rate per ms at one replica."""

    machine: Machine
    rate: float
    target: Target
    request: PlanRequest

    def plan(self, plan: Plan) -> tuple[Plan, list[Message]]:
        """Return the plan of steps with how to serve the rate, and messages about it."""
        waiting, laws = self.plan_cutoff()
        found = self.compare_strategies(waiting)
        feasible = any(each.row.chosen for each in found)
        most, at_most = self.confirm_capacity(found)
        found = [most if each.strategy == most.strategy else each for each in found]
        shown = next((each for each in found if each.row.chosen), most)
        estimate, robust = None, None
        if feasible:
            estimate = estimate_percentile(self.machine, shown.strategy, self.target, self.rate, shown.law)
        if estimate is not None and not estimate.doubts and most.row.sustainable_per_s:
            end = most.row.sustainable_per_s / 1e3
            robust = robust_rate(self.machine, at_most, self.target, estimate.slowest, end)
        promise: Verdict = "misses" if estimate is None else estimate.promise(self.target.sla_ms)
        if promise == "meets" and shown.strategy == most.strategy:
            robust = max(robust or 0.0, self.rate)  # the planned rate is confirmed itself
        quantities: dict[str, Any] = {
            "T_cut_ms": waiting,
            "B1_at_rate": self.threshold(),
            "capacity": capacity_of(most.row, self.request, None if robust is None else robust * 1e3)
            or Unknown("no strategy for this load meets the SLA at any rate"),
        }
        reasons = {name: each.reason for name, each in quantities.items() if isinstance(each, Unknown)}
        values = {name: None if name in reasons else each for name, each in quantities.items()}
        rows = [each.row for each in found]
        plan = structs.replace(
            plan,
            percentile=self.target.percentile,
            feasible=feasible and promise != "misses",
            promise=promise,
            probability=None if estimate is None else estimate.probability(self.target.sla_ms),
            binding=wording.load_binding(most.row),
            remedy="" if feasible else wording.remedy(rows, most.row, self.rate * 1e3),
            rate_per_s=self.rate * 1e3,
            interval_ms=None if estimate is None else estimate.interval,
            strategies=rows,
            capacity=values["capacity"],
            checked=self.summarise(shown) if feasible else None,
            T_cut=values["T_cut_ms"],
            B1_at_rate=values["B1_at_rate"],
            rules=self.rules(),
            sensitivity=self.sensitivity(shown),
            frontier=self.frontier(found, laws, shown),
            unknown=reasons,
        )
        answer = wording.load_answer(plan, self.request.replicas, laws_only=self.request.laws_only)
        messages = [*self.why_in_doubt(estimate, promise), *tail_warnings(self.machine)]
        messages += [*self.warn_of_slow_start(shown), *self.notes(waiting)]
        return structs.replace(plan, answer=answer), messages

    def plan_cutoff(self) -> tuple[Cutoff | Unknown, Mapping[float, ResponseDistribution]]:
        """Return T_cut, and the responses over it."""
        if len(self.machine.parts) < 2:
            return Unknown(FALLS_BACK), {}
        try:
            return plan_cutoff(self.machine, self.rate, self.target, self.request.objective)
        except SlaOutOfReach as error:
            return Unknown(f"{error.found}. {error.remedy}"), {}

    def compare_strategies(self, waiting: Cutoff | Unknown) -> list[Judged]:
        """Return every strategy at the rate, the best marked as chosen where any meets the target."""
        strategies = single_path_strategies(self.machine, self.rate)
        ranges = [feasible_rates(self.machine, each, self.target) for each in strategies]
        if isinstance(waiting, Cutoff):
            alone = range_of(ranges[0], math.inf)[1]  # of the GPU, greedy: T_cut = SLA
            start = max(alone, self.rate if waiting.value is not None else 0.0)
            strategies.append(cutoff_strategy(self.machine, waiting.shown_ms))
            ranges.append(feasible_rates(self.machine, strategies[-1], self.target, start))
        laws = [self.machine.simulate(each, self.rate, FINE) for each in strategies]
        found = [self.judge(*each) for each in zip(strategies, ranges, laws, strict=True)]
        costs = [
            self.cost(law, self.rate) if law is not None and (each.row.margin or 0.0) >= -ROUNDING else math.inf
            for each, law in zip(found, laws, strict=True)
        ]
        least = min(costs)
        if math.isinf(least):
            return found
        best = next(each for each, cost in zip(found, costs, strict=True) if cost <= least + TIE * abs(least))
        for i, each in enumerate(found):
            verdict = "selected" if each is best else each.row.verdict or "meets the SLA, but not better"
            found[i] = replace(each, row=structs.replace(each.row, chosen=each is best, verdict=verdict))
        return found

    def judge(self, strategy: Strategy, ranges: Sequence[RateRange], law: ResponseDistribution | None) -> Judged:
        """Return a strategy with its row."""
        rate, target, limit = self.rate, self.target, self.machine.rate_limit(strategy)
        replicas, (_, capacity) = replicas_within(ranges, rate), range_of(ranges, rate)
        price, late = self.machine.price_per_hour(strategy), None if law is None else law.percentile(target.q)
        verdict = ""
        if late is None:
            verdict = "overloaded, or too near its limit to be computed"
            if rate >= limit:
                verdict = f"unstable from {format_rate(limit * 1e3)} on"
        elif late > target.sla_ms * (1 + ROUNDING):
            verdict = f"misses the SLA by {format_ms(late - target.sla_ms)}"
        row = Alternative(
            name=strategy.name,
            **vars(strategy),
            percentile_ms=late,
            mean_ms=None if law is None else law.mean_ms,
            margin=None if late is None else 1 - late / target.sla_ms,
            rate_limit_per_s=limit * 1e3,
            sustainable_per_s=capacity * 1e3 if capacity > 0 else None,
            utilisation=law.utilisation if law is not None and strategy.kind is Kind.CUTOFF else rate / limit,
            goodput_per_s=None if law is None else rate * (1 - law.tail(target.sla_ms)) * 1e3,
            replicas=replicas,
            price_per_hour=None if price is None or replicas is None else price * replicas,
            verdict=verdict,
            feasible_per_s=[(low * 1e3, high * 1e3) for low, high in ranges],
            source=None if law is None else "simulated",
        )
        return Judged(strategy, law, ranges, row)

    def confirm_capacity(self, found: Sequence[Judged]) -> tuple[Judged, Strategy]:
        """Return the strategy that carries most, its end confirmed by a long run, and what it is at that rate."""
        highest = max(range_of(each.ranges, self.rate)[1] for each in found)
        most = next(each for each in found if range_of(each.ranges, self.rate)[1] >= (1 - CAPACITY_TIE) * highest)
        low, high = ends = range_of(most.ranges, self.rate)
        if high <= 0:
            return most, most.strategy
        floor = self.rate if most.row.chosen and low <= self.rate <= high else low
        end, there = confirmed_end(self.machine, most.strategy, self.target, (floor, high))
        kept = [each for each in most.ranges if each != ends]
        ranges = sorted([*kept, (low, end)]) if end > low else kept
        again = self.judge(most.strategy, ranges, most.law)
        row = structs.replace(again.row, chosen=most.row.chosen, verdict=most.row.verdict)
        return replace(again, row=row), there

    def extra_ms(self, gpu: Part, rate: float) -> float:
        """Return what a request pays before the GPU begins: transfer, and mean wait. Raises SlaOutOfReach."""
        wait = self.request.wait_ms
        if wait is None:
            law = simulate_batches(rate, gpu.times, 1, self.machine.arrivals, COARSE)
            served = max(1, min(round(law.mean_batch), gpu.times.max_batch))
            wait = max(0.0, law.mean_ms - gpu.times(served))
        return wait + self.request.transfer_ms

    def threshold(self) -> Threshold | Unknown:
        """Return B1 with the wait at this rate."""
        if len(self.machine.parts) < 2:
            return Unknown(NEEDS_PATHS)
        gpu, cpu = self.machine.parts
        try:
            extra = self.extra_ms(gpu, self.rate)
        except SlaOutOfReach as error:
            return Unknown(f"the GPU alone does not carry this rate: {error.found}")
        found = gpu_threshold(cpu.latency, gpu.latency, extra_ms=extra)
        waits = f"{found.reason}, with {format_ms(extra)} of wait and transfer before the GPU begins"
        return structs.replace(found, reason=waits)

    def sensitivity(self, shown: Judged) -> list[Change]:
        """Return what a path a tenth faster, and a doubled rate, change."""
        machine = self.machine
        rows = [self.change("as it is", machine, shown, self.rate)]
        for part in reversed(machine.parts):
            faster = part.scaled(FASTER)
            changed = replace(machine, cpu=faster) if part is machine.cpu else replace(machine, gpu=faster)
            rows.append(self.change(f"{part.label} {100 * (1 - FASTER):.0f} % faster", changed, shown, self.rate))
        return [*rows, self.change("twice the rate", machine, shown, 2 * self.rate)]

    def change(self, label: str, machine: Machine, shown: Judged, rate: float) -> Change:
        """Return the shown strategy under a change, its T_cut unchanged; its capacity is with the best T_cut."""
        strategy = shown.strategy
        law, highest = machine.simulate(strategy, rate, COARSE), range_of(shown.ranges, self.rate)[1]
        if any(part not in self.machine.parts for part in machine.parts_of(strategy)):
            highest = range_of(feasible_rates(machine, strategy, self.target, highest), self.rate)[1]
        late = None if law is None else law.percentile(self.target.q)
        needed = replicas_for(rate * self.request.replicas, highest) if highest > 0 else None
        if needed == 1 and (late is None or late > self.target.sla_ms):
            needed = None  # the load is too low, where steps hold too few requests: more replicas make it lower
        return Change(label, self.first_batch(machine, rate), late, highest * 1e3 if highest > 0 else None, needed)

    def first_batch(self, machine: Machine, rate: float) -> int | None:
        """Return B1 on a changed machine; None where no batch is worth the wait."""
        if len(machine.parts) < 2:
            return None
        gpu, cpu = machine.parts
        B = min(cpu.latency.batches, gpu.latency.batches, key=len)
        slow, fast = (part.slowdown * part.latency.typical_ms(B) for part in (cpu, gpu))
        with suppress(SlaOutOfReach):
            wins = np.flatnonzero(fast + self.extra_ms(gpu, rate) <= slow)
            return int(B[wins[0]]) if len(wins) else None
        return None

    def rules(self) -> list[RuleChoice]:
        """Return batching rules on the main path, and by how much each exceeds the optimal mean.

        None where steps have noise, which the decision process leaves out.
        """
        main = self.machine.main
        times = main.times
        if self.rate >= main.best_times.rate_limit() or times.noise is not None:
            return []
        T = times.table(1, times.max_batch).tolist()
        stops = {"greedy": 1} | {name: stopping_batch(name, T, self.rate) for name in RULES}
        try:
            best = optimal_rule(self.rate, times)
            means = {stop: simulate_batches(self.rate, times, stop).mean_ms for stop in set(stops.values())}
        except SlaOutOfReach:
            return [RuleChoice(main.label, name, stop, None, None) for name, stop in stops.items() if name in RULES]
        rows = [RuleChoice(main.label, "optimal", best.threshold, best.cost_ms, 0.0)]
        for name, stop in stops.items():
            excess = max(0.0, means[stop] / best.cost_ms - 1)
            rows.append(RuleChoice(main.label, name, stop, means[stop], excess))
        return rows

    def cost(self, law: ResponseDistribution, rate: float) -> float:
        """Return what a strategy is chosen by: the objective, else the percentile."""
        late, objective = law.percentile(self.target.q), self.request.objective
        return late if objective is None else objective.of(late, law.mean_ms, rate)

    def frontier(
        self, found: Sequence[Judged], laws: Mapping[float, ResponseDistribution], shown: Judged
    ) -> list[FrontierPoint]:
        """Return every strategy, and GPU + CPU over T_cut, those marked that nothing beats in percentile and mean.

        With a weight on throughput, the objective over the rate follows, its least marked.
        """
        rows = [(each.strategy, each.law) for each in found if each.strategy.kind is not Kind.CUTOFF]
        rows += [(cutoff_strategy(self.machine, cutoff), law) for cutoff, law in sorted(laws.items())]
        points = [self.frontier_point(strategy, law, self.rate) for strategy, law in rows if law is not None]
        own = [(point.percentile_ms, point.mean_ms) for point in points]
        best = [not any(a <= x and b <= y and (a, b) != (x, y) for a, b in own) for x, y in own]
        points = [structs.replace(point, best=ok) for point, ok in zip(points, best, strict=True)]
        objective = self.request.objective
        if objective is None or objective.throughput <= 0 or shown.strategy.kind is Kind.CUTOFF:
            return points
        rates = (np.linspace(0.02, 0.98, OBJECTIVE_RATES) * self.machine.rate_limit(shown.strategy)).tolist()
        tried = [(rate, self.machine.simulate(shown.strategy, rate, COARSE)) for rate in rates]
        more = [self.frontier_point(shown.strategy, law, rate) for rate, law in tried if law is not None]
        least = min(more, key=lambda point: point.cost or 0.0)
        return points + [structs.replace(point, best=point is least) for point in more]

    def frontier_point(self, strategy: Strategy, law: ResponseDistribution, rate: float) -> FrontierPoint:
        return FrontierPoint(
            name=" + ".join(strategy.paths) if strategy.kind is Kind.CUTOFF else strategy.name,
            rate_per_s=rate * 1e3,
            T_cut_ms=strategy.T_cut_ms,
            percentile_ms=law.percentile(self.target.q),
            mean_ms=law.mean_ms,
            goodput_per_s=rate * (1 - law.tail(self.target.sla_ms)) * 1e3,
            cost=None if self.request.objective is None else self.cost(law, rate),
            best=False,
        )

    def summarise(self, shown: Judged) -> dict[str, object]:
        """Return the long run that the decision rests on."""
        assert shown.law is not None
        low, high = shown.law.percentile_interval(self.target.q)
        return {
            "strategy": shown.row.name,
            "percentile_ms": shown.row.percentile_ms,
            "ci": [low, high if math.isfinite(high) else None],
            "level": 0.95,
            "sla_ms": self.target.sla_ms,
            "holds": True if high <= self.target.sla_ms else None,
            "stable": True,
            "requests": shown.law.pool.size,
            "seed": self.request.seed,
            "notes": [],
        }

    def notes(self, waiting: Cutoff | Unknown) -> list[Message]:
        """Return what the answer assumes."""
        machine = self.machine
        steady = [part.label for part in machine.parts if part.times.noise is None]
        said = f"Responses are for {machine.arrivals.label}"
        if len(steady) < len(machine.parts):
            said += ", and steps that scatter as measured, independently of each other"
        if steady:
            said += f"; steps on {' and '.join(steady)} take their mean time"
        if machine.cpu is not None and machine.cpu.times.noise is None:
            said += f", one request at a time on {machine.cpu.label} an exponential one"
        of_cpu = [str(waiting.service["sentence"])] if isinstance(waiting, Cutoff) else []
        return [message("assumed", what=each) for each in (f"{said}.", *of_cpu)]

    def why_in_doubt(self, estimate: PercentileEstimate | None, promise: Verdict) -> list[Message]:
        """Return why the percentile is not confirmed: steps to measure, tails that were not measured."""
        if estimate is None or estimate.interval is None:
            return [] if estimate is None else [*estimate.doubts]
        low, high = estimate.interval
        if promise != "likely" or (high is not None and high <= self.target.sla_ms * (1 + ROUNDING)):
            return [*estimate.doubts]
        points = [self.least_known(part) for part in self.machine.parts if part.path.fit.draws.get("values")]
        measure = f"measure these points: {', '.join(points)}" if points else "measure more steps"
        ends = {
            "low": None if low is None else format_ms(low),
            "high": "without an upper end" if high is None else format_ms(high),
        }
        about = {"sla": self.target.sla_ms, "percentile": self.target.percentile}
        return [message("interval_open", **about, **ends, measure=measure), *estimate.doubts]

    def least_known(self, part: Part) -> str:
        """Return the step to measure: the least known of the batches that this load is likely to make."""
        top, reach = part.times.max_batch, 1
        while reach < top and reach < 2 * self.rate * part.times(reach):
            reach = min(2 * reach, top)
        B: FloatArray = np.arange(1.0, reach + 1)
        T, fast, slow = part.latency.range_ms(B)
        batch = int(B[int(np.argmax((slow - fast) / T))])
        return f"B={batch} S={batch * self.target.tokens:,} on {part.label}"

    def warn_of_slow_start(self, shown: Judged) -> list[Message]:
        """Warn where a queue whose steps are quicker the more they hold takes long from empty."""
        part, mean_ms = self.machine.parts_of(shown.strategy)[0], shown.row.mean_ms
        if shown.strategy.kind is not Kind.GREEDY or not part.speeds_up or mean_ms is None:
            return []
        took = settling_ms(self.rate, part.best_times.steady())
        if took <= MIN_SETTLING_RESPONSES * mean_ms:
            return []
        time = "very long" if math.isinf(took) else f"about {format_ms(took, 2)}"
        return [message("slow_start", strategy=shown.row.name, time=time)]


def plan_load(
    plan: Plan, profile: HardwareProfile, request: PlanRequest, percentile: float
) -> tuple[Plan, list[Message]]:
    """Add to a plan of steps how to serve the requested rate for `percentile` percent of the responses."""
    rate = request.rate_each
    assert rate is not None
    target = Target(plan.sla_ms, percentile / 100, plan.tokens_per_request)
    return LoadPlanner(machine_of(profile, target.tokens, request), rate, target, request).plan(plan)
