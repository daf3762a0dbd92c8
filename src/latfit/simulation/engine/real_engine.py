"""Derive settings of a simulated engine from the traces of a real one.

Logs print no block size: vLLM's is taken, and the result says so. Acceptance: docs/theory/simulation.md, "Draft
tokens".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from latfit.simulation.engine.settings import EngineSettings, Speculation
from latfit.trace import EngineFacts
from latfit.units import format_percent

BLOCK, BLOCK_ON_CPU = 16, 128
SEQUENCES, SEQUENCES_ON_CPU, BUDGET = 256, 128, 2048

SAYS_NOTHING = ("model", "data_parallel_size", "max_model_len")
"""Facts that traces of other tools may contain, too, and that determine no setting."""

SETTINGS: Mapping[str, str] = {
    "kv_capacity_tokens": "kv_blocks",
    "num_gpu_blocks": "kv_blocks",
    "num_speculative_tokens": "draft_tokens",
    "async_scheduling": "synchronous",
    **{name: name for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")},
}
"""Setting that follows from a fact."""

OPTIONS = ("kv_blocks", "max_num_seqs", "max_num_batched_tokens", "synchronous")  # settings with an option of their own

DEFAULT, ASSUMED, OBSERVED, GIVEN = "vLLM's default", "assumed", "observed", "given"
"""Origins of a value that no source reports, of one that is counted in the steps, and of one that an option names."""
UNNAMED = (ASSUMED, DEFAULT)
UNLIMITED = 50_000_000  # KV blocks of an engine whose cache size no source reports
SAME_NAME = (
    "kv_blocks", "max_num_seqs", "max_num_batched_tokens", "block_size", "long_prefill_token_threshold", "start_at",
)  # fmt: skip
USUAL_SETTINGS: Mapping[str, Any] = {
    **{name: getattr(EngineSettings(kv_blocks=UNLIMITED), name) for name in SAME_NAME},
    "synchronous": False,
    "swap": None,
    "prefix_hit_rate": 0.0,
    "draft_tokens": 0,
    "acceptance": Speculation().acceptance,
    "draft_cost": None,
}
"""Defaults of an engine's settings, by the names of options."""
MAX_FILES = 2  # in the line on where settings come from


@dataclass(frozen=True)
class SettingNote:
    """A remark on how an engine is set up. setting: what it is about, empty if nothing can be set."""

    text: str
    setting: str = ""

    @property
    def option(self) -> str:
        if self.setting in OPTIONS:
            return f"--{self.setting.replace('_', '-')}"
        return f"--set {self.setting}" if self.setting else ""

    @property
    def sentence(self) -> str:
        return f"{self.text}; {self.option} sets it." if self.setting else f"{self.text}."


class KnownSettings(NamedTuple):
    values: Mapping[str, Any] = {}  # by the names of options
    origin: Mapping[str, str] = {}  # of each: a file's name, vLLM's default, observed in the steps, or assumed
    notes: Sequence[SettingNote] = ()


@dataclass(frozen=True)
class EngineSetup:
    """How an engine is set up. files: sources that name a setting.

    origin: source of each setting: a file, "given", "observed" (counted in the steps), "vLLM's default", "assumed".
    """

    settings: EngineSettings
    origin: Mapping[str, str]
    notes: Sequence[SettingNote] = ()
    files: Sequence[str] = ()

    def is_known(self, setting: str) -> bool:
        return self.origin.get(setting, ASSUMED) not in UNNAMED

    @property
    def line(self) -> str:
        """The settings that decide, and where they come from; empty where options name them all."""
        if not self.files or all(source in (GIVEN, ASSUMED) for source in self.origin.values()):
            return ""
        one = self.settings
        parts = [
            *([f"{one.kv_blocks:,} KV blocks of {one.block_size}"] if self.is_known("kv_blocks") else []),
            f"{one.max_num_seqs:,} requests and {one.max_num_batched_tokens:,} tokens a step at most",
            ("asynchronous" if one.asynchronous else "synchronous")
            + (" (assumed; --synchronous if not)" if self.origin.get("synchronous") == ASSUMED else ""),
        ]
        if one.cached_share:
            parts.append(f"{format_percent(100 * one.cached_share)} of prompts cached")
        if one.speculation.draft_tokens:
            drafts = one.speculation
            accepted = format_percent(100 * drafts.acceptance)
            parts.append(f"{drafts.draft_tokens} draft tokens, accepted one after the other with {accepted}")
        more = f" and {len(self.files) - MAX_FILES} more" if len(self.files) > MAX_FILES else ""
        return f"Engine: {', '.join(parts)} (from {', '.join(self.files[:MAX_FILES])}{more})."


