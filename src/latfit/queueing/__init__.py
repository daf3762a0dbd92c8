"""Response times under load: queues by simulation, the optimal batching rule."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.queueing.arrivals import POISSON, Arrivals, dispersions
    from latfit.queueing.capacity import bisect, bracket, feasible_ranges
    from latfit.queueing.dispatch_mdp import optimal_rule as optimal_rule, solve_optimal
    from latfit.queueing.distribution import ResponseDistribution
    from latfit.queueing.sampled import (
        COARSE,
        FINE,
        QUICK,
        USUAL,
        Effort,
        arrival_moments,
        run_length,
        simulate_batches as simulate_batches,
    )
    from latfit.queueing.service import ServiceTimes as ServiceTimes, linear_times as linear_times

__all__, __getattr__, __dir__ = face(__name__, __file__)
