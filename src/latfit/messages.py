"""Messages about an answer: one record, and one table."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from string import Formatter
from typing import Any

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
    """What was found, and what to do."""

    code: str
    message: str
    remedy: str
    severity: Severity = Severity.WARNING

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message of an older file with today's code."""
        found = {**document, "code": OLD_CODES.get(str(document.get("code")), document.get("code"))}
        note = str(document.get("remedy")).startswith(NO_ACTION)
        return {"severity": Severity.NOTE, **found} if note else found

    @property
    def needs_action(self) -> bool:
        return self.severity != Severity.NOTE

    def about(self, subject: str) -> "Message":
        return structs.replace(self, message=f"{subject}: {self.message}")

    @property
    def text(self) -> str:
        return " ".join(f"{part.rstrip('.')}." for part in (self.message, self.remedy) if part)


def note(text: str) -> Message:
    return Message("note", text, "", Severity.NOTE)


NO_ACTION = "No action needed."
OLD_CODES = {"decode_only": "no_prefill", "impossible_steps": "outliers", "slow_steps": "outliers"}

SEVERITIES: Mapping[str, Severity] = {
    "unsupported": Severity.UNSUPPORTED,
    "not_confirmed": Severity.DOUBT,
    "note": Severity.NOTE,
}
"""Severities by code; of all others WARNING."""

QUIETER = "Run latfit on a machine that is less busy."
LONGER = "Record for longer, while the load changes."
FORCE = "Enter it under another name (latfit hardware add NAME FIT), or replace it with --force."

