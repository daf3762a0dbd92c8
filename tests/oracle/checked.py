"""A percentile of a simulated policy, until it is known precisely, compared with an SLA."""

from dataclasses import dataclass

from latfit.policies.policy import Policy
from latfit.simulation.policies.estimate import estimate
from latfit.simulation.policies.result import SimResult
from latfit.simulation.policies.run import Options, simulate
from latfit.simulation.policies.service import System
from latfit.simulation.summary import Interval
from latfit.workload.arrivals import Poisson
from latfit.workload.load import OpenLoad

PRECISE = Options(precision=0.01, most_replications=40)


@dataclass(frozen=True, eq=False)
class Checked:
    """The percentile in ms. holds: whether the SLA is met; None if the runs do not decide it."""

    percentile: Interval
    holds: bool | None
    result: SimResult


def check(
    policy: Policy,
    system: System,
    rate: float,
    percentile: float = 99.0,
    sla_ms: float | None = None,
    options: Options = PRECISE,
) -> Checked:
    """Simulate Poisson arrivals at a rate per ms."""
    result = simulate(policy, system, OpenLoad(Poisson(rate)), options)
    (found, _), holds = estimate(result.summaries, round(percentile / 100, 12)), None
    if sla_ms is not None and (not result.stable or found.low > sla_ms):
        holds = False
    elif sla_ms is not None and found.trusted and found.high <= sla_ms:
        holds = True
    return Checked(found, holds, result)
