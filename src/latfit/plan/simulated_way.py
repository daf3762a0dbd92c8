"""The ways of a plan in the simulator.

The simulated steps have the plan's mean times and scatter as measured; a path whose scatter nobody knows takes its mean
time every time, or an exponential one where the plan assumed that (a CPU that serves one request at a time).
"""

from dataclasses import replace

from latfit.plan.result import Alternative, Cutoff, Plan
from latfit.plan.systems import GREEDY, ONE_AT_A_TIME, Machine, Part
from latfit.scheduling import policy as policies
from latfit.scheduling.policy import Limits, Policy
from latfit.sim.check import Checked, check
from latfit.sim.machine import ServicePath, System, table_path
from latfit.sim.simulate import Options

PRECISION = 0.01
OPTIONS = Options(precision=PRECISION, most_replications=40)


def simulated_way(machine: Machine, row: Alternative, plan: Plan, rate: float, seed: int) -> Checked:
    """A way of a plan at a rate per ms, until its percentile is known."""
    assert plan.percentile is not None
    system, policy = _simulated(machine, row, plan, rate)
    return check(policy, system, rate, plan.percentile, plan.sla_ms, replace(OPTIONS, seed=seed))


def _simulated(machine: Machine, row: Alternative, plan: Plan, rate: float) -> tuple[System, Policy]:
    """A way as a system and a policy."""
    for part in machine.parts:
        if row.name == f"{part.label}, {ONE_AT_A_TIME}":
            return System(_path(part, 1, alone=True)), policies.gpu_only(Limits(1))
        if row.name.startswith(f"{part.label}, "):
            best = part.times.best_batch()
            greedy = row.name.endswith(GREEDY)
            policy = policies.gpu_only(Limits(best)) if greedy else policies.marginal_cost(rate, Limits(best))
            return System(_path(part, best)), policy
    both = machine.both
    assert both is not None
    assert isinstance(plan.T_cut, Cutoff)
    largest = both.gpu.times.max_batch or 1
    system = System(_path(both.gpu, largest), _path(both.cpu, 1, alone=True))
    return system, policies.cutoff(plan.T_cut.shown_ms, Limits(largest, 1))


def _path(part: Part, largest: int, *, alone: bool = False) -> ServicePath:
    """alone: one request at a time, exponential where nothing is known."""
    times, law = part.times.table(1, largest), part.times.scatter
    return table_path(part.path.name, times, scatter=law, exponential=alone and law is None)
