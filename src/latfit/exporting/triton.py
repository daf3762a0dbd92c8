"""Triton Inference Server: `config.pbtxt` of each execution path, and the router before them.

Without a delay Triton's dynamic batcher sends all that waits to an idle instance: greedy batching. With a delay it
sends the largest preferred size that waits, and after the delay whatever waits. It cannot move a request from one
model's queue to another's, so a plan with a T_cut gets a router that holds the queue and sends the GPU one batch at a
time.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, TypeVar

from msgspec import Meta

from latfit.errors import WrongUsage
from latfit.exporting.facts import MADE_BY, PlanFacts
from latfit.exporting.files import Exported, Setting, Wanted
from latfit.exporting.render import folder_name, render
from latfit.hardware import CPU_PATHS
from latfit.planning import Alternative, Kind, Plan
from latfit.records import Count, Natural, Record
from latfit.units import format_ms

NOT_SET = (
    "backend, inputs and outputs, which Triton completes from models of TensorRT and ONNX; a Python model names them"
    " itself, for others add them here."
)


class BatchSettings(Record, frozen=True):
    """Settings of an engine that batches whole requests."""

    what: ClassVar[str] = "plan"
    made_by: ClassVar[str] = MADE_BY


class Batcher(BatchSettings, frozen=True):
    """Settings of a model of Triton, by its names."""

    max_batch_size: Count
    max_queue_delay_microseconds: Natural
    preferred_batch_size: Annotated[list[Count], Meta(min_length=1)] | None = None

    def settings(self) -> list[Setting]:
        """Each with its reason; the batch size first, and alone for a model that takes one request at a time."""
        most, delay, sizes = self.max_batch_size, self.max_queue_delay_microseconds, self.preferred_batch_size
        if most == 1:
            return [Setting("max_batch_size", 1, "One request at a time.")]
        found = [Setting("max_batch_size", most, "The largest batch whose step is within the SLA.")]
        if sizes:
            why = (
                f"From {sizes[0]} on a larger batch is not worth waiting for (amortised rule); every size from there"
                " is preferred, as Triton leaves requests beyond the largest preferred size waiting."
            )
            found.append(Setting("preferred_batch_size", sizes, why))
        wait = "Until that batch is there on average." if delay else "Greedy: an idle instance takes all that wait."
        return [*found, Setting("max_queue_delay_microseconds", delay, wait)]


ONE_AT_A_TIME = Batcher(1, 0)


S = TypeVar("S", bound=BatchSettings)


def batch_settings(plan: PlanFacts, engine: str, kind: type[S]) -> tuple[Plan, S]:
    """The plan with its settings of an engine that batches whole requests. Raises WrongUsage if it has none."""
    if plan.batches is None:
        raise WrongUsage(
            f"the plan is of requests with prompts and outputs: it has no batches for {engine}",
            where=plan.file,
            remedy="Plan batches: latfit plan --sla 20ms --rate 500/s --out plan.json; or export to trtllm.",
        )
    if engine not in plan.flags:
        raise WrongUsage("the plan has no batch within its SLA", where=plan.file, remedy="Plan with a longer --sla.")
    return plan.batches, kind.from_json(plan.flags[engine], f"{plan.file}, {engine}")


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    plan, batcher = batch_settings(facts, "triton", Batcher)
    prefix = "" if wanted.model is None else f"{folder_name(wanted.model)}-"
    models = [(f"{prefix}{name}", path, each.settings(), note) for name, path, each, note in _models(facts, batcher)]
    files, values = {}, {}
    for name, path, settings, note in models:
        files[f"{name}/config.pbtxt"] = render(
            "config.pbtxt.jinja",
            facts,
            f"Triton, model {name} on path {path}: {note}",
            [NOT_SET],
            name=name,
            largest=settings[0],
            batcher=settings[1:],
            count=Setting("count", 1, "One step at a time on a path; the plan is for one such path a replica."),
            kind="KIND_CPU" if path in CPU_PATHS else "KIND_GPU",
        )
        values[name.removeprefix(prefix)] = {each.name: each.value for each in settings}
    if plan.chosen is not None and plan.chosen.T_cut_ms is not None:
        files["router.py"] = render(
            "router.py.jinja",
            facts,
            "The router before Triton: T_cut",
            gpu=models[0][0],
            cpu=models[1][0],
            most=models[0][2][0],
            cut=Setting(
                "T_CUT_S", plan.chosen.T_cut_ms / 1e3, "How long a request waits for the GPU before the CPU serves it."
            ),
        )
    return Exported("triton", facts.name, files, values)


def _models(facts: PlanFacts, batcher: Batcher) -> Sequence[tuple[str, str, Batcher, str]]:
    """(folder, execution path, settings, what it is for) of each model; for a T_cut the GPU's, then the CPU's."""
    plan = facts.batches
    assert plan is not None
    chosen = plan.chosen
    if chosen is None:
        return [_model(plan.engines_path, batcher, "the plan is of steps: no rate, so no delay")]
    paths = [folder_name(_path_of(plan, label)) for label in chosen.paths]
    if chosen.T_cut_ms is not None:
        behind = f"behind router.py, which holds the queue; T_cut {format_ms(chosen.T_cut_ms)}"
        found = [
            _model(paths[0], Batcher(batcher.max_batch_size, 0, batcher.preferred_batch_size), behind),
            _model(paths[1], ONE_AT_A_TIME, "one request at a time, those that router.py sends"),
        ]
    elif chosen.kind is Kind.ONE_AT_A_TIME:
        found = [_model(paths[0], ONE_AT_A_TIME, "one request at a time, as in the plan")]
    else:
        found = [_model(paths[0], batcher, f"{chosen.kind.value}, the plan's decision")]
    other = next((each for each in plan.strategies if each.kind is Kind.AMORTISED), None)
    if other is not None and "triton_batched" in plan.engines:
        batched = Batcher.from_json(plan.engines["triton_batched"], f"{facts.file}, triton_batched")
        path = folder_name(_path_of(plan, other.paths[0]))
        note = f"not the plan's decision: {other.name} has {_percentile(other)} where {_percentile(chosen)} was chosen"
        found.append((f"{path}-batched", path, batched, note))
    return found


def _model(path: str, batcher: Batcher, note: str) -> tuple[str, str, Batcher, str]:
    return folder_name(path), path, batcher, note


def _path_of(plan: Plan, label: str) -> str:
    """The name of the path that strategies call by this label."""
    return next((each.path for each in plan.fits if each.path is not None and each.label == label), label)


def _percentile(strategy: Alternative) -> str:
    return "no percentile" if strategy.percentile_ms is None else format_ms(strategy.percentile_ms, 4)