def known_settings(facts: EngineFacts, block_size: int | None = None) -> KnownSettings:
    """Collect the settings that traces report, else vLLM's defaults; no `kv_blocks` if no source reports it."""
    if not {*facts.values, *facts.differing} - set(SAYS_NOTHING):
        return KnownSettings()
    told: dict[str, Any] = {**facts.values, **({} if block_size is None else {"block_size": block_size})}
    cpu = told.get("device_type") == "cpu"
    # On GPUs vLLM's max_num_seqs depends on memory and version.
    sequences = min(SEQUENCES_ON_CPU if cpu else SEQUENCES, told.get("max_num_batched_tokens", BUDGET))
    usual = {
        "block_size": (BLOCK_ON_CPU if cpu else BLOCK, DEFAULT),
        "max_num_batched_tokens": (BUDGET, ASSUMED),
        "max_num_seqs": (sequences, DEFAULT if cpu else ASSUMED),
    }
    values, origin = ({name: each[place] for name, each in usual.items()} for place in (0, 1))
    notes = [
        SettingNote(
            f"Traces differ in {name} ({', '.join(map(str, several[:4]))}): none is used", SETTINGS.get(name, "")
        )
        for name, several in facts.differing.items()
    ]
    if facts.overruled:
        parts = [
            f"{name} {facts.values[name]} ({', '.join(map(str, others[:4]))} in the trace)"
            for name, others in facts.overruled.items()
        ]
        notes.append(SettingNote(f"The running server's settings replace those of the trace: {'; '.join(parts)}"))

    def take(name: str, fact: str, value: Any, source: str = ASSUMED) -> None:
        values[name], origin[name] = value, facts.sources.get(fact, source)

    for name in (*usual, "long_prefill_token_threshold"):
        if name in told:
            take(name, name, told[name])
    tokens = told.get("kv_capacity_tokens", 0)
    if tokens >= 2 * values["block_size"]:
        take("kv_blocks", "kv_capacity_tokens", tokens // values["block_size"])
        if origin["block_size"] == DEFAULT:
            text = f"No source tells the tokens of a KV block: {values['block_size']} taken, vLLM's default"
            notes.append(SettingNote(text + (" on a CPU" if cpu else ""), "block_size"))
    elif "num_gpu_blocks" in told:
        take("kv_blocks", "num_gpu_blocks", told["num_gpu_blocks"])
    if origin["max_num_seqs"] == ASSUMED:
        notes.append(SettingNote(f"No source tells max_num_seqs: {values['max_num_seqs']} assumed", "max_num_seqs"))
    if "async_scheduling" in told:
        take("synchronous", "async_scheduling", not told["async_scheduling"])
    elif cpu:
        take("synchronous", "", True, DEFAULT)  # vLLM's CPU backend disables asynchronous scheduling
    else:
        origin["synchronous"] = ASSUMED
        notes.append(SettingNote("No source tells how steps are scheduled: asynchronous assumed", "synchronous"))
    if told.get("enable_chunked_prefill") is False:
        text = "The engine ran without chunked prefill; chunked-prefill splits prompts that the budget has no room for"
        notes.append(SettingNote(text))
    queries, hits = facts.did.get("prefix_queries", 0.0), facts.did.get("prefix_hits", 0.0)
    if 0 < hits < queries and facts.values.get("enable_prefix_caching", True):
        take("prefix_hit_rate", "", hits / queries, OBSERVED)
    k, decoded = facts.values.get("num_speculative_tokens", 0), facts.did.get("decode_requests", 0.0)
    if k > 0:
        take("draft_tokens", "num_speculative_tokens", k)
        if decoded > 0 and facts.did.get("draft_tokens", 0.0) > 0:
            accepted = facts.did.get("accepted_tokens", 0.0)
            take("acceptance", "", acceptance_of(accepted / decoded, k), OBSERVED)
    return KnownSettings(values, origin, notes)


def acceptance_of(gain: float, k: int) -> float:
    """Solve a + a² + … + a^k = gain, the mean accepted tokens per request and step, for a in [0, 1]."""
    from scipy.optimize import brentq

    if not 0 < gain < k:
        return float(gain >= k)
    return float(brentq(lambda a: sum(a**i for i in range(1, k + 1)) - gain, 0.0, 1.0, xtol=1e-14))


def set_up_engine(facts: EngineFacts, named: Mapping[str, Any], batching: str) -> EngineSetup:
    """Return the engine with the settings that options name (times in ms), else the known ones. Raises WrongUsage."""
    known = known_settings(facts, named.get("block_size"))
    chosen = {**USUAL_SETTINGS, **known.values, **named}
    drafts = 0 if batching == "static" and "draft_tokens" not in named else chosen["draft_tokens"]
    settings = EngineSettings(
        batching=batching,
        asynchronous=not chosen["synchronous"],
        swap_ms_per_token=chosen["swap"],
        cached_share=chosen["prefix_hit_rate"],
        speculation=Speculation(drafts, chosen["acceptance"], chosen["draft_cost"] or 0.0),
        prefix_cache="prefix_hit_rate" not in named,  # a given rate replaces the recorded contents of prompts
        padded_graphs=not facts.as_served,  # else the measured steps include the padding
        **{name: chosen[name] for name in SAME_NAME},
    )
    origin = {**known.origin, **dict.fromkeys(named, GIVEN)}
    notes = [note for note in known.notes if note.setting not in named]
    if "kv_blocks" not in origin:
        notes.append(SettingNote("The size of the KV cache is not known: taken as unlimited", "kv_blocks"))
    return EngineSetup(settings, origin, notes, facts.files)
