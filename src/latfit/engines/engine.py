"""What latfit knows of a serving engine: its metrics, its settings and its command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Name:
    """A metric without the engine's prefix. Only samples with these labels count."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    unit: float = 1.0


Names = Mapping[str, tuple[Name, ...]]
"""By quantity: the names that versions of the engine have; the first that is found counts."""


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


FIRST_COME = "fcfs"


@dataclass(frozen=True)
class Option:
    """A setting of a plan by the engine's name. role: what it sets.  value: the only one, None for a number."""

    role: str
    name: str
    value: bool | int | str | None = None

    def takes(self, value: object) -> bool:
        if self.value is None:
            return type(value) is int and value >= 1
        return type(value) is type(self.value) and value == self.value


@dataclass(frozen=True)
class Engine:
    """A serving engine. Metrics are by our names (`latfit.metrics.state`)."""

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
    recording_flag: str = ""  # its option without which `latfit tune` records nothing, or no single steps
    recording_versions: str = "in a newer version"  # that have the option, for messages
    port: int = 8000  # of its metrics, by default
    graph_sizes: str = ""  # its option for the batch sizes of captured graphs
    passes_flag: str = ""  # its option that publishes every step by ZeroMQ
    key: str = ""  # what plans and exports call it
    options: tuple[Option, ...] = ()  # the limit of requests first
    orders: tuple[str, ...] = (FIRST_COME,)  # its scheduling policies
    program: tuple[str, ...] = ()  # words that start a server, before the model
    model_option: tuple[str, ...] = ()
    negatable: bool = False  # whether switches have `--no-NAME`
    cache_help: str = ""  # where it reports the size of its KV cache

    def has(self, role: str) -> bool:
        return any(each.role == role for each in self.options)

    def named_settings(self, values: Mapping[str, int | None]) -> dict[str, bool | int | str]:
        """Return values by role under the engine's names; roles that it lacks are left out."""
        found: dict[str, bool | int | str] = {}
        for each in self.options:
            value = values.get(each.role) if each.value is None else each.value
            if each.role in values and value is not None:
                found[each.name] = value
        return found

    def metric_names(self) -> set[str]:
        single = [*self.gauges.values(), *self.counters.values(), *self.facts.values()]
        found = {name.name for names in single for name in names}
        return found | {f"{name.name}_count" for names in self.histograms.values() for name in names}
