"""Batching policies: rules for which requests are served next, where and when."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.policies import codes as codes, policy as policy
    from latfit.policies.codes import (
        AGED as AGED,
        ANY as ANY,
        DUE as DUE,
        MAIN as MAIN,
        MOST_AGED as MOST_AGED,
        NOW as NOW,
        OLDEST as OLDEST,
        SERVE_MAIN as SERVE_MAIN,
        SERVE_SIDE as SERVE_SIDE,
        SIDE as SIDE,
        T_CUT as T_CUT,
        VIEW as VIEW,
        WAIT as WAIT,
        WAITING as WAITING,
    )
    from latfit.policies.dispatch import decide as decide
    from latfit.policies.marginal_cost import RULES as RULES, stopping_batch as stopping_batch
    from latfit.policies.policy import (
        POLICIES as POLICIES,
        SPECIAL as SPECIAL,
        DispatchTable as DispatchTable,
        Limits as Limits,
        Named as Named,
        PathTimes as PathTimes,
        Policy as Policy,
        Settings as Settings,
        Solve as Solve,
        add_policy as add_policy,
        cutoff as cutoff,
        default_cutoff_ms as default_cutoff_ms,
        default_threshold as default_threshold,
        named_policy as named_policy,
        optimal as optimal,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
