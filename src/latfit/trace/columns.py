"""The columns of a latfit trace; a test compares the table with `docs/formats.md`."""

from dataclasses import dataclass
from typing import Literal

SCHEMA = "latfit.trace/1"

Kind = Literal["int", "float", "text", "flag"]


@dataclass(frozen=True)
class Column:
    """One column: its name, kind, whether every trace has it, and what it means."""

    name: str
    kind: Kind
    required: bool
    meaning: str


COLUMNS: tuple[Column, ...] = (
    Column("B", "int", True, "requests in the step, >= 1 (fractional where the source only has window means)"),
    Column("S", "int", True, "tokens computed in the step; a decode request computes one"),
    Column("T_ms", "float", True, "latency of the step in milliseconds, > 0"),
    Column("period_ms", "float", False, "from the step's start to the next one's; missing where the engine paused"),
    Column("t_s", "float", False, "start of the step, seconds from the start of its run"),
    Column("run", "text", False, "one engine start, load level or process; time order means something only within it"),
    Column("path", "text", False, "execution path: cpu, amx, gpu, ..."),
    Column("phase", "text", False, "decode, prefill or mixed"),
    Column("prefill_requests", "int", False, "requests of B that are in prefill"),
    Column("prefill_tokens", "int", False, "tokens of S that belong to prefill"),
    Column("context_tokens", "int", False, "cached tokens read by the whole step; never part of S"),
    Column("prefill_context_tokens", "int", False, "cached tokens read on behalf of prefill requests"),
    Column("prefill_attention", "float", False, "sum over prefill chunks p behind k cached tokens of p (k + p/2)"),
    Column("longest_prefill", "float", False, "the largest k + p of them, in tokens"),
    Column("queued_requests", "int", False, "requests waiting while the step ran"),
    Column("kv_usage", "float", False, "share of the KV cache in use, 0 to 1"),
    Column("replica", "text", False, "engine or data-parallel rank"),
    Column("step", "int", False, "the engine's own step counter, within its run"),
    Column("dummy", "flag", False, "true for a step without requests that keeps data-parallel engines in step"),
    Column("idle", "flag", False, "true for a record of an engine that had nothing to do"),
    Column("window_ms", "float", False, "length of the window over whose steps the row is a mean"),
    Column("window_steps", "float", False, "steps in that window"),
    Column("arrived_requests", "float", False, "requests that came in that window"),
    Column("B_sd", "float", False, "standard deviation of B over the steps of the window"),
    Column("S_sd", "float", False, "standard deviation of S over the steps of the window"),
    Column("preemptions", "int", False, "requests that lost their KV blocks, as counted with the step"),
    Column("recomputed_tokens", "int", False, "tokens of S that preempted requests computed again, as prefill"),
    Column("prefix_queries", "int", False, "prompt tokens looked up in the prefix cache for requests that began"),
    Column("prefix_hits", "int", False, "those of them that were found, and not computed"),
    Column("draft_tokens", "int", False, "tokens drafted for requests that decode"),
    Column("accepted_tokens", "int", False, "drafted tokens that were accepted"),
    Column("wait_ms", "float", False, "part of T_ms in which an engine that schedules ahead waited for the device"),
    Column("cell_rows", "float", False, "how many steps the row stands for, in a trace made of cells"),
    Column("rep", "int", False, "repetition number of the same cell, in the order measured"),
    Column("warmup", "flag", False, "true for a step run to warm up; kept in the file, dropped by cleaning"),
    Column("outlier", "flag", False, "true for a step that took far longer than its cell's median; kept"),
)

BY_NAME = {column.name: column for column in COLUMNS}
REQUIRED = tuple(column.name for column in COLUMNS if column.required)

IDENTITY = ("hardware", "model", "tp", "path")
"""Columns that identify a system: rows that differ in them never share a fit."""

PHASES = ("decode", "prefill", "mixed")
