"""The ways of a plan in the simulator, with the scatter that the fits saw.

The simulated steps have the plan's mean times. Their spread is that of the fit's residuals; a path whose spread nobody
knows takes its mean time every time, or an exponential one where the plan assumed that (a CPU that serves one request
at a time). So what differs from the plan's law is what it left out: steps that vary, and a service that is not
exponential.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from latfit.hardware.estimate import phase_of
from latfit.plan.result import Alternative, Cutoff, Plan
from latfit.plan.systems import GREEDY, ONE_AT_A_TIME, Both, Machine, Part
from latfit.scheduling import policy as policies
from latfit.scheduling.policy import Limits, Policy
from latfit.sim.check import Checked, check
from latfit.sim.machine import ServicePath, System, residual_factors, table_path
from latfit.sim.simulate import Options

REQUESTS = 50_000
PRECISION, MOST_REPLICATIONS = 0.01, 40
COARSE, FEW_REPLICATIONS = 0.02, 12
"""What is spent on a point of a search."""

BISECTIONS = 7


@dataclass(frozen=True)
class Simulator:
    """Runs the ways of a plan for its percentile (in percent) and SLA on its machine."""

    machine: Machine
    plan: Plan
    percentile: float
    seed: int
    _cutoffs: dict[tuple[float, float], Checked] = field(default_factory=dict)

    def check(self, row: Alternative, plan: Plan, rate: float, *, coarse: bool = False) -> Checked:
        """A way at a rate per ms; its T_cut is that of `plan`."""
        system, policy = self._simulated(row, plan, rate)
        return check(policy, system, rate, self.percentile, self.plan.sla_ms, self._options(coarse))

    def cutoff(self, cutoff_ms: float, rate: float) -> Checked:
        """GPU + CPU at a T_cut and a rate per ms, coarsely."""
        key = (cutoff_ms, rate)
        if key not in self._cutoffs:
            assert self.machine.both is not None
            system, largest = self._both_paths(self.machine.both)
            policy = policies.cutoff(cutoff_ms, Limits(largest, 1))
            self._cutoffs[key] = check(policy, system, rate, self.percentile, self.plan.sla_ms, self._options(True))
        return self._cutoffs[key]

    def carried(self, row: Alternative, plan: Plan, most: float) -> float:
        """Rate per ms, up to about `most`, that a way keeps the SLA at, by bisection; 0 where none was found. The way
        stays as it was planned: its batches, its T_cut."""
        low, high = 0.0, most
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            kept = self.check(row, plan, middle, coarse=True).holds
            low, high = (middle, high) if kept else (low, middle)
        return low

    def _options(self, coarse: bool) -> Options:
        asked = Options(requests=REQUESTS, replications=4, seed=self.seed, precision=PRECISION)
        if coarse:
            return replace(asked, precision=COARSE, most_replications=FEW_REPLICATIONS)
        return replace(asked, most_replications=MOST_REPLICATIONS)

    def _simulated(self, row: Alternative, plan: Plan, rate: float) -> tuple[System, Policy]:
        """A way as a system and a policy."""
        for part in self.machine.parts:
            if row.name == f"{part.label}, {ONE_AT_A_TIME}":
                return System(self._path(part, 1, alone=True)), policies.gpu_only(Limits(1))
            if row.name.startswith(f"{part.label}, "):
                best = part.times.best_batch()
                greedy = row.name.endswith(GREEDY)
                policy = policies.gpu_only(Limits(best)) if greedy else policies.marginal_cost(rate, Limits(best))
                return System(self._path(part, best)), policy
        assert self.machine.both is not None
        assert isinstance(plan.T_cut, Cutoff)
        system, largest = self._both_paths(self.machine.both)
        return system, policies.cutoff(plan.T_cut.shown_ms, Limits(largest, 1))

    def _both_paths(self, both: Both) -> tuple[System, int]:
        """GPU and CPU, and the GPU's largest batch."""
        largest = both.gpu.times.max_batch or 1
        return System(self._path(both.gpu, largest), self._path(both.cpu, 1, alone=True)), largest

    def _path(self, part: Part, largest: int, *, alone: bool = False) -> ServicePath:
        """alone: one request at a time, exponential where nothing is known."""
        times = part.times.table(1, largest)
        factors = residual_factors(part.path.fit, phase_of(self.plan.tokens_per_request))
        if len(factors):
            mean = float(np.mean((factors[1:] + factors[:-1]) / 2))
            return table_path(part.path.name, times, factors=factors / mean)
        return table_path(part.path.name, times, exponential=alone)
