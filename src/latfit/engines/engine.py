"""What latfit knows of a serving engine. For each quantity: the names that its versions have, the first that is found
counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Name:
    """A metric without the engine's prefix. Only samples with these labels count; a value is so many units of ours."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    unit: float = 1.0


Names = Mapping[str, tuple[Name, ...]]


def named(**names: Name | str | tuple[Name | str, ...]) -> Names:
    """Return a table of names from texts, names and tuples of them."""
    several = {ours: theirs if isinstance(theirs, tuple) else (theirs,) for ours, theirs in names.items()}
    return {ours: tuple(Name(n) if isinstance(n, str) else n for n in theirs) for ours, theirs in several.items()}


def labelled(name: str, label: str, value: str) -> Name:
    return Name(name, {label: value})


REQUEST_TIMES = named(
    ttft="time_to_first_token_seconds",
    latency="e2e_request_latency_seconds",
    queue=("request_queue_time_seconds", "queue_time_seconds"),
    prefill="request_prefill_time_seconds",
    inference="request_inference_time_seconds",
)
"""Histograms that vLLM, SGLang and TensorRT-LLM call alike."""


SLOT_STEPS = "slot_steps"
"""A counter: requests of all steps so far, each in every step that it took part in."""


@dataclass(frozen=True)
class Engine:
    """A serving engine: its metrics by our names (`latfit.metrics.state`) and what it calls its settings."""

    name: str
    prefixes: tuple[str, ...]  # of the names of its metrics
    gauges: Names
    counters: Names
    histograms: Names = field(default_factory=dict)
    facts: Names = field(default_factory=dict)  # gauges that hold settings, by the names of a recorder's provenance
    means: Mapping[str, tuple[Name, Name]] = field(default_factory=dict)  # counters that are published as (mean, by)
    live: bool = True  # whether it counts what steps hold as they are made, and not when requests end
    settings: Mapping[str, str] = field(default_factory=dict)  # its name → ours, in the JSON of these addresses
    settings_places: tuple[str, ...] = ()
    info: tuple[str, Mapping[str, str]] = ("", {})  # a gauge whose labels are settings: its name → ours
    busiest_by: str = ""  # the counter of a model's computing time, if models are systems of their own
    metrics_help: str = ""  # how its metrics are turned on, or where they are
    steps_help: str = "Record single steps: latfit.record.StepRecorder, or the engine's log."
    steps_flag: str = ""  # its option without which latfit's plug-in sees no steps
    port: int = 8000  # of its metrics, by default
    graph_sizes: str = ""  # its option for the batch sizes of captured graphs

    def metric_names(self) -> set[str]:
        """Return the names that its text has, without prefixes."""
        single = [*self.gauges.values(), *self.counters.values(), *self.facts.values()]
        found = {name.name for names in single for name in names}
        return found | {f"{name.name}_count" for names in self.histograms.values() for name in names}
