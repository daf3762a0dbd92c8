"""Response times under load: exact where an exact distribution exists, else from the queue itself, run."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.queueing.batch import batch_queue as batch_queue
    from latfit.queueing.capacity import (
        HEAVIEST as HEAVIEST,
        LOWEST_OF_GRID as LOWEST_OF_GRID,
        feasible_rates as feasible_rates,
        fluid_backlog as fluid_backlog,
        replicas as replicas,
        sustainable_rate as sustainable_rate,
    )
    from latfit.queueing.dispatch_mdp import optimal_rule as optimal_rule, rule_costs as rule_costs
    from latfit.queueing.distribution import (
        OverflowDistribution as OverflowDistribution,
        ResponseDistribution as ResponseDistribution,
        percentile_of as percentile_of,
    )
    from latfit.queueing.overflow import (
        OVERLOADED as OVERLOADED,
        SMALLEST_SHARE as SMALLEST_SHARE,
        CutoffQueue as CutoffQueue,
        Method as Method,
        Ranges as Ranges,
        cutoff_queue as cutoff_queue,
        exact_distribution as exact_distribution,
        feasible_cutoffs as feasible_cutoffs,
        inner_ranges as inner_ranges,
    )
    from latfit.queueing.responses import (
        COARSE as COARSE,
        FINE as FINE,
        POISSON as POISSON,
        QUICK as QUICK,
        USUAL as USUAL,
        Arrivals as Arrivals,
        Effort as Effort,
        batch_response as batch_response,
        closed_form as closed_form,
        cutoff_response as cutoff_response,
        dispersions as dispersions,
        run_batches as run_batches,
        scatters as scatters,
        single_response as single_response,
    )
    from latfit.queueing.sampled import SampledDistribution as SampledDistribution
    from latfit.queueing.service import (
        ServiceTimes as ServiceTimes,
        linear_times as linear_times,
        measured_times as measured_times,
    )
    from latfit.queueing.settling import settling_ms as settling_ms

__all__, __getattr__, __dir__ = face(__name__, __file__)
