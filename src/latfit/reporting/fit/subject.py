"""Model, machine and device of each path, as far as its fit or its rows name them."""

from collections.abc import Iterable, Mapping

from latfit.hardware import ExecutionPath
from latfit.model import fitted_identity
from latfit.trace import Trace, identity_of
from latfit.units import count_text


def what_is_known(paths: Iterable[ExecutionPath], traces: Mapping[str, Trace] = {}) -> str:
    """Return `tiny on AMD EPYC`; empty where nothing names it."""
    facts = [_identity(path, traces.get(path.name)) for path in paths]
    models, machines = (
        ", ".join(dict.fromkeys(each[name] for each in facts if name in each)) for name in ("model", "hardware")
    )
    return " ".join(filter(None, (models, machines and f"on {machines}")))


def describe_path(path: ExecutionPath, rows: Trace | None) -> str:
    """Return `AMD EPYC, tiny, numpy float32 on 2 threads, fit of 732 steps`."""
    if path.nominal is not None:
        return f"nominal numbers, not measured: {path.nominal.text}"
    facts, steps = _identity(path, rows), path.fit.metrics.n
    device = " ".join(facts[name] for name in ("device", "dtype") if name in facts)
    if "threads" in facts:
        device += f" on {facts['threads']} thread{'s' * (facts['threads'] != '1')}"
    measured = "" if steps is None else f"fit of {count_text(int(steps), 'step')}"
    parts = (facts.get("hardware"), facts.get("model"), device, measured, path.fit.data.more.get("time"))
    return ", ".join(str(each) for each in parts if each)


def _identity(path: ExecutionPath, rows: Trace | None) -> dict[str, str]:
    if path.nominal is not None:
        return {}
    return {**fitted_identity(path.fit), **(identity_of(rows) if rows is not None else {})}
