"""Decisions: what fits within an SLA, when to use which path, how to run a load."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.planning.engine_settings import MEASURED, MIN_CHUNK
    from latfit.planning.fit_quality import FitQuality, trace_name
    from latfit.planning.load.curves import Line, latency_lines, rate_lines
    from latfit.planning.load.strategies import Target
    from latfit.planning.load.uncertainty import promised_by_batches
    from latfit.planning.load.varying import load_of, read_load
    from latfit.planning.plan import make_plan
    from latfit.planning.request import Load, PlanOptions, parse_objective
    from latfit.planning.result import Cutoff, Kind, Plan, Reach, Settings, Threshold, Unknown
    from latfit.planning.serving.apart import PrefillApart
    from latfit.planning.serving.effects import MOST_SLOWER
    from latfit.planning.serving.evaluate import scaled
    from latfit.planning.serving.few import percentile_interval, share_interval
    from latfit.planning.serving.kv_cache import KvCache, count_parameters, kv_cache_of, model_config
    from latfit.planning.serving.plan import ServingRequest, plan_serving
    from latfit.planning.serving.result import (
        ApartPlan,
        Effect,
        PlannedEngines,
        Reached,
        SchedulePlan,
        ServingPlan,
        Stall,
        Stalls,
    )
    from latfit.planning.serving.search import within_measured
    from latfit.planning.serving.targets import USUAL_PERCENT, Goodput, RequestTarget, Targets, parse_target
    from latfit.planning.serving.upgrade import Upgrade, compare_steps
    from latfit.planning.speculation import SpeculationPlan, plan_speculation
    from latfit.planning.steps.budget import StepBudget, step_budget
    from latfit.planning.steps.limits import levels_for
    from latfit.planning.verdict import CONFIRMED
    from latfit.planning.what_if import LEVEL, REPLICATIONS, Fitted, WhatIf
    from latfit.planning.wording import capacity_line

__all__, __getattr__, __dir__ = face(__name__, __file__)
