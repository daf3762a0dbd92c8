"""Decisions: what fits within an SLA, when to use which path, how to run a load."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.planning.engine_settings import MEASURED as MEASURED, MIN_CHUNK as MIN_CHUNK
    from latfit.planning.fit_quality import FitQuality as FitQuality, trace_name as trace_name
    from latfit.planning.load.curves import (
        Line as Line,
        latency_lines as latency_lines,
        rate_lines as rate_lines,
    )
    from latfit.planning.load.strategies import Target as Target
    from latfit.planning.load.uncertainty import promised_by_batches as promised_by_batches
    from latfit.planning.load.varying import load_of as load_of, read_load as read_load
    from latfit.planning.plan import make_plan as make_plan
    from latfit.planning.request import (
        Load as Load,
        Objective as Objective,
        PlanOptions as PlanOptions,
        ServingTargets as ServingTargets,
        parse_objective as parse_objective,
    )
    from latfit.planning.result import (
        Cutoff as Cutoff,
        Kind as Kind,
        Plan as Plan,
        Reach as Reach,
        Settings as Settings,
        Threshold as Threshold,
        Unknown as Unknown,
    )
    from latfit.planning.serving.apart import PrefillApart as PrefillApart
    from latfit.planning.serving.effects import MOST_SLOWER as MOST_SLOWER
    from latfit.planning.serving.evaluate import Evaluator as Evaluator, scaled as scaled
    from latfit.planning.serving.few import percentile_interval as percentile_interval, share_interval as share_interval
    from latfit.planning.serving.kv_cache import (
        KvCache as KvCache,
        count_parameters as count_parameters,
        kv_cache_of as kv_cache_of,
        model_config as model_config,
    )
    from latfit.planning.serving.plan import ServingRequest as ServingRequest, plan_serving as plan_serving
    from latfit.planning.serving.result import (
        ApartPlan as ApartPlan,
        Effect as Effect,
        PlannedEngines as PlannedEngines,
        Reached as Reached,
        SchedulePlan as SchedulePlan,
        ServingPlan as ServingPlan,
        Stall as Stall,
        Stalls as Stalls,
    )
    from latfit.planning.serving.search import within_measured as within_measured
    from latfit.planning.serving.stalls import stalls_of as stalls_of
    from latfit.planning.serving.targets import (
        USUAL_PERCENT as USUAL_PERCENT,
        Goodput as Goodput,
        RequestTarget as RequestTarget,
        Targets as Targets,
        parse_target as parse_target,
    )
    from latfit.planning.serving.upgrade import (
        StepChange as StepChange,
        Upgrade as Upgrade,
        compare_steps as compare_steps,
    )
    from latfit.planning.speculation import SpeculationPlan as SpeculationPlan, plan_speculation as plan_speculation
    from latfit.planning.steps.budget import StepBudget as StepBudget, step_budget as step_budget
    from latfit.planning.steps.limits import levels_for as levels_for
    from latfit.planning.verdict import CONFIRMED as CONFIRMED
    from latfit.planning.what_if import (
        LEVEL as LEVEL,
        REPLICATIONS as REPLICATIONS,
        Fitted as Fitted,
        WhatIf as WhatIf,
    )
    from latfit.planning.wording import capacity_line as capacity_line

__all__, __getattr__, __dir__ = face(__name__, __file__)
