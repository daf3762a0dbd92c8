"""Simulation of policies on one or two paths and of serving engines."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.simulation.engine.cluster.replicas import (
        Routing as Routing,
        Scaling as Scaling,
        Schedule as Schedule,
        Transfer as Transfer,
        parse_autoscaler as parse_autoscaler,
        serve_replicas as serve_replicas,
    )
    from latfit.simulation.engine.loop import captured as captured
    from latfit.simulation.engine.real_engine import (
        UNLIMITED as UNLIMITED,
        USUAL_SETTINGS as USUAL_SETTINGS,
        EngineSetup as EngineSetup,
        SettingNote as SettingNote,
        known_settings as known_settings,
        set_up_engine as set_up_engine,
    )
    from latfit.simulation.engine.replications import (
        SENT_LEAST as SENT_LEAST,
        Cluster as Cluster,
        EnginePoint as EnginePoint,
        Replications as Replications,
        replicate as replicate,
    )
    from latfit.simulation.engine.result import (
        EngineResult as EngineResult,
        Promise as Promise,
        bound_of as bound_of,
        counted_in as counted_in,
        interval_of as interval_of,
        meets as meets,
    )
    from latfit.simulation.engine.run import EngineRun as EngineRun, serve as serve
    from latfit.simulation.engine.settings import (
        EngineSettings as EngineSettings,
        Order as Order,
        Speculation as Speculation,
    )
    from latfit.simulation.engine.step_cost import (
        StepCosts as StepCosts,
        Work as Work,
        linear_costs as linear_costs,
        scaled_costs as scaled_costs,
        step_costs as step_costs,
        step_ms as step_ms,
    )
    from latfit.simulation.points import (
        MOST_POINTS as MOST_POINTS,
        Running as Running,
        simulate_points as simulate_points,
    )
    from latfit.simulation.policies.replication import (
        FEWEST as FEWEST,
        event_log as event_log,
        measured_run as measured_run,
        serve_arrivals as serve_arrivals,
        write_events as write_events,
    )
    from latfit.simulation.policies.result import (
        SimResult as SimResult,
        measured_result as measured_result,
        p99_difference as p99_difference,
    )
    from latfit.simulation.policies.run import (
        Options as Options,
        Point as Point,
        points_of as points_of,
        simulate as simulate,
        sweep as sweep,
    )
    from latfit.simulation.policies.service import (
        ServicePath as ServicePath,
        Serving as Serving,
        System as System,
        linear_path as linear_path,
        measured_path as measured_path,
        path_times as path_times,
        system_of as system_of,
        table_path as table_path,
    )
    from latfit.simulation.studies import findings as findings, study_points as study_points
    from latfit.simulation.summary import (
        EngineSummary as EngineSummary,
        Interval as Interval,
        Times as Times,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
