"""TensorRT: an optimisation profile, `trtexec` with it, and the shapes to warm up."""

from typing import NamedTuple

from latfit.errors import WrongUsage
from latfit.exporting.facts import Exported, PlanFacts, Wanted
from latfit.exporting.render import render
from latfit.exporting.triton import BatchSettings, batch_settings
from latfit.records import MAX_COUNT, Count

BATCH, TOKENS = "B", "S"
REMEDY = "Name the inputs, with B where the batch goes: --shape input:Bx3x224x224."
REASONS = {
    "min": "One request.",
    "opt": "The batch from which launching costs little (B2): kernels are chosen for it.",
    "max": "The largest batch whose step is within the SLA.",
}


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


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
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
