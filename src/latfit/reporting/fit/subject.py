"""What a report is about: model, machine and device of each path, as far as its fit or its rows say them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latfit.hardware import ExecutionPath
from latfit.reporting.format import counted
from latfit.trace import Trace


@dataclass(frozen=True)
class Subject:
    """Of one path; empty where nobody said it. details: device, number type, threads."""

    path: str
    model: str = ""
    machine: str = ""
    details: str = ""

    @property
    def line(self) -> str:
        """`AMD EPYC, tiny, numpy float32 on 2 threads`."""
        return ", ".join(filter(None, (self.machine, self.model, self.details))) or "machine and model not known"


def subject_of(path: ExecutionPath, rows: Trace | None) -> Subject:
    """Nothing is guessed: what the trace's provenance, its columns or the fit's system say, where they agree."""
    if path.nominal is not None:
        return Subject(path.name, details=f"nominal numbers, not measured: {path.nominal.text}")
    origins = list(_origins(path.fit.provenance.get("trace", {}), path.name))
    system = path.fit.data.more.get("system", {})
    model = system.get("model") or _column(rows, "model") or _agreed(_named(origin.get("model")) for origin in origins)
    machine = (
        system.get("hardware")
        or _column(rows, "hardware")
        or _agreed(str(_within(origin, "machine").get("cpu", "")) for origin in origins)
    )
    details = _agreed(_device(_within(origin, "device")) for origin in origins)
    measured = f"fit of {counted(path.fit.metrics.n, 'step')}" if path.fit.metrics.n is not None else ""
    time = str(path.fit.data.more.get("time", ""))
    return Subject(path.name, str(model), str(machine), ", ".join(filter(None, (details, measured, time))))


def title_of(subjects: Sequence[Subject]) -> str:
    """The page's title: model and machine where they are known, else the paths."""
    if about := _about(subjects):
        return f"Inference latency of {about}" if any(subject.model for subject in subjects) else f"Latency {about}"
    return f"Step latency on {', '.join(subject.path for subject in subjects)}"


def what_is_known(paths: Iterable[ExecutionPath]) -> str:
    """`tiny on AMD EPYC`; empty where nobody said it."""
    return _about([subject_of(path, None) for path in paths])


def _about(subjects: Sequence[Subject]) -> str:
    models = dict.fromkeys(subject.model for subject in subjects if subject.model)
    machines = dict.fromkeys(subject.machine for subject in subjects if subject.machine)
    return " ".join(filter(None, (", ".join(models), f"on {', '.join(machines)}" if machines else "")))


def _origins(facts: Mapping[str, Any], path: str) -> Iterator[Mapping[str, Any]]:
    """Of every part of a trace, what belongs to the path before what belongs to all."""
    for origin in (facts, *_within(facts, "parts").values()):
        if isinstance(origin, Mapping):
            yield {**origin, **_within(_within(origin, "paths"), path)}


def _within(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = facts.get(name)
    return found if isinstance(found, Mapping) else {}


def _named(model: Any) -> str:
    return str(model.get("name", "")) if isinstance(model, Mapping) else str(model or "")


def _device(facts: Mapping[str, Any]) -> str:
    words = [str(facts[name]) for name in ("device", "dtype") if facts.get(name)]
    threads = facts.get("threads")
    on = f" on {counted(threads, 'thread')}" if isinstance(threads, int) else ""
    return " ".join(words) + on if words else ""


def _agreed(found: Iterator[str]) -> str:
    """The one thing that is said; nothing where two differ."""
    said = {each for each in found if each}
    return said.pop() if len(said) == 1 else ""


def _column(rows: Trace | None, name: str) -> str:
    return "" if rows is None or name not in rows else _agreed(map(str, set(rows[name].tolist())))
