"""Simulation of policies on one or two paths and of serving engines."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.simulation.engine.loop import captured
    from latfit.simulation.engine.real_engine import (
        UNLIMITED,
        USUAL_SETTINGS,
        EngineSetup,
        SettingNote,
        known_settings,
        set_up_engine,
    )
    from latfit.simulation.engine.replicas import (
        Routing,
        Scaling,
        Schedule,
        Transfer,
        parse_autoscaler,
        serve_replicas,
    )
    from latfit.simulation.engine.replications import SENT_LEAST, Cluster, EnginePoint, Replications, replicate
    from latfit.simulation.engine.result import EngineResult, Promise, bound_of, counted_in, interval_of, meets
    from latfit.simulation.engine.run import EngineRun, serve as serve
    from latfit.simulation.engine.settings import EngineSettings as EngineSettings, Order, Speculation
    from latfit.simulation.engine.step_cost import (
        StepCosts,
        Work,
        linear_costs as linear_costs,
        scaled_costs,
        step_costs,
        step_ms,
    )
    from latfit.simulation.points import MOST_POINTS, Running, simulate_points
    from latfit.simulation.policies.replication import FEWEST, event_log, measured_run, serve_arrivals, write_events
    from latfit.simulation.policies.result import SimResult, measured_result, p99_difference
    from latfit.simulation.policies.run import Options, Point, points_of, simulate, sweep
    from latfit.simulation.policies.service import (
        ServicePath,
        Serving,
        System,
        linear_path,
        measured_path,
        path_times,
        system_of,
        table_path,
    )
    from latfit.simulation.studies import findings, study_points
    from latfit.simulation.summary import EngineSummary, Interval, Times

__all__, __getattr__, __dir__ = face(__name__, __file__)
