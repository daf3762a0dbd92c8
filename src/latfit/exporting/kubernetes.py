"""Kubernetes: Deployment and Service of the plan's replicas of vLLM, with the labels by which llm-d finds servers; its
schedule of replicas for KEDA; and, if the plan has such a pair, Deployments for prefill and for decode."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from latfit.errors import WrongUsage
from latfit.exporting.engines import REASONS, VLLM, model_of
from latfit.exporting.facts import PlanFacts
from latfit.exporting.files import Exported, Setting, Wanted
from latfit.exporting.keda import DAY_S, Clock, Day, day_of, parse_clock, schedule_remarks
from latfit.exporting.render import folder_name, render
from latfit.hardware import CPU_PATHS
from latfit.planning import SchedulePlan, ServingPlan
from latfit.units import format_ms

TOGETHER, SCHEDULE, APART = "vllm-kubernetes.yaml", "vllm-schedule.yaml", "vllm-prefill-apart.yaml"
CONNECTOR = "NixlConnector"
IMAGE = "vllm/vllm-openai"


@dataclass(frozen=True)
class Group:
    """Replicas that are alike. object: name of Deployment and Service.  role: prefill, decode, or empty for both.
    transfer: value of --kv-transfer-config.  note: on the Service."""

    object: str
    replicas: Setting
    note: str
    role: str = ""
    transfer: str = ""


def export(plan: PlanFacts, wanted: Wanted) -> Exported:
    requests = plan.requests
    if requests is None:
        raise WrongUsage(
            "the plan has no replicas of a serving engine",
            where=plan.file,
            remedy="Plan requests: latfit plan --rate 40/s --lengths 2000:300 --ttft 500ms --out plan.json.",
        )
    model = model_of(plan, wanted.model)
    if model is None:
        raise WrongUsage(
            "the plan does not name the model", where="--model", remedy="Give --model, as vLLM is to load it."
        )
    name, count, clock = f"vllm-{folder_name(model)}", requests.replicas.value or 1, parse_clock(wanted.begins)
    values = {"replicas": count, **{each.name: each.value for each in VLLM.settings_of(plan)}}
    files = {}
    why = "The fewest replicas that meet the targets in simulation."
    schedule = requests.schedule if requests.schedule is not None and requests.schedule.feasible else None
    day = _day(schedule, clock, count, wanted.begins)
    if day is not None and schedule is not None:
        plan = replace(plan, scheduled=True)
        why += f" {SCHEDULE} asks for fewer at lower load: leave this line out once it is applied."
        limits = [
            Setting("minReplicaCount", day.least, "The fewest replicas that any part of the day needs."),
            Setting("maxReplicaCount", day.most, "The most that any part of it needs."),
        ]
        files[SCHEDULE] = render(
            "vllm-schedule.yaml.jinja",
            plan,
            f"Its replicas over the day, by KEDA: kubectl apply -f {SCHEDULE}",
            remarks=schedule_remarks(schedule, day, clock, wanted.begins),
            object=name,
            limits=limits,
            day=day,
            zone=clock.zone,
        )
        values |= {each.name: each.value for each in limits}
    title = f"Replicas of vLLM on Kubernetes: kubectl apply -f {TOGETHER}"
    group = Group(name, Setting("replicas", count, why), _router_note(requests))
    files = {TOGETHER: _deployments(plan, model, title, [group]), **files}
    if (pair := requests.prefill_apart) is not None and pair.feasible and "vllm" in pair.engines:
        fixed, per_token = map(format_ms, pair.transfer_ms)
        speed = f"how fast {CONNECTOR} is: the plan takes a transfer of {fixed} and {per_token} a token as given."
        title = f"Prefill apart, instead of the {count} replicas of {TOGETHER}: kubectl apply -f {APART}"
        groups = [
            _half(name, "prefill", "kv_producer", (pair.prefill_replicas, pair.replicas), _proxy_note(requests)),
            _half(name, "decode", "kv_consumer", (pair.replicas, pair.prefill_replicas), "Where replies come from."),
        ]
        files[APART] = _deployments(replace(plan, pair=pair), model, title, groups, speed)
        values |= {"prefill_replicas": pair.prefill_replicas, "decode_replicas": pair.replicas}
    return Exported("kubernetes", plan.name, files, values)


def _half(name: str, role: str, side: str, counts: tuple[int, int], note: str) -> Group:
    """The replicas of one role. counts: of this role and of the other."""
    why = f"The fewest replicas that {role} beside {counts[1]} of the other."
    transfer = json.dumps({"kv_connector": CONNECTOR, "kv_role": side}, separators=(",", ":"))
    return Group(f"{name}-{role}", Setting("replicas", counts[0], why), note, role, transfer)


def _deployments(plan: PlanFacts, model: str, title: str, groups: Sequence[Group], more: str = "") -> str:
    not_set = [
        *VLLM.not_set(plan, model),
        "memory, storage for the model, tokens of a hub: what the cluster has is not in the plan.",
        *([more] if more else []),
    ]
    schedule = None if plan.requests is None else plan.requests.schedule
    if schedule is not None and schedule.feasible and schedule.span_s > DAY_S:
        not_set.append("the plan's schedule, which is longer than a day: KEDA's cron triggers repeat day by day.")
    why = REASONS["parallel"][0] if plan.gpus else "Not in the plan; vLLM's default is 1 GPU a replica."
    return render(
        "vllm-kubernetes.yaml.jinja",
        plan,
        title,
        not_set,
        groups=groups,
        name=folder_name(model),
        model=model,
        settings=VLLM.settings_of(plan),
        image=_image(plan),
        gpus=None if plan.path in CPU_PATHS else Setting("gpus", plan.gpus or 1, why),
    )


def _image(plan: PlanFacts) -> Setting:
    if plan.path in CPU_PATHS:
        return Setting("image", "IMAGE", f"The plan is for path {plan.path}: name the image of vLLM for it.")
    version = plan.system.get("engine_version", "")
    if plan.system.get("engine") == "vllm" and re.fullmatch(r"\d+(\.\d+)+", version):
        why = "The version whose steps were recorded: another one may have other step times."
        return Setting("image", f"{IMAGE}:v{version}", why)
    return Setting("image", IMAGE, "The version is not in the plan: name the one whose steps were measured.")


def _router_note(plan: ServingPlan) -> str:
    return (
        f"The plan's router is {plan.route}, request by request. A Service picks a replica at random, for a whole"
        " connection: put a router that knows requests before it (llm-d's, or a gateway), which finds the pods by"
        " their labels."
    )


def _proxy_note(plan: ServingPlan) -> str:
    return (
        "A request goes to a replica that prefills, then with the answer's kv_transfer_params to one that decodes: a"
        " proxy that knows both kinds does so (llm-d's routing sidecar, or the one among vLLM's examples), not a"
        f" Service. Within a kind the plan's router is {plan.route}."
    )


def _day(schedule: SchedulePlan | None, clock: Clock, count: int, begins: str | None) -> Day | None:
    """The triggers of a day; None without a schedule, or with one number all day. count: replicas that suffice all the
    time. Raises WrongUsage if `begins` has no effect."""
    if schedule is None or schedule.span_s > DAY_S:
        if begins is not None:
            why = "the plan has no schedule" if schedule is None else "the plan's schedule is longer than a day"
            raise WrongUsage(
                f"has no effect: {why}",
                where="--begins",
                remedy="Plan with --arrivals of a day and --start-up 2min, or leave it out.",
            )
        return None
    found = day_of(schedule, clock, count)
    return found if found.triggers else None
