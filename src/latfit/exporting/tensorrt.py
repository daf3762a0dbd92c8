"""TensorRT: an optimisation profile (smallest, best, largest batch), `trtexec` with it, and the shapes to warm up."""

from dataclasses import dataclass
from typing import Any

from latfit.errors import WrongUsage
from latfit.exporting.facts import PlanFacts
from latfit.exporting.files import Exported, Setting, Wanted
from latfit.exporting.render import render
from latfit.exporting.triton import BatchSettings, batch_settings
from latfit.planning import Plan
from latfit.records import MAX_COUNT, Count

BATCH, TOKENS = "B", "S"
REMEDY = "Name the inputs, with B where the batch goes: --shape input:Bx3x224x224."
PRECISION = "precision, workspace and timing cache, which the plan does not know: add them behind the script's name."


class Profile(BatchSettings, frozen=True):
    """Batches of an optimisation profile."""

    min_batch: Count
    opt_batch: Count
    max_batch: Count


@dataclass(frozen=True)
class Shape:
    """An input of the model. sizes: numbers, B for the batch and S for the tokens of a request."""

    name: str
    sizes: tuple[str, ...]

    def at(self, batch: int, tokens: int) -> list[int]:
        known = {BATCH: batch, TOKENS: tokens}
        return [known[each] if each in known else int(each) for each in self.sizes]


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    plan, profile = batch_settings(facts, "tensorrt", Profile)
    if not wanted.shapes:
        raise WrongUsage("a profile needs the shapes of the inputs", where="--shape", remedy=REMEDY)
    shapes = [parse_shape(each) for each in wanted.shapes]
    if len({shape.name for shape in shapes}) < len(shapes):
        raise WrongUsage("an input is named twice", where="--shape", remedy=REMEDY)
    low, best, high = profile.min_batch, profile.opt_batch, profile.max_batch
    batches = sorted({low, best, high, *(each for each in _batches_of_note(plan) if low <= each <= high)})
    settings = [
        Setting("min", low, "One request."),
        Setting("opt", best, "The batch from which launching costs little (B2): kernels are chosen for it."),
        Setting("max", high, "The largest batch whose step is within the SLA."),
    ]

    def shapes_at(batch: int) -> str:
        """`input:8x3x224x224`; trtexec wants names with marks of its own in quotes."""
        names = [f"'{each.name}'" if set(each.name) & set(":,") else each.name for each in shapes]
        sizes = ["x".join(map(str, each.at(batch, plan.tokens_per_request))) for each in shapes]
        return ",".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))

    warm_up = Setting("warm_up", batches, "Run each once before the first request: B1, B2 and the ends of the profile.")
    title = "A TensorRT optimisation profile, and the shapes to warm up"
    command = "Builds a TensorRT engine: ONNX=model.onnx bash trtexec.sh"
    yaml: dict[str, Any] = {
        "settings": settings,
        "shapes": shapes,
        "warm_up": warm_up,
        "tokens": plan.tokens_per_request,
    }
    files = {
        "trtexec.sh": render("trtexec.sh.jinja", facts, command, [PRECISION], settings=settings, shapes_at=shapes_at),
        "tensorrt.yaml": render("tensorrt.yaml.jinja", facts, title, **yaml),
    }
    return Exported("tensorrt", facts.name, files, {**{each.name: each.value for each in settings}, "warm_up": batches})


def _batches_of_note(plan: Plan) -> list[int]:
    """B1, B2 and the knee."""
    found = (plan.B1_idle, plan.B1, plan.B2, plan.knee)
    return [each.value for each in found if each.value is not None]


def parse_shape(text: str) -> Shape:
    """Read `input:Bx3x224x224`; the name may hold colons. Raises WrongUsage."""
    name, colon, sizes = text.rpartition(":")
    parts = tuple(sizes.split("x"))
    sound = colon and name and name.isprintable() and not set(name) & set("'\"` ")
    numbers = [each for each in parts if each not in (BATCH, TOKENS)]
    counts = all(each.isascii() and each.isdecimal() and 0 < int(each) <= MAX_COUNT for each in numbers)
    if not sound or not counts or BATCH not in parts:
        raise WrongUsage(f"{text!r} is not the shape of an input", where="--shape", remedy=REMEDY)
    return Shape(name, parts)
