"""The columns of a latfit trace and their kinds; docs/formats.md has their meaning."""

from typing import Literal

SCHEMA = "latfit.trace/1"

Kind = Literal["int", "float", "text", "flag"]

COUNTS = (
    *("B", "S", "prefill_requests", "prefill_tokens", "context_tokens", "prefill_context_tokens", "queued_requests"),
    *("step", "rep", "preemptions", "recomputed_tokens", "prefix_queries", "prefix_hits", "draft_tokens"),
    "accepted_tokens",
)
QUANTITIES = (
    *("T_ms", "period_ms", "t_s", "prefill_attention", "longest_prefill", "kv_usage", "window_ms", "window_steps"),
    *("arrived_requests", "B_sd", "S_sd", "wait_ms", "cell_rows"),
)
KINDS: dict[str, Kind] = {
    **dict.fromkeys(COUNTS, "int"),
    **dict.fromkeys(QUANTITIES, "float"),
    **dict.fromkeys(("run", "path", "phase", "replica"), "text"),
    **dict.fromkeys(("dummy", "idle", "warmup", "outlier"), "flag"),
}  # every column with a declared meaning
REQUIRED = ("B", "S", "T_ms")

IDENTITY = ("hardware", "model", "tp", "path")
"""Columns that identify a system: rows that differ in them never share a fit."""

PHASES = ("decode", "prefill", "mixed")
