"""The decision against an event simulation: the selected strategy in the simulator of `latfit simulate`, event by
event, beside the run of the queue that the plan was made with. Both have the same mean times, the same scatter and the
same arrivals; the loops that serve requests are two, the draw from a measured distribution and the histogram of
responses one.

A path whose scatter nobody knows takes its mean time every time, or an exponential one where the plan assumed that (a
CPU that serves one request at a time).
"""

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from latfit.errors import WrongUsage
from latfit.planning.load.strategies import Machine, Part, Target
from latfit.planning.result import Kind, Strategy
from latfit.policies import Limits, Policy, policy as policies
from latfit.queueing import Arrivals
from latfit.simulation import Checked, Options, ServicePath, System, check, table_path
from latfit.stats import FloatArray
from latfit.workload import OpenLoad, Poisson

PRECISION = 0.01
OPTIONS = Options(precision=PRECISION, most_replications=40)

MARGIN = 0.02
"""Share of the SLA that a plan in doubt is told to keep: the simulation tells twice its precision."""


@dataclass(frozen=True)
class AsRecorded:
    """Arrivals in the gaps of a recording, run through in a circle from a place drawn at random. rate per ms."""

    arrivals: Arrivals
    rate: float

    def times_ms(self, count: int, rng: Generator) -> FloatArray:
        gaps = self.arrivals.gaps
        assert gaps is not None
        return np.cumsum(np.resize(np.roll(gaps, -int(rng.integers(len(gaps)))), count)) / self.rate

    def at_rate(self, rate: float) -> "AsRecorded":
        return replace(self, rate=rate)


def simulated(machine: Machine, strategy: Strategy, rate: float, target: Target, seed: int) -> Checked | None:
    """A strategy at a rate per ms, until its percentile is known to PRECISION; None at a rate so low that the
    simulation's clock cannot tell a response: then requests do not meet."""
    system, policy = _simulated(machine, strategy, rate)
    arrivals = Poisson(rate) if machine.arrivals.poisson else AsRecorded(machine.arrivals, rate)
    options = replace(OPTIONS, seed=seed)
    with suppress(WrongUsage):
        return check(policy, system, OpenLoad(arrivals), target.percentile, target.sla_ms, options)
    return None


def _simulated(machine: Machine, strategy: Strategy, rate: float) -> tuple[System, Policy]:
    """A strategy as a system and a policy."""
    main = machine.part(strategy.paths[0])
    if strategy.kind is Kind.ONE_AT_A_TIME:
        return System(_path(main, 1, alone=True)), policies.gpu_only(Limits(1))
    if strategy.T_cut_ms is not None:
        side, largest = machine.part(strategy.paths[1]), main.times.max_batch or 1
        system = System(_path(main, largest), _path(side, 1, alone=True))
        return system, policies.cutoff(strategy.T_cut_ms, Limits(largest, 1))
    best = Limits(main.times.best_batch())
    greedy = strategy.kind is Kind.GREEDY
    return System(_path(main, best.main)), policies.gpu_only(best) if greedy else policies.marginal_cost(rate, best)


def _path(part: Part, largest: int, *, alone: bool = False) -> ServicePath:
    """alone: one request at a time, exponential where nothing is known."""
    times = part.times
    T, exponential = times.at(np.arange(1.0, largest + 1)), alone and times.noise is None
    return table_path(part.path.name, T, noise=times.noise, fixed_ms=times.fixed_ms, exponential=exponential)
