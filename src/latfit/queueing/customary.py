"""Formulas in circulation that mislead, kept so that a plan can show them beside the right ones.

Each docstring says what is wrong and when. The customary T_cut formula is `CutoffQueue.customary_percentile`.
"""

import math

from scipy import special

from latfit.errors import WrongUsage
from latfit.queueing.distribution import positive


def service_rate_from_median(median_ms: float, rate: float = 0.0) -> float:
    """The right one: service rate per ms of an exponential service from a median in ms, ln 2/median.

    A median measured under a load of `rate` per ms (M/M/1) is the response's: mu = rate + ln 2/median.
    """
    return rate + math.log(2) / positive(median_ms, "median", "in ms")


def customary_service_rate(median_ms: float) -> float:
    """1/median: right only if every service takes the same time; too fast by 44 % for an exponential one."""
    return 1 / positive(median_ms, "median", "in ms")


def customary_slo_share(utilisation: float, sla_ms: float, mean_service_ms: float) -> float:
    """1 - rho^(SLA/E[S]), claimed as a lower bound on the share in time. It exceeds the truth already for M/M/1,
    1 - e^(-(1 - rho) SLA/E[S]), at every rho < 1, since ln(1/rho) >= 1 - rho."""
    if not 0 < utilisation < 1:
        raise WrongUsage(
            f"utilisation {utilisation:g} is not between 0 and 1", where="utilisation", remedy="Give the load's share."
        )
    positive(sla_ms, "SLA", "in ms"), positive(mean_service_ms, "mean service", "in ms")
    return -math.expm1(math.log(utilisation) * sla_ms / mean_service_ms)


def literal_three_stage_gpu_share(rate: float, tick_ms: float, threshold: int) -> float:
    """Chance per tick that the three-stage rule taken literally uses the GPU: P(Poisson(rate tick) >= threshold).

    A queue below the threshold goes to the AMX at once, so a scheduler that acts on each arrival (tick -> 0) never
    forms a batch. What works: AMX if it is idle or done earlier, else wait, and flush at age T_cut.
    """
    mean = positive(rate, "rate") * positive(tick_ms, "tick", "in ms")
    return float(special.gammainc(threshold, mean))
