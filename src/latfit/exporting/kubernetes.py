"""Kubernetes: a Deployment of the plan's replicas of vLLM, and a Service, as llm-d's pools select them."""

import re

from latfit.errors import WrongUsage
from latfit.exporting.facts import PlanFacts
from latfit.exporting.files import Exported, Setting, Wanted
from latfit.exporting.reasons import commented, header, loadable_model, parallel
from latfit.exporting.text import comment, flag, folder_name, yaml_text
from latfit.exporting.vllm import vllm_notes, vllm_settings
from latfit.hardware import CPU_PATHS

PORT = 8000
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
    settings = vllm_settings(facts)
    replicas = Setting("replicas", facts.replicas.count, "The fewest replicas that keep the targets in simulation.")
    lines = header(facts, "Replicas of vLLM on Kubernetes: kubectl apply -f vllm-kubernetes.yaml", _notes(facts, model))
    lines += _deployment(facts, folder_name(model), model, settings, replicas)
    lines += ["---", *_service(facts, folder_name(model))]
    values = {"replicas": replicas.value, **{each.name: each.value for each in settings}}
    return Exported("kubernetes", facts.name, {"vllm-kubernetes.yaml": "\n".join([*lines, ""])}, values)


def _notes(facts: PlanFacts, model: str) -> list[str]:
    return [
        *vllm_notes(facts, model),
        "memory, storage for the model, tokens of a hub: what the cluster has is not in the plan.",
    ]


def _deployment(facts: PlanFacts, name: str, model: str, settings: list[Setting], replicas: Setting) -> list[str]:
    image, image_note = _image(facts)
    lines = [
        "apiVersion: apps/v1",
        "kind: Deployment",
        "metadata:",
        f"  name: {yaml_text(f'vllm-{name}')}",
        *_labels(name, "  "),
        "spec:",
        *commented(replicas, facts, "  "),
        f"  replicas: {replicas.value}",
        "  selector:",
        *_labels(name, "    ", "matchLabels"),
        "  template:",
        "    metadata:",
        *_labels(name, "      "),
        "    spec:",
        "      containers:",
        '        - name: "vllm"',
        *comment(image_note, "          "),
        f"          image: {yaml_text(image)}",
        '          command: ["vllm", "serve"]',
        "          args:",
        f"            - {_argument(model)}",
    ]
    for each in settings:
        words = flag(each.name, each.value)
        lines += [*commented(each, facts, "            "), f"            - {_argument('='.join(words))}"]
    lines += ["          ports:", f"            - containerPort: {PORT}", '              name: "http"']
    return [*lines, *PROBE, *_resources(facts)]


def _argument(text: str) -> str:
    """A word of a container's command line, in which Kubernetes would put variables in the place of $(NAME)."""
    return yaml_text(text.replace("$", "$$"))


def _labels(name: str, indent: str, key: str = "labels") -> list[str]:
    """Those of llm-d, by which an InferencePool finds its servers."""
    return [
        f"{indent}{key}:",
        f'{indent}  app.kubernetes.io/name: "vllm"',
        f"{indent}  app.kubernetes.io/instance: {yaml_text(name)}",
        f'{indent}  llm-d.ai/inferenceServing: "true"',
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


def _service(facts: PlanFacts, name: str) -> list[str]:
    assert facts.replicas is not None
    return [
        *comment(
            f"The plan's router is {facts.replicas.route}, request by request. A Service picks a replica at random, and"
            " for a whole connection: put a router that knows requests before it (llm-d's, or a gateway), which finds"
            " the pods by their labels."
        ),
        "apiVersion: v1",
        "kind: Service",
        "metadata:",
        f"  name: {yaml_text(f'vllm-{name}')}",
        *_labels(name, "  "),
        "spec:",
        *_labels(name, "  ", "selector"),
        "  ports:",
        '    - name: "http"',
        f"      port: {PORT}",
        '      targetPort: "http"',
    ]
