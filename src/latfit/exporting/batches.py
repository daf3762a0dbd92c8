"""Engines that batch whole requests: TensorRT's optimisation profile with shapes to warm up, and Triton Inference
Server's `config.pbtxt` of each execution path with the router before them.

Triton's batcher with a delay sends the largest preferred size that waits, and after the delay whatever waits. It cannot
move a request to another model's queue, so a plan with a T_cut gets a router.
"""

from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from msgspec import Meta

from latfit.errors import WrongUsage
from latfit.exporting.facts import MADE_BY, Exported, PlanFacts, Wanted
from latfit.exporting.render import folder_name, render
from latfit.hardware import CPU_PATHS
from latfit.planning import Kind, Plan
from latfit.records import MAX_COUNT, Count, Natural, Record
from latfit.units import format_ms

BATCH, TOKENS = "B", "S"
REMEDY = "Name the inputs, with B where the batch goes: --shape input:Bx3x224x224."
REASONS = {
    "min": "One request.",
    "opt": "The batch from which launching costs little (B2): kernels are chosen for it.",
    "max": "The largest batch whose step is within the SLA.",
}


class BatchSettings(Record, frozen=True):
    what: ClassVar[str] = "plan"
    made_by: ClassVar[str] = MADE_BY


class Batcher(BatchSettings, frozen=True):
    """Settings of a model of Triton, by its names."""

    max_batch_size: Count
    max_queue_delay_microseconds: Natural
    preferred_batch_size: Annotated[list[Count], Meta(min_length=1)] | None = None


ONE_AT_A_TIME = Batcher(1, 0)
S = TypeVar("S", bound=BatchSettings)


def batch_settings(plan: PlanFacts, engine: str, kind: type[S]) -> tuple[Plan, S]:
    """Return the plan and its settings of an engine that batches whole requests. Raises WrongUsage."""
    if plan.batches is None:
        found = f"the plan is of requests with prompts and outputs: it has no batches for {engine}"
        remedy = "Plan batches: latfit plan --sla 20ms --rate 500/s --out plan.json; or export to trtllm."
        raise WrongUsage(found, where=plan.file, remedy=remedy)
    if engine not in plan.flags:
        raise WrongUsage("the plan has no batch within its SLA", where=plan.file, remedy="Plan with a longer --sla.")
    return plan.batches, kind.from_json(plan.flags[engine], f"{plan.file}, {engine}")


def triton(facts: PlanFacts, wanted: Wanted) -> Exported:
    """Return the models of the plan's paths; for a T_cut the GPU's, the CPU's and the router."""
    plan, batcher = batch_settings(facts, "triton", Batcher)
    files: dict[str, str] = {}
    values: dict[str, Any] = {}

    def add(path: str, settings: Batcher, note: str) -> str:
        folder = folder_name(path)
        if folder in values:  # names of paths differ, these folders need not
            folder += f"-{len(values) + 1}"
        name = folder if wanted.model is None else f"{folder_name(wanted.model)}-{folder}"
        files[f"{name}/config.pbtxt"] = render(
            "config.pbtxt.jinja",
            facts,
            f"Triton, model {name} on path {path}: {note}",
            name=name,
            batcher=settings,
            on_cpu=folder_name(path) in CPU_PATHS,
        )
        values[folder] = {key: value for key, value in settings.to_json().items() if value is not None}
        return name

    chosen = plan.chosen
    if chosen is None:
        add(plan.engines_path, batcher, "the plan is of steps: no rate, so no delay")
        return Exported("triton", facts.name, files, values)
    paths = [_path_of(plan, label) for label in chosen.paths]
    router: dict[str, Any] | None = None
    if chosen.T_cut_ms is not None:
        behind = f"behind router.py, which holds the queue; T_cut {format_ms(chosen.T_cut_ms)}"
        greedy = Batcher(batcher.max_batch_size, 0, batcher.preferred_batch_size)
        gpu = add(paths[0], greedy, behind)
        cpu = add(paths[1], ONE_AT_A_TIME, "one request at a time, those that router.py sends")
        router = {"gpu": gpu, "cpu": cpu, "most": batcher.max_batch_size, "cut_s": chosen.T_cut_ms / 1e3}
    elif chosen.kind is Kind.ONE_AT_A_TIME:
        add(paths[0], ONE_AT_A_TIME, "one request at a time, as in the plan")
    else:
        add(paths[0], batcher, f"{chosen.kind.value}, the plan's decision")
    if router is not None:
        files["router.py"] = render("router.py.jinja", facts, "The router before Triton: T_cut", **router)
    return Exported("triton", facts.name, files, values)


