"""Messages about an answer: one record, and the table of the messages of plans."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from string import Formatter
from typing import Any, NamedTuple

from msgspec import structs

from latfit.records import Record
from latfit.units import format_ms, format_percent


class Severity(StrEnum):
    """How a message affects the answer, the gravest first."""

    UNSUPPORTED = "unsupported"
    """The data do not support the answer."""
    DOUBT = "doubt"
    """The answer is not confirmed."""
    WARNING = "warning"
    """The user may act on it."""
    NOTE = "note"
    """An assumption; no action is needed."""


class Message(Record, frozen=True):
    """A message: its code in the table, what was found, and what to do."""

    code: str
    message: str
    remedy: str
    severity: Severity = Severity.WARNING

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make messages of older files notes if their remedy says so."""
        note = str(document.get("remedy")).startswith(NO_ACTION)
        return {"severity": Severity.NOTE, **document} if note else document

    @property
    def needs_action(self) -> bool:
        return self.severity != Severity.NOTE

    def about(self, subject: str) -> "Message":
        """Return the message with its subject in front."""
        return structs.replace(self, message=f"{subject}: {self.message}")

    @property
    def text(self) -> str:
        """Message and remedy, each with a full stop."""
        return " ".join(f"{part.rstrip('.')}." for part in (self.message, self.remedy) if part)


def note(text: str) -> Message:
    """Return a note that programs need not tell from others."""
    return Message("note", text, "", Severity.NOTE)


NO_ACTION = "No action needed."


class Template(NamedTuple):
    """A row of the table: severity, message and remedy. Values stand in braces, with their unit after the colon."""

    severity: Severity
    message: str
    remedy: str = ""


UNSUPPORTED, DOUBT, WARNING, NOTE = Severity

TABLE: Mapping[str, Template] = {
    "drifted": Template(UNSUPPORTED, "steps on {path} changed by {shift:+percent} while they were measured"),
    "no_limit_follows": Template(
        UNSUPPORTED, "on {path} a constant predicts as well as B and S do, so no limit on them follows"
    ),
    "beyond_measured": Template(UNSUPPORTED, "the largest step on {path} was not measured ({far})"),
    "kept_out": Template(UNSUPPORTED, "{fit}: {why}"),
    "outside_domain": Template(UNSUPPORTED, "{what}.", "{remedy}"),
    "interval_open": Template(
        DOUBT, "The 95 % interval of p{percentile:g} is {low} to {high}, the limit {sla:ms}; {measure}."
    ),
    "tail_not_seen": Template(
        DOUBT,
        "p{percentile:g} is not confirmed: {independent:,.0f} independent {phase} steps{sizes} on {path},"
        " {wanted:,} needed.",
    ),
    "few_pauses": Template(DOUBT, "Not confirmed: {what}."),
    "noise_unknown": Template(DOUBT, "The noise of steps on {path} is not known: fit its trace again."),
    "closed_forms": Template(
        DOUBT,
        "Mean step times leave out noise; without --laws-only the queue is simulated.",
    ),
    "bursts_too_long": Template(DOUBT, "The recorded arrivals are too few to show how long their bursts last."),
    "not_settled": Template(DOUBT, "The load is so near its limit that the simulation was too short to settle."),
    "no_intervals": Template(
        WARNING,
        "{path}: the fit has no intervals, so the plan is for the typical step; half are slower.",
        "Measure more steps and fit them.",
    ),
    "too_few_samples": Template(
        WARNING,
        "{path}: too few independent samples for p{percentile:g} of steps; it is extrapolated from {start}.",
        "Measure at least {wanted:,} distinct (B, S) cells, or plan for a lower --percentile.",
    ),
    "assumed_context": Template(WARNING, "{path}: planned {assumed}.", "--context sets it."),
    "no_host_time": Template(
        WARNING,
        "{path}: the steps are sums of kernels and hold no host time; a vLLM server took 3 % (mixed) to 21 % (decode)"
        " longer from step to step than its steps themselves.",
        "Record a serving engine, or add its host time with `latfit validate --calibrate`.",
    ),
    "no_prefill": Template(
        WARNING,
        "{path}: the fit contains no prefill, so steps with more tokens than requests are extrapolated.",
        "Measure steps with prefill and fit them.",
    ),
    "steps_in_doubt": Template(
        WARNING,
        "The data cannot tell whether steps near the boundary meet {sla:ms}.",
        "Measure these points: {points}.",
    ),
    "long_prompts": Template(
        WARNING,
        "Prompts of up to {longest:,} tokens are computed in chunks; prefill behind more than {measured:,.0f} cached"
        " tokens was not measured.",
        "Measure such steps, or plan with shorter prompts.",
    ),
    "few_requests": Template(
        DOUBT, "{what}.", "Record more than {count:,} requests, or plan at --rate with --lengths FILE."
    ),
    "outside_measured": Template(WARNING, "{what}", "Measure there, or plan for steps that were measured."),
    "slow_steps": Template(
        WARNING,
        "{path}: the slowest 1 % of the measured steps ({slow:,.0f} of {steps:,.0f}, up to {longest}) decide how long"
        " requests wait: they make {share:percent} of the mean square of a step's time. Only the interval allows"
        " for longer stalls than the measured ones.",
        "Find what stalls them, or measure more.",
    ),
    "unclear_pauses": Template(
        WARNING,
        "{path}: {pauses:,.0f} measured pauses (up to {longest:ms}) do not show whether they {open}; the plan takes"
        " what is worse for each step.",
        "Measure more steps, at sizes that differ more.",
    ),
    "above_cliff": Template(
        WARNING,
        "{setting} {value:,} is just above a cliff: {steps} take {longer:percent} longer beyond {size:,}.",
        "--{option} {size} makes more tokens/s{graphs}.",
    ),
    "nominal": Template(NOTE, "{path}: nominal numbers ({numbers}), not measured; without any spread."),
    "period": Template(NOTE, "{path}: step times are periods, with the host's work."),
    "compute": Template(NOTE, "{path}: step times are compute, without the host's work between steps."),
    "cpu_for_amx": Template(NOTE, "No `amx` path in the profile; using `cpu` as the CPU tier."),
    "wide_interval": Template(
        NOTE, "{widest} after {runs} runs: so near its limit the load varies from run to run by more than 10 %."
    ),
    "assumed": Template(NOTE, "{what}"),
}  # messages of plans by code


class _Units(Formatter):
    """Format values with units: `ms`, `percent` of a share, `+percent`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "ms":
            return format_ms(value)
        if format_spec.endswith("percent"):
            return format_percent(100 * value, signed=format_spec.startswith("+"))
        return str(super().format_field(value, format_spec))


def message(code: str, **values: Any) -> Message:
    """Return the message of a code with its values."""
    row = TABLE[code]
    found, remedy = (_Units().format(text, **values) for text in row[1:])
    return Message(code, found, remedy, row.severity)


def views(messages: Iterable[Message]) -> dict[str, Any]:
    """Return the keys of a plan's JSON that hold its messages, by severity."""
    every = list(messages)

    def texts(*severities: Severity) -> list[str]:
        return [each.text for severity in severities for each in every if each.severity == severity]

    return {
        "warnings": [each for each in every if each.severity == WARNING],
        "notes": texts(NOTE),
        "unsupported": texts(UNSUPPORTED),
        "why_in_doubt": texts(UNSUPPORTED, DOUBT),
    }