TABLE: Mapping[str, Sequence[str]] = {
    # The data do not support the answer.
    "drifted": ("unsupported", "steps on {path} changed by {shift:+percent} while they were measured"),
    "no_limit_follows": (
        "unsupported",
        "on {path} a constant predicts as well as B and S do, so no limit on them follows",
    ),
    "beyond_measured": ("unsupported", "the largest step on {path} was not measured ({far})"),
    "kept_out": ("unsupported", "{fit}: {why}"),
    "outside_domain": ("unsupported", "{what}.", "{remedy}"),
    # The answer is not confirmed.
    "interval_open": (
        "not_confirmed",
        "The 95 % interval of p{percentile:g} is {low} to {high}, the limit {sla:ms}; {measure}.",
    ),
    "tail_not_seen": (
        "not_confirmed",
        "p{percentile:g} is not confirmed: {independent:,.0f} independent {phase} steps{sizes} on {path},"
        " {wanted:,} needed.",
    ),
    "few_pauses": ("not_confirmed", "Not confirmed: {what}."),
    "noise_unknown": ("not_confirmed", "The noise of steps on {path} is not known: fit its trace again."),
    "closed_forms": ("not_confirmed", "Mean step times leave out noise; without --laws-only the queue is simulated."),
    "bursts_too_long": ("not_confirmed", "The recorded arrivals are too few to show how long their bursts last."),
    "not_settled": ("not_confirmed", "The load is so near its limit that the simulation was too short to settle."),
    "few_requests": (
        "not_confirmed",
        "{what}.",
        "Record more than {count:,} requests, or plan at --rate with --lengths FILE.",
    ),
    "not_as_planned": ("not_confirmed", "Longer than planned: {names}", "Allow another restart: --max-restarts 3."),
    # The fit and its model.
    "failed": ("failed", "{found}", "{remedy}"),
    "at_bound": (
        "check_model",
        "{name} ends on the bound {end:g} that it was given.",
        "Widen --set bounds, or leave it out.",
    ),
    "no_context": (
        "check_model",
        "Step costs do not depend on context length, which can dominate decode steps",
        "Fit --model context or roofline to a trace with a context_tokens column.",
    ),
    "context_left_out": (
        "check_model",
        "Step costs do not depend on context length, which can dominate decode steps",
        "The trace has it, the model {model} leaves it out; --model roofline takes it in.",
    ),
    "one_fit": (
        "check_model",
        "One fit covers decode and prefill steps, whose cost per cached token differs",
        "Give the trace instead of the fit, or fit them separately and give the second as --prefill-fit.",
    ),
    "model_replaced": ("check_model", "{why} A model of type {model} was fitted.", "{remedy}"),
    "not_converged": ("check_model", "{why}", "{remedy}"),
    "line_as_good": (
        "line_as_good",
        "The linear baseline predicts held-out steps {how} ({line} vs {error}).",
        "Use --model linear.",
    ),
    "no_better_than_constant": (
        "no_better_than_constant",
        "A constant predicts held-out steps as well as any model ({constant} off): B and S explain nothing.",
        "Check which columns are B, S and T_ms (--map), and what else decides the latency of these steps.",
    ),
    "noise_floor": (
        "noise_floor",
        "Noise is the limit: steps that agree in all that is known differ by {floor}, so no model can do better than"
        " {floor} on these steps (this one: {error}).",
        "Measure on a quieter machine, or longer steps; more repeats narrow the intervals, not the error.",
    ),
    "large_error": ("large_error", "The cross-validated MAPE is {error}.", "{why}"),
    "not_entered": (
        "large_error",
        "The cross-validated MAPE of {model} is {error}, {why}.",
        "{remedy}, or enter it all the same with --force.",
    ),
    "pooled_systems": (
        "pooled_systems",
        "These rows are of several systems: {column} ({count} values, {first} to {last}) explains {explained:.0f} % of"
        " the differences between steps of equal B and S, up to {ratio:.2g} times.",
        "Fit each by itself: --map path={column}.",
    ),
    "from_catalog": ("from_catalog", "{what}", "Measure your engine: latfit record."),
    # The measured steps.
    "drift": (
        "drift",
        "{sentence}",
        "Find what changed then (clocks, heat, other load, cached context) and measure again, or fit the rows of one"
        " side; the intervals are those of runs that drift in the same way.",
    ),
    "no_interval": ("no_interval", "No 90 % interval for {phases}.", "{remedy}"),
    "no_interval_at_all": (
        "no_interval",
        "Predictions have no intervals: too few different steps to leave some out.",
        "Measure at least four different (B, S) cells.",
    ),
    "no_intervals": (
        "no_interval",
        "{path}: the fit has no intervals, so the plan is for the typical step; half are slower.",
        "Measure more steps and fit them.",
    ),
    "decode_only": (
        "no_prefill",
        "The trace contains decode steps only, so prefill is not identifiable.",
        "Measure steps with prefill (S > B) before predicting such steps.",
    ),
    "no_prefill": (
        "no_prefill",
        "{path}: the fit contains no prefill, so steps with more tokens than requests are extrapolated.",
        "Measure steps with prefill and fit them.",
    ),
    "no_prefill_fit": (
        "no_prefill",
        "The fit has no data on steps with prefill, so TTFT is a lower bound",
        "Fit steps with prefill too, or give a separate fit of them as --prefill-fit.",
    ),
    "no_host_time": (
        "no_host_time",
        "{path}: the steps are sums of kernels and hold no host time; a vLLM server took 3 % (mixed) to 21 % (decode)"
        " longer from step to step than its steps themselves.",
        "Record a serving engine, or add its host time with `latfit validate --calibrate`.",
    ),
    "kernels_only": (
        "no_host_time",
        "The steps are sums of kernels and hold no host time, so every figure is a lower bound",
        "Fit steps of a recorded engine, or add its host time with --calibrate.",
    ),
    "window_means": ("window_means", "{what}", "{remedy}"),
    "impossible_steps": (
        "outliers",
        "{steps} far from similar steps: {which}.",
        "Left out of the fit. Check how they were recorded (unit, clock, counters), or measure again.",
    ),
    "slow_steps": (
        "outliers",
        "{steps} far slower than similar steps: {which}.",
        "They count in the tail: where they should not, measure again, or leave them out with --drop outlier.",
    ),
    "stalls": (
        "outliers",
        "{path}: the slowest 1 % of the measured steps ({slow:,.0f} of {steps:,.0f}, up to {longest}) decide how long"
        " requests wait: they make {share:percent} of the mean square of a step's time. Only the interval allows"
        " for longer stalls than the measured ones.",
        "Find what stalls them, or measure more.",
    ),
    "unclear_pauses": (
        "outliers",
        "{path}: {pauses} (up to {longest:ms}), too few to show what pauses depend on; the plan assumes the worst.",
        "Measure more steps, at sizes that differ more.",
    ),
    "left_out": ("outliers", "{what}", "Correct these rows, or leave them out."),
    "too_few_samples": (
        "few_data",
        "{path}: too few independent samples for p{percentile:g} of steps; it is extrapolated from {start}.",
        "Measure at least {wanted:,} distinct (B, S) cells, or plan for a lower --percentile.",
    ),
    "steps_in_doubt": (
        "few_data",
        "The data do not show whether steps near the boundary meet {sla:ms}.",
        "Measure these points: {points}.",
    ),
    "too_few_repeats": (
        "few_data",
        "In {missed} of {measured} cells the median is not known within ±{precision:.3g} %.",
        "Measure longer (about --budget {budget_s}s on a machine this steady), or accept a wider --precision.",
    ),
    "not_measured": (
        "few_data",
        "{missing} of {cells} cells were not measured, up to {largest}.",
        "Give more than {budget} (--budget), or ask for fewer cells (--grid).",
    ),
    "few_windows": ("few_data", "{windows} of work: few to fit", LONGER),
    "one_load": ("few_data", "All windows are of one load, so the fit is of that load alone", LONGER),
    # The machine, and the engine that was measured.
    "unstable_timing": ("busy_machine", "Timing is unstable: {symptoms}.", "{remedy}"),
    "other_load": (
        "busy_machine",
        "Other programs kept {others:.1f} CPUs busy on average, and {spare:.0f} were left to them.",
        "Stop them and measure again, or leave them a core with --threads.",
    ),
    "busy_cpus": (
        "busy_machine",
        "Others keep CPUs busy, so {threads} of {most} threads were used.",
        "Stop them and measure again, or say how many you want with --threads.",
    ),
    "throttled": (
        "busy_machine",
        "The {what} was throttled during the run, for power or heat.",
        "Cool it better, or measure with fewer --threads; in use under such load, these times are the honest ones.",
    ),
    "late_client": ("busy_machine", "{run}: the client sent requests up to {late:ms} late", QUIETER),
    "others_busy": ("busy_machine", "{run}: other programs used {share:percent} of the CPUs", QUIETER),
    "device_failed": ("device_failed", "{found}; the run ended there.", "{remedy}"),
    "unanswered": ("incomplete", "{unanswered:,} of {polls:,} readings were not answered", "Ask less often (--every)."),
    "slow_answers": (
        "incomplete",
        "The server took up to {slowest:ms} to answer, which blurs the ends of windows",
        "Ask less often: --every 10s.",
    ),
    "restarted": (
        "incomplete",
        "The server started again {times}; windows across it are left out",
        "The texts of /metrics are those of its last run.",
    ),
    "preempted": (
        "incomplete",
        "Left out: {windows} in which requests were preempted",
        "Give more KV cache, or record single steps.",
    ),
    "failed_requests": (
        "incomplete",
        "{run}: {failed:,} of {requests:,} requests failed",
        "The engine's log says why.",
    ),
    "other_start": (
        "other_run",
        "The steps are of the engine that was started at {steps}, the run of the one started at {run}",
        "Record and measure in one start: after another one, or next to other work, steps take another time.",
    ),
    "other_time": (
        "other_run",
        "The run began at {run}, {minutes:,.0f} min away from the steps",
        "Record while the run is measured; give --metrics-after where both are of one start of the engine.",
    ),
    "other_requests": (
        "other_run",
        "The server counted {counted:,} finished requests, the run has {requests:,}",
        "Save /metrics right before and after the run, with nothing else on the server.",
    ),
    "measured": ("other_run", "Path {path} holds {origin}; nominal numbers do not replace it.", FORCE),
    "another_system": ("other_run", "Path {path} holds {origin} of another system: {facts}.", FORCE),
    # What the answer assumes, and the engine's settings.
    "assumed_context": ("assumed", "{path}: planned {assumed}.", "--context sets it."),
    "engine_setup": ("assumed", "{what}", "{option}"),
    "not_a_measurement": (
        "assumed",
        "Nominal numbers ({numbers}), not measured: they have no error and no interval.",
        "Measure with `latfit profile` on that machine, then `latfit fit`.",
    ),
    "long_prompts": (
        "outside_measured",
        "Prompts of up to {longest:,} tokens are computed in chunks; {chunks} were not measured.",
        "Measure such steps, or plan with shorter prompts.",
    ),
    "outside_measured": ("outside_measured", "{what}", "Measure there, or plan for steps that were measured."),
    "far_rows": (
        "outside_measured",
        "The fit includes rows of up to {context:,.0f} cached tokens, beyond the cache's {cache:,}",
        "Fit with --where 'context_tokens <= {cache}': rows that the engine never reaches bias the fit.",
    ),
    "simulated_outside": (
        "outside_measured",
        "Simulated steps lie outside the measured range: {beyond}",
        "Measure such steps, or lower max_num_seqs and max_num_batched_tokens to what the engine had.",
    ),
    "far_context": (
        "outside_measured",
        "The simulated {steps} with {cached:,.0f} cached tokens each lie outside the measured range",
        "Measure such steps.",
    ),
    "two_states": (
        "engine_setting",
        "Two states at one load: {fast}, but after a burst {slow}, in a simulation for good. From {rate} on.",
        "--set max_num_seqs={limit} removes the slow state.",
    ),
    "above_cliff": (
        "engine_setting",
        "{setting} {value:,} is just above a cliff: {steps} take {longer:percent} longer beyond {size:,}.",
        "{setting} {size:,} makes more tokens/s{graphs}.",
    ),
    # What nobody needs to act on.
    "nominal": ("note", "{path}: nominal numbers ({numbers}), not measured; without any spread."),
    "period": ("note", "{path}: step times are periods, with the host's work."),
    "compute": ("note", "{path}: step times are compute, without the host's work between steps."),
    "cpu_for_amx": ("note", "No `amx` path in the profile; using `cpu` as the CPU tier."),
    "wide_interval": (
        "note",
        "{widest} after {runs} runs: so near its limit the load varies from run to run by more than 10 %.",
    ),
    "cliffs": (
        "note",
        "{steps} take abruptly longer beyond {axis} = {sizes}.",
        f"{NO_ACTION} One above costs up to {{cost}} of the throughput; plans warn of such settings.",
    ),
    "idle": (
        "note",
        "In {windows} ({share:percent}) the engine was idle for a part of the time: not used",
        f"{NO_ACTION} A busier time shows more.",
    ),
}
"""Code, message and remedy of each message by its name; values stand in braces, with their unit after the colon."""


class _Units(Formatter):
    """Format values with units: `ms`, `percent` of a share, `+percent`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "ms":
            return format_ms(value)
        if format_spec.endswith("percent"):
            return format_percent(100 * value, signed=format_spec.startswith("+"))
        return str(super().format_field(value, format_spec))


def message(name: str, /, **values: Any) -> Message:
    """Return a row of the table with its values."""
    code, *texts = TABLE[name]
    found, remedy = (_Units().format(text, **values) for text in (*texts, "")[:2])
    return Message(code, found, remedy, SEVERITIES.get(code, Severity.WARNING))


def views(messages: Iterable[Message]) -> dict[str, Any]:
    """Return the messages of a plan by the keys of its JSON."""
    every = list(messages)

    def texts(*severities: Severity) -> list[str]:
        return [each.text for severity in severities for each in every if each.severity == severity]

    return {
        "warnings": [each for each in every if each.severity == Severity.WARNING],
        "notes": texts(Severity.NOTE),
        "unsupported": texts(Severity.UNSUPPORTED),
        "why_in_doubt": texts(Severity.UNSUPPORTED, Severity.DOUBT),
    }
