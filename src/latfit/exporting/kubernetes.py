"""Kubernetes: a Deployment of the plan's replicas of vLLM, and a Service, as llm-d's pools select them; its schedule of
replicas for KEDA; and, where prefill on replicas of its own keeps the targets, a Deployment of either kind."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from latfit.errors import WrongUsage
from latfit.exporting.facts import SCHEDULED, Pair, PlanFacts
from latfit.exporting.files import Exported, Setting, Wanted
from latfit.exporting.keda import Day, clock_of, day_of, scaled_object, schedule_notes, too_long
from latfit.exporting.reasons import commented, header, loadable_model, parallel
from latfit.exporting.text import comment, flag, folder_name, yaml_text
from latfit.exporting.vllm import vllm_notes, vllm_settings
from latfit.hardware import CPU_PATHS

PORT = 8000
TOGETHER, SCHEDULE, APART = "vllm-kubernetes.yaml", "vllm-schedule.yaml", "vllm-prefill-apart.yaml"
CONNECTOR = "NixlConnector"
VERSION = re.compile(r"\d+(\.\d+)+")
ON_GPU = "vllm/vllm-openai"
PROBE = (
    "          readinessProbe:",
    "            httpGet:",
    '              path: "/health"',
    '              port: "http"',
)


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    if facts.replicas is None:
        raise WrongUsage(
            "the plan has no replicas of a serving engine",
            where=facts.file,
            remedy="Plan requests: latfit plan --rate 40/s --lengths 2000:300 --ttft 500ms --out plan.json.",
        )
    model = loadable_model(facts, wanted.model)
    if model is None:
        raise WrongUsage(
            "the plan does not name the model", where="--model", remedy="Give --model, as vLLM is to load it."
        )
    settings, count, clock = vllm_settings(facts), facts.replicas.count, clock_of(wanted.begins)
    day = _day(facts, wanted)
    if day is not None:
        facts = replace(facts, assumed=[each for each in facts.assumed if each != SCHEDULED])
    name = folder_name(model)
    why = "The fewest replicas that keep the targets in simulation."
    if day is not None:
        why += f" {SCHEDULE} asks for fewer where less comes: leave this line out once it is applied."
    kind = Kind(f"vllm-{name}", name, Setting("replicas", count, why))
    lines = header(facts, f"Replicas of vLLM on Kubernetes: kubectl apply -f {TOGETHER}", _notes(facts, model))
    lines += [*_deployment(facts, kind, model), "---", *_service(kind, _router_note(facts))]
    files = {TOGETHER: "\n".join([*lines, ""])}
    values = {"replicas": count, **{each.name: each.value for each in settings}}
    if day is not None and facts.timetable is not None:
        head = header(facts, f"Its replicas over the day, by KEDA: kubectl apply -f {SCHEDULE}")
        for note in schedule_notes(facts.timetable, day, clock, wanted.begins):
            head += comment(note)
        files[SCHEDULE] = "\n".join([*head, *scaled_object(facts, kind.object, day, clock), ""])
        values |= {"minReplicaCount": day.least, "maxReplicaCount": day.most}
    if facts.pair is not None:
        files[APART] = _apart(facts, facts.pair, model)
        values |= {"prefill_replicas": facts.pair.prefill, "decode_replicas": facts.pair.decode}
    return Exported("kubernetes", facts.name, files, values)


def _day(facts: PlanFacts, wanted: Wanted) -> Day | None:
    """The schedule of a day; None where the plan has none, or one that is the same number all day. Raises WrongUsage
    where a clock time was given for nothing."""
    found = facts.timetable
    if found is None or too_long(found):
        if wanted.begins is not None:
            why = "the plan has no schedule" if found is None else "the plan's schedule is longer than a day"
            raise WrongUsage(
                f"has no effect: {why}",
                where="--begins",
                remedy="Plan with --arrivals of a day and --start-up 2min, or leave it out.",
            )
        return None
    assert facts.replicas is not None
    day = day_of(found, clock_of(wanted.begins), facts.replicas.count)
    return day if day.triggers else None


@dataclass(frozen=True)
class Kind:
    """Replicas that are alike. object: name of the Deployment and the Service; instance: of the label; role: of those
    that do not do both; transfer: their --kv-transfer-config, empty for none."""

    object: str
    instance: str
    replicas: Setting
    role: str = ""
    transfer: str = ""


def _apart(facts: PlanFacts, pair: Pair, model: str) -> str:
    """Replicas that prefill and replicas that decode."""
    assert facts.replicas is not None
    count = facts.replicas.count
    whole = replace(facts, answer=pair.answer, holds=pair.holds, flags={**facts.flags, **pair.flags})
    notes = [*_notes(whole, model), f"how fast {CONNECTOR} is: the plan takes a transfer of {pair.transfer} as given."]
    title = f"Prefill apart, instead of the {count} replicas of {TOGETHER}: kubectl apply -f {APART}"
    lines = header(whole, title, notes)
    name = folder_name(model)
    told = (("prefill", "kv_producer", pair.prefill), ("decode", "kv_consumer", pair.decode))
    for i, (role, side, number) in enumerate(told):
        why = (
            f"The fewest replicas that {role} beside {pair.decode if role == 'prefill' else pair.prefill} of the other."
        )
        transfer = json.dumps({"kv_connector": CONNECTOR, "kv_role": side}, separators=(",", ":"))
        kind = Kind(f"vllm-{name}-{role}", name, Setting("replicas", number, why), role, transfer)
        lines += [*(["---"] if i else []), *_deployment(whole, kind, model)]
        lines += ["---", *_service(kind, _proxy_note(whole) if role == "prefill" else "Where replies come from.")]
    return "\n".join([*lines, ""])


def _notes(facts: PlanFacts, model: str) -> list[str]:
    notes = [
        *vllm_notes(facts, model),
        "memory, storage for the model, tokens of a hub: what the cluster has is not in the plan.",
    ]
    if facts.timetable is not None and too_long(facts.timetable):
        notes.append("the plan's schedule, which is longer than a day: KEDA's cron triggers repeat day by day.")
    return notes


def _deployment(facts: PlanFacts, kind: Kind, model: str) -> list[str]:
    image, image_note = _image(facts)
    lines = [
        "apiVersion: apps/v1",
        "kind: Deployment",
        "metadata:",
        f"  name: {yaml_text(kind.object)}",
        *_labels(kind, "  "),
        "spec:",
        *commented(kind.replicas, facts, "  "),
        f"  replicas: {kind.replicas.value}",
        "  selector:",
        *_labels(kind, "    ", "matchLabels"),
        "  template:",
        "    metadata:",
        *_labels(kind, "      "),
        "    spec:",
        "      containers:",
        '        - name: "vllm"',
        *comment(image_note, "          "),
        f"          image: {yaml_text(image)}",
        '          command: ["vllm", "serve"]',
        "          args:",
        f"            - {_argument(model)}",
    ]
    for each in vllm_settings(facts):
        words = flag(each.name, each.value)
        lines += [*commented(each, facts, "            "), f"            - {_argument('='.join(words))}"]
    lines += _transfer(kind)
    lines += ["          ports:", f"            - containerPort: {PORT}", '              name: "http"']
    return [*lines, *PROBE, *_resources(facts)]


def _transfer(kind: Kind) -> Sequence[str]:
    """How keys and values get from one kind to the other."""
    if not kind.transfer:
        return []
    return [
        *comment(f"{CONNECTOR}: {kind.role} is this replica's part; the image has to hold NIXL.", "            "),
        f"            - {_argument(f'--kv-transfer-config={kind.transfer}')}",
        "          env:",
        *comment("Where the other kind asks for keys and values: vLLM's default is localhost.", "            "),
        '            - name: "VLLM_NIXL_SIDE_CHANNEL_HOST"',
        "              valueFrom:",
        "                fieldRef:",
        '                  fieldPath: "status.podIP"',
    ]


def _argument(text: str) -> str:
    """A word of a container's command line, in which Kubernetes would put variables in the place of $(NAME)."""
    return yaml_text(text.replace("$", "$$"))


