"""TensorRT: an optimisation profile (smallest, best, largest batch), `trtexec` with it, and the shapes to warm up."""

from dataclasses import dataclass

from latfit.errors import WrongUsage
from latfit.exporting.facts import PlanFacts
from latfit.exporting.files import Exported, Setting, Wanted
from latfit.exporting.reasons import batch_settings, commented, header
from latfit.exporting.text import script, shell, yaml_text

BATCH, TOKENS = "B", "S"
LARGEST = 2**31 - 1
WANTED = "Name the inputs, with B where the batch goes: --shape input:Bx3x224x224"


@dataclass(frozen=True)
class Shape:
    """An input of the model. sizes: numbers, with B for the batch and S for the tokens of a request."""

    name: str
    sizes: tuple[str, ...]

    def at(self, batch: int, tokens: int) -> list[int]:
        known = {BATCH: batch, TOKENS: tokens}
        return [known[each] if each in known else int(each) for each in self.sizes]


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    flags = batch_settings(facts, "tensorrt", "TensorRT")
    if not wanted.shapes:
        raise WrongUsage("a profile needs the shapes of the inputs", where="--shape", remedy=f"{WANTED}.")
    shapes = [parse_shape(each) for each in wanted.shapes]
    if len({shape.name for shape in shapes}) < len(shapes):
        raise WrongUsage("an input is named twice", where="--shape", remedy=f"{WANTED}.")
    low, best, high = flags["min_batch"], flags["opt_batch"], flags["max_batch"]
    batches = sorted({low, best, high, *(each for each in facts.batches_of_note if low <= each <= high)})
    settings = [
        Setting("min", low, "One request."),
        Setting("opt", best, "The batch from which launching costs little (B2): kernels are chosen for it."),
        Setting("max", high, "The largest batch whose step is within the SLA."),
    ]
    files = {"trtexec.sh": _command(facts, shapes, settings), "tensorrt.yaml": _yaml(facts, shapes, settings, batches)}
    return Exported("tensorrt", facts.name, files, {**{each.name: each.value for each in settings}, "warm_up": batches})


def parse_shape(text: str) -> Shape:
    """`input:Bx3x224x224`; the name may hold colons. Raises WrongUsage."""
    name, colon, sizes = text.rpartition(":")
    parts = tuple(sizes.split("x"))
    sound = colon and name and name.isprintable() and not set(name) & set("'\"` ")
    numbers = [each for each in parts if each not in (BATCH, TOKENS)]
    counts = all(each.isascii() and each.isdecimal() and 0 < int(each) <= LARGEST for each in numbers)
    if not sound or not counts or parts.count(BATCH) < 1:
        raise WrongUsage(f"{text!r} is not the shape of an input", where="--shape", remedy=f"{WANTED}.")
    return Shape(name, parts)


def _command(facts: PlanFacts, shapes: list[Shape], settings: list[Setting]) -> str:
    head = header(facts, "Builds a TensorRT engine: ONNX=model.onnx bash trtexec.sh", [_precision()])
    words = (
        [*commented(each, facts, "  "), f"  {shell(f'--{each.name}Shapes={_spelled(facts, shapes, each.value)}')}"]
        for each in settings
    )
    onnx = '--onnx="${ONNX:?Set ONNX to the file of the model.}"'
    return script(head, ("trtexec", onnx, '--saveEngine="${ENGINE:-model.plan}"'), words)


def _precision() -> str:
    return "precision, workspace and timing cache, which the plan does not know: add them behind the script's name."


def _spelled(facts: PlanFacts, shapes: list[Shape], batch: int) -> str:
    """`input:8x3x224x224`, names with marks of its own in quotes as trtexec wants them."""
    tokens = facts.tokens_per_request
    return ",".join(f"{_quoted(shape.name)}:{'x'.join(map(str, shape.at(batch, tokens)))}" for shape in shapes)


def _quoted(name: str) -> str:
    return f"'{name}'" if set(name) & set(":,") else name


def _yaml(facts: PlanFacts, shapes: list[Shape], settings: list[Setting], batches: list[int]) -> str:
    lines = [*header(facts, "A TensorRT optimisation profile, and the shapes to warm up"), "profile:"]
    for each in settings:
        lines += [*commented(each, facts, "  "), f"  {each.name}:", *_shapes(facts, shapes, each.value, "    ")]
    warm = Setting("warm_up", batches, "Run each once before the first request: B1, B2 and the ends of the profile.")
    lines += [*commented(warm, facts), "warm_up:"]
    for batch in batches:
        first, *others = _shapes(facts, shapes, batch, "    ")
        lines += [f"  - {first.strip()}", *others]
    return "\n".join([*lines, ""])


def _shapes(facts: PlanFacts, shapes: list[Shape], batch: int, indent: str) -> list[str]:
    return [f"{indent}{yaml_text(shape.name)}: {shape.at(batch, facts.tokens_per_request)}" for shape in shapes]
