"""Triton Inference Server: a model repository's `config.pbtxt` for each execution path, and the router before them.

Triton's dynamic batcher looks at its queue when an instance is idle (and while it is busy, at each arrival): without a
delay it sends all that waits, which is the greedy batching that a plan is made for; with one it sends the largest
preferred size that is there, and after the delay whatever waits. It cannot take a request from one model's queue to
another's: where a plan lets requests wait for the GPU up to T_cut and serves them by the CPU then, a router outside
holds the queue, sends the GPU one batch at a time, and Triton adds no delay.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from latfit.exporting.facts import PlanFacts, Way
from latfit.exporting.files import Exported, Setting, Wanted
from latfit.exporting.reasons import batch_settings, commented, header
from latfit.exporting.text import folder_name, proto_text
from latfit.hardware import CPU_PATHS
from latfit.units import format_ms

LEFT = (
    "backend, inputs and outputs, which Triton completes from models of TensorRT and ONNX; a Python model names them"
    " itself, for others add them here."
)
ONE = {"max_batch_size": 1}
A_LINE = 16
"""Numbers on a line of a list."""


def export(facts: PlanFacts, wanted: Wanted) -> Exported:
    models = _models(facts, batch_settings(facts, "triton", "Triton"))
    prefix = "" if wanted.model is None else f"{folder_name(wanted.model)}-"
    files = {
        f"{prefix}{name}/config.pbtxt": _config(facts, f"{prefix}{name}", path, settings, note)
        for name, (path, settings, note) in models.items()
    }
    if facts.chosen is not None and facts.chosen.T_cut_ms is not None:
        files["router.py"] = _router(facts, facts.chosen, prefix, models)
    values = {name: {each.name: each.value for each in settings} for name, (_, settings, _) in models.items()}
    return Exported("triton", facts.name, files, values)


_Model = tuple[str, Sequence[Setting], str]
"""Execution path, settings, and what the model is for."""


def _models(facts: PlanFacts, flags: Mapping[str, Any]) -> dict[str, _Model]:
    """By the name of their folders."""
    chosen = facts.chosen
    if chosen is None:
        return {
            folder_name(facts.path): (
                facts.path,
                _settings(flags, facts),
                "the plan is of steps: no rate, so no delay",
            )
        }
    names = [_folder(facts, label) for label in chosen.paths]
    found: dict[str, _Model] = {}
    if chosen.T_cut_ms is not None:
        limit = f"behind router.py, which holds the queue; T_cut {format_ms(chosen.T_cut_ms)}"
        found[names[0]] = (names[0], _settings({**flags, "max_queue_delay_microseconds": 0}, facts), limit)
        found[names[1]] = (names[1], _settings(ONE, facts), "one request at a time, those that router.py sends")
    elif chosen.kind == "one at a time":
        found[names[0]] = (names[0], _settings(ONE, facts), "one request at a time, as in the plan")
    else:
        found[names[0]] = (names[0], _settings(flags, facts), f"{chosen.kind}, the plan's decision")
    batched = facts.flags.get("triton_batched")
    way = next((each for each in facts.ways if each.kind == "amortised batches"), None)
    if batched is not None and way is not None:
        name = _folder(facts, way.paths[0])
        note = f"not the plan's decision: {way.name} has {_percentile(way)} where {_percentile(chosen)} was chosen"
        found[f"{name}-batched"] = (name, _settings(batched, facts), note)
    return found


def _folder(facts: PlanFacts, label: str) -> str:
    """The name of a path as a folder's."""
    return folder_name(facts.names.get(label, label))


def _percentile(way: Way) -> str:
    return "no percentile" if way.percentile_ms is None else format_ms(way.percentile_ms, 4)


def _settings(flags: Mapping[str, Any], facts: PlanFacts) -> list[Setting]:
    most = flags["max_batch_size"]
    reason = "The largest batch whose step is within the SLA."
    found = [Setting("max_batch_size", most, reason if most > 1 else "One request at a time.")]
    if most == 1:
        return found
    delay, sizes = flags["max_queue_delay_microseconds"], flags.get("preferred_batch_size", [])
    if sizes:
        found.append(
            Setting(
                "preferred_batch_size",
                sizes,
                f"From {sizes[0]} on a batch is not worth waiting for more (amortised rule); every size from there is"
                " preferred, since Triton leaves waiting what is beyond the largest preferred size that is there.",
            )
        )
    wait = "Greedy: an idle instance takes all that wait." if not delay else "Until that batch is there on average."
    return [*found, Setting("max_queue_delay_microseconds", delay, wait)]


def _config(facts: PlanFacts, name: str, path: str, settings: Sequence[Setting], note: str) -> str:
    top, *batcher = settings
    lines = header(facts, f"Triton, model {name} on path {path}: {note}", [LEFT])
    lines += [f"name: {proto_text(name)}", *commented(top, facts), f"max_batch_size: {top.value}"]
    if batcher:
        lines.append("dynamic_batching {")
        for each in batcher:
            lines += [*commented(each, facts, "  "), *_lines(each)]
        lines.append("}")
    kind = "KIND_CPU" if path in CPU_PATHS else "KIND_GPU"
    one = Setting("count", 1, "One step at a time on a path; the plan is for one such path a replica.")
    lines += [
        "instance_group [",
        "  {",
        *commented(one, facts, "    "),
        "    count: 1",
        f"    kind: {kind}",
        "  }",
        "]",
    ]
    return "\n".join([*lines, ""])


def _lines(setting: Setting) -> list[str]:
    if not isinstance(setting.value, list):
        return [f"  {setting.name}: {setting.value}"]
    rows = [setting.value[i : i + A_LINE] for i in range(0, len(setting.value), A_LINE)]
    body = ",\n    ".join(", ".join(map(str, row)) for row in rows)
    return [f"  {setting.name}: [", f"    {body}", "  ]"]


def _router(facts: PlanFacts, chosen: Way, prefix: str, models: Mapping[str, _Model]) -> str:
    """A program that holds the queue before two models."""
    assert chosen.T_cut_ms is not None
    gpu, cpu = (_folder(facts, label) for label in chosen.paths)
    most = next(each for each in models[gpu][1] if each.name == "max_batch_size")
    cut = Setting("T_CUT_S", chosen.T_cut_ms / 1e3, "How long a request waits for the GPU before the CPU serves it.")
    environment = Environment(
        loader=PackageLoader("latfit.exporting"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template("router.py.jinja").render(
        header="\n".join(header(facts, "The router before Triton: T_cut")),
        gpu=repr(f"{prefix}{gpu}"),
        cpu=repr(f"{prefix}{cpu}"),
        most="\n".join([*commented(most, facts), f"MAX_BATCH = {most.value}"]),
        cut="\n".join([*commented(cut, facts), f"T_CUT_S = {cut.value!r}"]),
    )