def _labels(kind: Kind, indent: str, key: str = "labels") -> list[str]:
    """Those of llm-d, by which an InferencePool finds its servers, and those that prefill."""
    return [
        f"{indent}{key}:",
        f'{indent}  app.kubernetes.io/name: "vllm"',
        f"{indent}  app.kubernetes.io/instance: {yaml_text(kind.instance)}",
        f'{indent}  llm-d.ai/inferenceServing: "true"',
        *([f"{indent}  llm-d.ai/role: {yaml_text(kind.role)}"] if kind.role else []),
    ]


def _image(facts: PlanFacts) -> tuple[str, str]:
    """The image, and what to know of it."""
    if facts.path in CPU_PATHS:
        return "IMAGE", f"The plan is for path {facts.path}: name the image of vLLM that is built for it."
    version = facts.system.get("engine_version", "")
    if facts.system.get("engine") == "vllm" and VERSION.fullmatch(version):
        return f"{ON_GPU}:v{version}", "The version whose steps were recorded: the plan holds for no other for certain."
    return ON_GPU, "The version is not in the plan: name the one whose steps were measured."


def _resources(facts: PlanFacts) -> list[str]:
    if facts.path in CPU_PATHS:
        return []
    count = parallel(facts)
    why = "As many as hold the model together." if count else "Not in the plan; vLLM's default is 1 GPU a replica."
    gpus = Setting("gpus", count or 1, why)
    return [
        "          resources:",
        "            limits:",
        *commented(gpus, facts, "              "),
        f'              nvidia.com/gpu: "{gpus.value}"',
    ]


def _router_note(facts: PlanFacts) -> str:
    assert facts.replicas is not None
    return (
        f"The plan's router is {facts.replicas.route}, request by request. A Service picks a replica at random, and"
        " for a whole connection: put a router that knows requests before it (llm-d's, or a gateway), which finds"
        " the pods by their labels."
    )


def _proxy_note(facts: PlanFacts) -> str:
    assert facts.replicas is not None
    return (
        "A request goes to a replica that prefills, then with what it answers (kv_transfer_params) to one that decodes:"
        " a proxy does that which knows both kinds (llm-d's routing sidecar, or the one among vLLM's examples), not a"
        f" Service. Within a kind the plan's router is {facts.replicas.route}."
    )


def _service(kind: Kind, note: str) -> list[str]:
    return [
        *comment(note),
        "apiVersion: v1",
        "kind: Service",
        "metadata:",
        f"  name: {yaml_text(kind.object)}",
        *_labels(kind, "  "),
        "spec:",
        *_labels(kind, "  ", "selector"),
        "  ports:",
        '    - name: "http"',
        f"      port: {PORT}",
        '      targetPort: "http"',
    ]
