"""Response times under load: queues by simulation, the optimal batching rule."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.queueing.arrivals import POISSON as POISSON, Arrivals as Arrivals, dispersions as dispersions
    from latfit.queueing.capacity import (
        bisect as bisect,
        feasible_ranges as feasible_ranges,
    )
    from latfit.queueing.dispatch_mdp import optimal_rule as optimal_rule, solve_optimal as solve_optimal
    from latfit.queueing.distribution import ResponseDistribution as ResponseDistribution
    from latfit.queueing.sampled import (
        COARSE as COARSE,
        FINE as FINE,
        QUICK as QUICK,
        USUAL as USUAL,
        Effort as Effort,
        arrival_moments as arrival_moments,
        run_length as run_length,
        simulate_batches as simulate_batches,
    )
    from latfit.queueing.service import (
        ServiceTimes as ServiceTimes,
        linear_times as linear_times,
        measured_times as measured_times,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
