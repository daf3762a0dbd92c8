"""Kubernetes: Deployment and Service of vLLM's replicas (labelled for llm-d), KEDA's schedule, prefill and decode."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from zoneinfo import available_timezones

from latfit.engines import BY_KEY
from latfit.errors import WrongUsage
from latfit.exporting.engines import Setting, model_of, settings_of
from latfit.exporting.facts import Exported, PlanFacts, Wanted
from latfit.exporting.render import folder_name, render
from latfit.hardware import CPU_PATHS
from latfit.planning import SchedulePlan

TOGETHER, SCHEDULE, APART = "vllm-kubernetes.yaml", "vllm-schedule.yaml", "vllm-prefill-apart.yaml"
DAY_MINUTES, DAY_S, MINUTE_S = 1440, 86_400.0, 60.0
CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?: ([A-Za-z][\w+/-]*))?")


def export(plan: PlanFacts, wanted: Wanted) -> Exported:
    requests = plan.requests
    if requests is None:
        remedy = "Plan requests: latfit plan --rate 40/s --lengths 2000:300 --ttft 500ms --out plan.json."
        raise WrongUsage("the plan has no replicas of a serving engine", where=plan.file, remedy=remedy)
    model = model_of(plan, wanted.model)
    if model is None:
        remedy = "Give --model, as vLLM is to load it."
        raise WrongUsage("the plan does not name the model", where="--model", remedy=remedy)
    name, count, (begin, zone) = f"vllm-{folder_name(model)}", requests.replicas.value or 1, parse_clock(wanted.begins)
    schedule = requests.schedule if requests.schedule is not None and requests.schedule.feasible else None
    is_longer = schedule is not None and schedule.span_s > DAY_S
    if wanted.begins is not None and (schedule is None or is_longer):
        why = "the plan's schedule is longer than a day" if is_longer else "the plan has no schedule"
        remedy = "Plan with --arrivals of a day and --start-up 2min, or leave it out."
        raise WrongUsage(f"has no effect: {why}", where="--begins", remedy=remedy)
    day = None if schedule is None or is_longer else plan_day(schedule, begin, count)
    is_scheduled = day is not None and bool(day.triggers)
    plan = replace(plan, scheduled=is_scheduled)

    def deployments(
        plan: PlanFacts, title: str, settings: Sequence[Setting], groups: Sequence[tuple[str, int, int]]
    ) -> str:
        version = plan.system.get("engine_version", "")
        is_recorded = plan.system.get("engine") == "vllm" and re.fullmatch(r"\d+(\.\d+)+", version)
        return render(
            "vllm-kubernetes.yaml.jinja",
            plan,
            title,
            engine=BY_KEY["vllm"],
            model=model,
            name=folder_name(model),
            object_name=name,
            settings=settings,
            groups=groups,  # role, or empty for both; replicas of it; replicas of the other role
            on_cpu=plan.path in CPU_PATHS,
            version=version if is_recorded else "",
            is_scheduled=is_scheduled,
            is_longer_than_a_day=is_longer,
        )

    title = f"Replicas of vLLM on Kubernetes: kubectl apply -f {TOGETHER}"
    settings = settings_of("vllm", plan)
    files = {TOGETHER: deployments(plan, title, settings, [("", count, 0)])}
    values: dict[str, Any] = {"replicas": count, **{each.name: each.value for each in settings}}
    if is_scheduled and day is not None:
        files[SCHEDULE] = render(
            "vllm-schedule.yaml.jinja",
            plan,
            f"Its replicas over the day, by KEDA: kubectl apply -f {SCHEDULE}",
            object_name=name,
            schedule=schedule,
            day=day,
            begin=begin,
            zone=zone,
            is_begin_given=wanted.begins is not None,
        )
        values |= {"minReplicaCount": day.least, "maxReplicaCount": day.most}
    if (pair := requests.prefill_apart) is not None and pair.feasible and "vllm" in pair.engines:
        title = f"Prefill apart, instead of the {count} replicas of {TOGETHER}: kubectl apply -f {APART}"
        prefill, decode = pair.prefill_replicas, pair.replicas
        groups = [("prefill", prefill, decode), ("decode", decode, prefill)]
        apart = replace(plan, pair=pair)
        files[APART] = deployments(apart, title, settings_of("vllm", apart), groups)
        values |= {"prefill_replicas": prefill, "decode_replicas": decode}
    return Exported("kubernetes", plan.name, files, values)


def parse_clock(text: str | None) -> tuple[int, str]:
    """Read `06:30 Europe/Berlin` as minutes after midnight and a zone; None is midnight UTC. Raises WrongUsage."""
    match = CLOCK.fullmatch((text if text is not None else "00:00 UTC").strip())
    zone = (match[3] or "UTC") if match else ""
    zones = available_timezones()  # empty on a machine without a list of them
    if match is None or (zones and zone not in zones):
        remedy = "Write hours, minutes and a zone: 06:30 Europe/Berlin."
        raise WrongUsage(f"{text!r} is no time of a day", where="--begins", remedy=remedy)
    return 60 * int(match[1]) + int(match[2]), zone


@dataclass(frozen=True)
class Day:
    least: int
    most: int
    triggers: Sequence[tuple[int, int, int]]  # first minute of the day, last one, maybe of the next day, replicas
    unrecorded: int  # replicas of the time that was not recorded, 0 if all of the day was


def plan_day(schedule: SchedulePlan, begin: int, fixed: int) -> Day:
    """Return the day's triggers for KEDA, whose autoscaler takes the largest.

    begin: minute of the recorded day's begin.  fixed: replicas outside the recording.  Cron counts minutes: a part
    begins at the minute before and ends at the minute after.
    """
    is_whole = schedule.span_s + schedule.window_s >= DAY_S
    starts = [-schedule.start_up_s, *(at for at, _ in schedule.replicas_at[1:])]
    ends = [*starts[1:], DAY_S - schedule.start_up_s if is_whole else schedule.span_s]
    parts = [(at, end, count) for at, end, (_, count) in zip(starts, ends, schedule.replicas_at, strict=True)]
    if not is_whole:
        parts.append((schedule.span_s, DAY_S - schedule.start_up_s, fixed))
    least = min(count for *_, count in parts)
    while any(count > least and end - start >= DAY_S - 2 * MINUTE_S for start, end, count in parts):
        least = min(count for *_, count in parts if count > least)
    triggers = []
    for start, end, count in parts:
        if count > least and end > start:
            first, last = begin + math.floor(start / MINUTE_S), begin + math.ceil(end / MINUTE_S)
            triggers.append((first % DAY_MINUTES, last % DAY_MINUTES, count))
    return Day(least, max(least, *(count for *_, count in parts)), triggers, 0 if is_whole else fixed)
