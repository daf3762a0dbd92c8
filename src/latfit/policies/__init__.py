"""Batching policies: rules for which requests are served next, where and when."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.policies import codes, policy as policy
    from latfit.policies.dispatch import decide
    from latfit.policies.marginal_cost import RULES, stopping_batch
    from latfit.policies.policy import (
        POLICIES,
        SPECIAL,
        DispatchTable as DispatchTable,
        Limits as Limits,
        Named as Named,
        PathTimes,
        Policy,
        Settings,
        Solve,
        add_policy as add_policy,
        cutoff,
        default_cutoff_ms,
        default_threshold,
        named_policy,
        optimal as optimal,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
