"""Whether a new measurement of an execution path may replace the one in a profile.

Nominal numbers never replace a measurement, nor does a measurement of another system (hardware, model, number type,
engine), unless forced. A new measurement of the same system replaces the old one. Unknown facts hinder nothing.
"""

from typing import TYPE_CHECKING

from latfit.files import dumps
from latfit.messages import Message as LatfitWarning
from latfit.model import fitted_identity
from latfit.trace import Fact, facts_beside
from latfit.units import format_percent

if TYPE_CHECKING:
    from latfit.hardware.profile import ExecutionPath

DECIDING = ("hardware", "model", "tp", "dtype", "quantization", "device", "engine")
"""Facts that tell systems apart; versions, threads and instruction sets change on one machine."""
FORCE = "Enter it under another name (latfit hardware add NAME FIT), or replace it with --force."


def refusal(old: "ExecutionPath", new: "ExecutionPath") -> LatfitWarning | None:
    """Why `new` must not replace `old` unless that is forced; None where it may."""
    if old.nominal:
        return None
    if new.nominal:
        why = f"Path {old.name} holds {_told(old)}; nominal numbers do not replace it."
        return LatfitWarning("measured", why, FORCE)
    if not (apart := differing(old, new)):
        return None
    facts = ", ".join(f"{fact.name} {fact.fitted}, not {fact.found}" for fact in apart)
    return LatfitWarning("another_system", f"Path {old.name} holds {_told(old)} of another system: {facts}.", FORCE)


def replacement(old: "ExecutionPath", new: "ExecutionPath") -> str:
    """What is replaced, in a sentence; empty where nothing is, because both say the same."""
    held, given = (each.nominal.text if each.nominal else dumps(each.fit.to_json()) for each in (old, new))
    return "" if held == given else f"Path {old.name}: replaces {_told(old)}."


def differing(old: "ExecutionPath", new: "ExecutionPath") -> list[Fact]:
    """Facts in which two measured systems differ."""
    if old.nominal or new.nominal:
        return []
    facts = facts_beside(fitted_identity(old.fit), fitted_identity(new.fit))
    return [fact for fact in facts if fact.name in DECIDING and fact.agreement == "differs"]


def _told(path: "ExecutionPath") -> str:
    """`the measurement of 2026-11-01 (saturation, 6 % error)`, `the nominal numbers p50=2ms`."""
    if path.nominal:
        return f"the nominal numbers {path.nominal.text}"
    fit = path.fit
    origin = fit.provenance.get("trace", {})
    when = str(origin.get("started") or fit.provenance.get("created") or "").partition("T")[0]
    error = fit.cross_validation.mape_pct or fit.metrics.mape_pct
    about = fit.name if error is None else f"{fit.name}, {format_percent(error)} error"
    return f"the measurement of {when} ({about})" if when else f"the measurement ({about})"