def _path_of(plan: Plan, label: str) -> str:
    return next((each.path for each in plan.fits if each.path is not None and each.label == label), label)


class Profile(BatchSettings, frozen=True):
    min_batch: Count
    opt_batch: Count
    max_batch: Count


class Shape(NamedTuple):
    """An input of the model. sizes: numbers, B for the batch and S for the tokens of a request."""

    name: str
    sizes: tuple[str, ...]

    def at(self, batch: int, tokens: int) -> list[int]:
        return [int({BATCH: batch, TOKENS: tokens}.get(each, each)) for each in self.sizes]


def tensorrt(facts: PlanFacts, wanted: Wanted) -> Exported:
    plan, settings = batch_settings(facts, "tensorrt", Profile)
    if not wanted.shapes:
        raise WrongUsage("a profile needs the shapes of the inputs", where="--shape", remedy=REMEDY)
    shapes = [parse_shape(each) for each in wanted.shapes]
    if len({shape.name for shape in shapes}) < len(shapes):
        raise WrongUsage("an input is named twice", where="--shape", remedy=REMEDY)
    profile = {"min": settings.min_batch, "opt": settings.opt_batch, "max": settings.max_batch}
    thresholds = [each.value for each in (plan.B1_idle, plan.B1, plan.B2, plan.knee) if each.value is not None]
    inside = [each for each in thresholds if profile["min"] <= each <= profile["max"]]
    warm_up = sorted({*profile.values(), *inside})
    tokens = plan.tokens_per_request

    def shapes_at(batch: int) -> str:
        """`input:8x3x224x224`; trtexec wants names with marks of its own in quotes."""
        names = [f"'{each.name}'" if set(each.name) & set(":,") else each.name for each in shapes]
        sizes = ["x".join(map(str, each.at(batch, tokens))) for each in shapes]
        return ",".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))

    values = {"profile": profile, "reasons": REASONS, "shapes": shapes, "shapes_at": shapes_at}
    values |= {"tokens": tokens, "warm_up": warm_up}
    command = "Builds a TensorRT engine: ONNX=model.onnx bash trtexec.sh"
    title = "A TensorRT optimisation profile, and the shapes to warm up"
    files = {
        "trtexec.sh": render("trtexec.sh.jinja", facts, command, **values),
        "tensorrt.yaml": render("tensorrt.yaml.jinja", facts, title, **values),
    }
    return Exported("tensorrt", facts.name, files, {**profile, "warm_up": warm_up})


def parse_shape(text: str) -> Shape:
    """Read `input:Bx3x224x224`; the name may hold colons. Raises WrongUsage."""
    name, colon, sizes = text.rpartition(":")
    parts = tuple(sizes.split("x"))
    is_name = colon and name and name.isprintable() and not set(name) & set("'\"` ")
    numbers = [each for each in parts if each not in (BATCH, TOKENS)]
    are_counts = all(each.isascii() and each.isdecimal() and 0 < int(each) <= MAX_COUNT for each in numbers)
    if not is_name or not are_counts or BATCH not in parts:
        raise WrongUsage(f"{text!r} is not the shape of an input", where="--shape", remedy=REMEDY)
    return Shape(name, parts)
