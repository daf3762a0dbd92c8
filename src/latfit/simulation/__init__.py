"""Simulation of policies on one or two paths, of serving engines, and studies made with them."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.simulation.engine.replicas import (
        Routing as Routing,
        Transfer as Transfer,
        serve_apart as serve_apart,
        serve_replicas as serve_replicas,
    )
    from latfit.simulation.engine.result import Promise as Promise, summary as summary
    from latfit.simulation.engine.run import EngineRun as EngineRun, serve as serve
    from latfit.simulation.engine.settings import (
        EngineSettings as EngineSettings,
        Order as Order,
        Speculation as Speculation,
    )
    from latfit.simulation.engine.step_cost import (
        StepCosts as StepCosts,
        calibrated as calibrated,
        linear_costs as linear_costs,
        step_costs as step_costs,
    )
    from latfit.simulation.policies.estimate import STEADY as STEADY, length_of as length_of, reach_in as reach_in
    from latfit.simulation.policies.result import event_log as event_log
    from latfit.simulation.policies.run import (
        Checked as Checked,
        Options as Options,
        check as check,
        kind_of as kind_of,
    )
    from latfit.simulation.policies.service import (
        ServicePath as ServicePath,
        Serving as Serving,
        System as System,
        linear_path as linear_path,
        quoted_path as quoted_path,
        system_of as system_of,
        table_path as table_path,
    )
    from latfit.simulation.policies.sweep import (
        Grid as Grid,
        Point as Point,
        Running as Running,
        documents as documents,
        points_of as points_of,
        sweep as sweep,
    )
    from latfit.simulation.studies import (
        findings as findings,
        policy_points as policy_points,
        serving_study as serving_study,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
