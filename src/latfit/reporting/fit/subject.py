"""What a report is about: model, machine and device of each path, as far as its fit or its rows name them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latfit.hardware import ExecutionPath
from latfit.reporting.format import counted
from latfit.trace import Trace


@dataclass(frozen=True)
class Subject:
    """Of one path; empty where nothing names it. details: device, number type, threads."""

    path: str
    model: str = ""
    machine: str = ""
    details: str = ""

    @property
    def line(self) -> str:
        """`AMD EPYC, tiny, numpy float32 on 2 threads`."""
        return ", ".join(filter(None, (self.machine, self.model, self.details))) or "machine and model not known"


def subject_of(path: ExecutionPath, rows: Trace | None) -> Subject:
    """What the fit's system, the columns of its rows or the provenance of its trace name, where they agree."""
    if path.nominal is not None:
        return Subject(path.name, details=f"nominal numbers, not measured: {path.nominal.text}")
    facts, system = path.fit.provenance.get("trace", {}), path.fit.data.more.get("system", {})
    origins = [facts, *_mapping(facts, "parts").values()]
    merged = [{**each, **_mapping(each, "paths", path.name)} for each in origins if isinstance(each, Mapping)]
    models = [each.get("model") for each in merged]
    devices = [_mapping(each, "device") for each in merged]
    model = system.get("model") or _column(rows, "model")
    model = model or _agreed(each.get("name") if isinstance(each, Mapping) else each for each in models)
    machine = system.get("hardware") or _column(rows, "hardware")
    machine = machine or _agreed(_mapping(each, "machine").get("cpu") for each in merged)
    measured = f"fit of {counted(path.fit.metrics.n, 'step')}" if path.fit.metrics.n is not None else ""
    details = (_agreed(map(_device, devices)), measured, str(path.fit.data.more.get("time", "")))
    return Subject(path.name, str(model), str(machine), ", ".join(filter(None, details)))


def title_of(subjects: Sequence[Subject]) -> str:
    """The page's title: model and machine where they are known, else the paths."""
    if about := _about(subjects):
        return f"Inference latency of {about}" if any(subject.model for subject in subjects) else f"Latency {about}"
    return f"Step latency on {', '.join(subject.path for subject in subjects)}"


def what_is_known(paths: Iterable[ExecutionPath]) -> str:
    """`tiny on AMD EPYC`; empty where nothing names it."""
    return _about([subject_of(path, None) for path in paths])


def _about(subjects: Sequence[Subject]) -> str:
    models = dict.fromkeys(subject.model for subject in subjects if subject.model)
    machines = dict.fromkeys(subject.machine for subject in subjects if subject.machine)
    return " ".join(filter(None, (", ".join(models), f"on {', '.join(machines)}" if machines else "")))


def _mapping(facts: Any, *names: str) -> Mapping[str, Any]:
    for name in names:
        facts = facts.get(name, {}) if isinstance(facts, Mapping) else {}
    return facts if isinstance(facts, Mapping) else {}


def _device(facts: Mapping[str, Any]) -> str:
    words = [str(facts[name]) for name in ("device", "dtype") if facts.get(name)]
    threads = f" on {counted(facts['threads'], 'thread')}" if isinstance(facts.get("threads"), int) else ""
    return " ".join(words) + threads if words else ""


def _agreed(values: Iterable[Any]) -> str:
    """The one name that is given; empty where two differ."""
    names = {str(each) for each in values if each}
    return names.pop() if len(names) == 1 else ""


def _column(rows: Trace | None, name: str) -> str:
    return "" if rows is None or name not in rows else _agreed(set(rows[name].tolist()))
