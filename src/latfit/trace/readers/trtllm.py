"""TensorRT-LLM iteration statistics (`enable_iter_perf_stats: true`): the JSON list of `/metrics`, or JSON lines.

The time of a step is, in this order of preference, `gpuForwardTimeMS` (measured around the forward pass of the very
record), `hostStepTimeMS` where the scheduler overlaps steps, and `iterLatencyMS`, which under overlap spans about two
steps. One field is chosen for the whole file, so that no two scopes mix; a record without it has T = NaN.
"""

from datetime import datetime
from typing import Any

import numpy as np

from latfit.stats import FloatArray
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.row_builder import Gathered, from_start_of_run, no_steps, refuse_table_options, run_names
from latfit.trace.readers.source import Source
from latfit.trace.readers.text import Tally, has_keys, member, number, records, text
from latfit.trace.table import Array, Trace

STATS = "inflightBatchingStats"
TIMES = ("gpuForwardTimeMS", "hostStepTimeMS", "iterLatencyMS")
EXPECTED = "iteration statistics of TensorRT-LLM: set enable_iter_perf_stats: true and save what GET /metrics answers"


def recognises(head: bytes) -> bool:
    """JSON that speaks of in-flight batching, or of the KV cache, and of a step's time."""
    known = has_keys(head, STATS) or has_keys(head, "kvCacheStats")
    return known and any(has_keys(head, name) for name in TIMES)


def read(source: Source, options: Options) -> Trace:
    """Every iteration in file order; those that scheduled nothing have B = 0 and the flag `idle`."""
    refuse_table_options(options, source, READER.name)
    tally, rows = Tally(), Gathered()
    overlapped = 0
    for record in records(source, tally):
        if isinstance(record.get(STATS), dict):
            _add(rows, record)
            overlapped += record.get("schedulerMode") == "overlap"
        else:
            tally.bad += 1
    if not rows.rows:
        raise no_steps(source, EXPECTED, tally)
    columns = rows.columns()
    busy = rows.numbers("B") > 0
    field = _time_field(rows, busy, bool(overlapped))
    T = rows.numbers(field)
    columns = {name: column for name, column in columns.items() if name not in (*TIMES, "seconds")}
    columns |= {"T_ms": T, "idle": rows.numbers("B") == 0}
    columns |= _run_columns(rows)
    facts: dict[str, Any] = {"format": READER.name, "latency_field": field, **tally.facts()}
    if missing := int((busy & np.isnan(T)).sum()):
        facts["latency_missing"] = missing
    if overlapped and field == "iterLatencyMS":
        facts["note"] = "steps overlap, so that iterLatencyMS spans about two of them; newer versions log better times"
    return Trace(columns, facts)


def _add(rows: Gathered, record: dict[str, Any]) -> None:
    stats, cache = member(record, STATS), member(record, "kvCacheStats")
    prefill, decode = number(stats, "numContextRequests"), number(stats, "numGenRequests")
    prefill_tokens, each = number(stats, "numCtxTokens"), number(stats, "avgNumDecodedTokensPerIter")
    decode_tokens = float(np.rint(decode * each)) if each > 0 else decode
    used, most = number(cache, "usedNumBlocks"), number(cache, "maxNumBlocks")
    prefill_context = number(stats, "numCtxKvTokens")
    context = prefill_context + number(stats, "numGenKvTokens")
    rank = text(record, "attentionDpRank") or text(record, "rank")
    rows.add(
        {
            "B": prefill + decode,
            "S": prefill_tokens + decode_tokens,
            "prefill_requests": prefill,
            "prefill_tokens": prefill_tokens,
            "context_tokens": used * number(cache, "tokensPerBlock") if np.isnan(context) else context,
            "prefill_context_tokens": prefill_context,
            "queued_requests": number(record, "numQueuedRequests"),
            "kv_usage": used / most if most > 0 else np.nan,
            "step": number(record, "iter"),
            "seconds": _seconds(text(record, "timestamp")),
            **{name: number(record, name) for name in TIMES},
        },
        {"replica": rank},
    )


def _time_field(rows: Gathered, busy: Array, overlapped: bool) -> str:
    """The best field that at least half of the busy iterations have; a few lack it at the start of a log."""

    def covers(name: str) -> bool:
        known = np.isfinite(rows.numbers(name))
        return bool(known[busy].mean() >= 0.5) if busy.any() else bool(known.any())

    wanted = [TIMES[0]] + ([TIMES[1]] if overlapped else [])
    return next((name for name in wanted if covers(name)), TIMES[2] if covers(TIMES[2]) else _fullest(rows))


def _fullest(rows: Gathered) -> str:
    return max(TIMES, key=lambda name: int(np.isfinite(rows.numbers(name)).sum()))


def _run_columns(rows: Gathered) -> dict[str, Array]:
    runs = run_names(rows.labels("replica"), rows.numbers("step"))
    found: dict[str, Array] = {}
    if len(set(runs)) > 1:
        found["run"] = np.array(runs, dtype=object)
    seconds: FloatArray = rows.numbers("seconds")
    if np.isfinite(seconds).any():
        found["t_s"] = from_start_of_run(seconds, runs)
    return found


def _seconds(stamp: str) -> float:
    """Seconds of `MM-DD-YYYY hh:mm:ss.ffffff`; NaN for anything else."""
    try:
        return datetime.fromisoformat(f"{stamp[6:10]}-{stamp[:2]}-{stamp[3:5]}T{stamp[11:]}+00:00").timestamp()
    except (ValueError, OverflowError):
        return float("nan")


READER = Reader("trtllm", "iteration statistics of TensorRT-LLM", recognises, read, path="gpu")
