"""Step records of SGLang, TensorRT-LLM and NVIDIA Dynamo: JSON lines, JSON documents, flat CSV."""

import math
from array import array
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from latfit.errors import BadInput, WrongUsage, located
from latfit.stats import FloatArray
from latfit.trace.readers.source import (
    Options,
    Reader,
    Source,
    Tally,
    has_columns,
    has_keys,
    member,
    number,
    numbers,
    read_delimited,
    records,
    seconds_of,
    text,
)
from latfit.trace.table import REQUIRED, Array, Trace
from latfit.units import MS_PER_UNIT

Columns = Callable[[Source, Tally, dict[str, Any]], Mapping[str, Array]]
"""Returns the columns of a file's steps, counts what cannot be read, and adds facts to the provenance."""


def step_reader(
    name: str, describes: str, recognises: Callable[[bytes], bool], columns_of: Columns, path: str | None = "gpu"
) -> Reader:
    """Return the reader of a format whose columns and units are fixed."""

    def read(source: Source, options: Options) -> Trace:
        if option := "--map" if options.column_map else "--unit" if options.unit else "":
            found = f"does not apply to {name} files, whose columns and units are fixed"
            remedy = f"Leave {option} out, or read the file as a table with --format table."
            raise WrongUsage(found, where=f"{option} for {source.name}", remedy=remedy)
        tally, facts = Tally(), dict[str, Any](format=name)
        with located(source.name):
            columns = columns_of(source, tally, facts)
            if not len(columns.get("B", ())):
                unread = tally.total()
                seen = f" ({unread} lines could not be read)" if unread else ""
                raise BadInput(f"holds no step{seen}", remedy=f"Expected {describes}.")
        return Trace(columns, {**facts, **+tally})

    return Reader(name, describes, recognises, read, path)


class Rows:
    """Rows gathered by a reader, each with the same names. A number takes eight bytes."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}  # by name an array of numbers or a list of texts
        self.count = 0

    def add(self, row: Mapping[str, float | str]) -> None:
        for name, value in row.items():
            self.values.setdefault(name, [] if isinstance(value, str) else array("d")).append(value)
        self.count += 1

    def numbers(self, name: str) -> FloatArray:
        return np.array(self.values.get(name, ()), dtype=np.float64)

    def columns(self) -> dict[str, Array]:
        """Return all columns but optional ones without a value; `seconds` and `replica` give `t_s` and `run`."""
        found: dict[str, Array] = {
            name: np.array(values, dtype=object if isinstance(values, list) else np.float64)
            for name, values in self.values.items()
        }
        if "seconds" in found:
            found |= _runs(found.pop("seconds"), found["replica"], found["step"])
        used = {name: any(each) if each.dtype == object else not np.isnan(each).all() for name, each in found.items()}
        return {name: column for name, column in found.items() if name in REQUIRED or used[name]}


def _runs(seconds: FloatArray, replica: Array, step: FloatArray) -> dict[str, Array]:
    run, t_s = np.full(len(step), "", dtype=object), np.full(len(step), np.nan)
    for name in dict.fromkeys(replica.tolist()):
        rows = np.flatnonzero(replica == name)
        start = np.cumsum(np.diff(step[rows], prepend=np.nan) < 0) + 1
        for part in np.split(rows, np.flatnonzero(np.diff(start)) + 1):
            t_s[part] = seconds[part] - np.fmin.reduce(seconds[part])
        if name or start[-1] > 1:
            run[rows] = [f"{name}#{i}" for i in start.tolist()]
    return {"run": run, "t_s": t_s}


EXTEND, PAST = "extend_lengths", "past_kv_lengths"
"""Tokens that each request of a step computes, and tokens it has cached."""


def request_terms(extend: Any, past: Any, B: float, S: float) -> tuple[float, float]:
    """Return (sum of p (k + p/2), largest k + p) over prefill chunks p behind k cached tokens; NaN for bad lists."""
    try:
        p, k = (np.asarray(each, dtype=np.float64).ravel() for each in (extend, past))
    except (TypeError, ValueError):
        return np.nan, np.nan
    if not len(p) == len(k) == B or p.sum() != S or not (np.all(p >= 1) and np.all(k >= 0)):
        return np.nan, np.nan
    p, k = p[p > 1], k[p > 1]  # a request that computes one token decodes
    return float(np.sum(p * (k + p / 2))), float(np.max(k + p, initial=0.0))


def with_request_terms(columns: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, int]]:
    """Replace lists of requests by `prefill_attention` and `longest_prefill`; also return how many were refused."""
    found = {name: column for name, column in columns.items() if name not in (EXTEND, PAST)}
    if len(columns) != len(found) + 2 or not {"B", "S"} <= set(found):
        return found, {}
    B, S = (np.asarray(found[name], dtype=np.float64).tolist() for name in ("B", "S"))
    lists = zip(columns[EXTEND].tolist(), columns[PAST].tolist(), B, S, strict=True)
    terms: FloatArray = np.array([request_terms(*row) for row in lists], dtype=np.float64).reshape(-1, 2)
    return fill_refused({**found, "prefill_attention": terms[:, 0], "longest_prefill": terms[:, 1]})


def fill_refused(columns: dict[str, Array]) -> tuple[dict[str, Array], dict[str, int]]:
    """Use averages over requests where lists were refused; also return how many were."""
    refused = np.isnan(columns["prefill_attention"]) & (np.asarray(columns["B"], dtype=np.float64) > 0)
    if not refused.any():
        return columns, {}
    totals = ("prefill_requests", "prefill_tokens", "prefill_context_tokens")
    if all(name in columns for name in totals):
        n, p, k = (np.asarray(columns[name], dtype=np.float64) for name in totals)
        n = np.maximum(n, 1.0)
        columns["prefill_attention"] = np.where(refused, p * (k + p / 2) / n, columns["prefill_attention"])
        columns["longest_prefill"] = np.where(refused, (k + p) / n, columns["longest_prefill"])
    return columns, {"refused_lists": int(np.count_nonzero(refused))}


def grid_steps(
    B: FloatArray, prompt: FloatArray, output: FloatArray, prefill_ms: FloatArray, decode_ms: FloatArray
) -> dict[str, Array]:
    """Return two steps for each result (n,) of a grid: the prefill of all prompts, and the mean decode step."""
    zero = np.zeros_like(B)
    pairs = {
        "B": (B, B),
        "S": (B * prompt, B),
        "T_ms": (prefill_ms, decode_ms),
        "prefill_requests": (B, zero),
        "prefill_tokens": (B * prompt, zero),
        "context_tokens": (zero, B * (prompt + output / 2)),
    }
    columns: dict[str, Array] = {name: np.stack(pair, axis=1).ravel() for name, pair in pairs.items()}
    return {**columns, "phase": np.array(["prefill", "decode"] * len(B), dtype=object)}


BENCH = ("batch_size", "input_len", "output_len", "prefill_latency", "median_decode_latency")


def sglang_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return two steps per line, prefill and the median decode step; prefill alone for a single output token."""
    facts["aggregated"] = "median decode step"
    rows: list[Any] = [
        (*(number(each, name) for name in BENCH), text(each, "run_name")) for each in records(source, tally)
    ]
    whole = [row for row in rows if not math.isnan(row[0] + row[3])]
    tally["bad_lines"] += len(rows) - len(whole)
    *columns, names = zip(*whole, strict=True) if whole else [()] * 6
    B, prompt, output, prefill_s, decode_s = np.array(columns, dtype=np.float64)
    found = grid_steps(B, prompt, output, prefill_s * MS_PER_UNIT["s"], decode_s * MS_PER_UNIT["s"])
    if any(names):
        found["run_name"] = np.repeat(np.array(names, dtype=object), 2)
    is_step = (found["phase"] == "prefill") | np.isfinite(found["T_ms"])
    return {name: column[is_step] for name, column in found.items()}


SGLANG = step_reader(
    "sglang",
    "what python -m sglang.bench_one_batch --result-filename FILE writes",
    lambda head: has_keys(head, "batch_size", "input_len", "prefill_latency"),
    sglang_steps,
)


STATS, CACHE = "inflightBatchingStats", "kvCacheStats"
TIMES = ("gpuForwardTimeMS", "hostStepTimeMS", "iterLatencyMS")
"""The time of a step, by preference: of the forward pass; of the scheduler, where it overlaps steps; of the whole
iteration, which under overlap spans about two steps."""
MIN_KNOWN_SHARE = 0.5  # of the busy iterations; the first ones of a log may lack a field


def trtllm_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return every iteration; those without a request are `idle`. One time field serves the whole file."""
    rows = Rows()
    overlapped = 0
    for record in records(source, tally):
        if not isinstance(record.get(STATS), dict):
            tally["bad_lines"] += 1
            continue
        rows.add(_iteration(record))
        overlapped += record.get("schedulerMode") == "overlap"
    busy = rows.numbers("B") > 0
    times = {name: rows.numbers(name) for name in TIMES if overlapped or name != TIMES[1]}
    missing = {name: int((busy & np.isnan(T)).sum()) for name, T in times.items()}
    enough = (name for name, n in missing.items() if n <= (1 - MIN_KNOWN_SHARE) * np.count_nonzero(busy))
    field = next(enough, min(missing, key=lambda name: missing[name]))
    facts |= {"latency_field": field, **({"latency_missing": missing[field]} if missing[field] else {})}
    if overlapped and field == TIMES[2]:
        facts["note"] = "steps overlap, so that iterLatencyMS spans about two of them; newer versions log better times"
    columns = {name: column for name, column in rows.columns().items() if name not in TIMES}
    return {**columns, "T_ms": times[field], "idle": ~busy}


def _iteration(record: dict[str, Any]) -> dict[str, float | str]:
    stats, cache = member(record, STATS), member(record, CACHE)
    prefill, decode = number(stats, "numContextRequests"), number(stats, "numGenRequests")
    prefill_tokens, per_request = number(stats, "numCtxTokens"), number(stats, "avgNumDecodedTokensPerIter")
    decode_tokens = float(np.rint(decode * per_request)) if per_request > 0 else decode
    stamp = text(record, "timestamp")  # MM-DD-YYYY hh:mm:ss.ffffff
    used, blocks = number(cache, "usedNumBlocks"), number(cache, "maxNumBlocks")
    prefill_context = number(stats, "numCtxKvTokens")
    context = prefill_context + number(stats, "numGenKvTokens")
    return {
        "B": prefill + decode,
        "S": prefill_tokens + decode_tokens,
        "prefill_requests": prefill,
        "prefill_tokens": prefill_tokens,
        "context_tokens": used * number(cache, "tokensPerBlock") if np.isnan(context) else context,
        "prefill_context_tokens": prefill_context,
        "queued_requests": number(record, "numQueuedRequests"),
        "kv_usage": used / blocks if blocks > 0 else np.nan,
        "step": number(record, "iter"),
        "seconds": seconds_of(f"{stamp[6:10]}-{stamp[:2]}-{stamp[3:5]}T{stamp[11:]}"),
        **{name: number(record, name) for name in TIMES},
        "replica": text(record, "attentionDpRank") or text(record, "rank"),
    }


TRTLLM = step_reader(
    "trtllm",
    "iteration statistics of TensorRT-LLM (with enable_iter_perf_stats: true, what GET /metrics answers)",
    lambda head: any(has_keys(head, name, time) for name in (STATS, CACHE) for time in TIMES),
    trtllm_steps,
)


FLAT = ("wall_time_s", "prefill_tokens", "prefill_requests", "decode_requests")


def dynamo_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return every forward pass; heartbeats of an idle worker are `idle`. A decode request computes one token."""
    if has_columns(source.head, *FLAT):
        return _flat_passes(source, tally)
    rows = Rows()
    modes: set[str] = set()
    for record in records(source, tally):
        event = record["event"] if isinstance(record.get("event"), dict) else record
        if add_pass(rows, event):
            modes.add(text(event, "capture_mode") or "full")
        else:
            tally["bad_lines"] += 1
    trace = trace_of_passes(rows, modes)
    facts |= trace.provenance
    return trace.columns


def _flat_passes(source: Source, tally: Tally) -> Mapping[str, Array]:
    column = {name: numbers(values) for name, values in read_delimited(source, tally).items()}
    prefill, decode = column["prefill_requests"], column["decode_requests"]
    found: dict[str, Array] = {
        "B": prefill + decode,
        "S": column["prefill_tokens"] + decode,
        "T_ms": column["wall_time_s"] * MS_PER_UNIT["s"],
        "prefill_requests": prefill,
        "prefill_tokens": column["prefill_tokens"],
        "idle": prefill + decode == 0,
    }
    if "prefill_kv_tokens" in column:
        found["prefill_context_tokens"] = column["prefill_kv_tokens"]
        if "decode_kv_tokens" in column:
            found["context_tokens"] = column["prefill_kv_tokens"] + column["decode_kv_tokens"]
    return found


def trace_of_passes(rows: Rows, modes: Collection[str] = ("full",)) -> Trace:
    columns, refused = {**rows.columns(), "idle": ~(rows.numbers("B") > 0)}, dict[str, int]()
    facts: dict[str, Any] = {"format": "dynamo", "capture_mode": "+".join(sorted(modes))}
    if set(modes) != {"full"}:
        facts["note"] = "sampled: steps between the samples are missing; DYN_FPM_MODE=full keeps them all"
    if "prefill_attention" in columns:
        columns, refused = fill_refused(columns)
    return Trace(columns, facts | refused)


def add_pass(rows: Rows, event: Mapping[str, Any]) -> bool:
    """Add the forward pass in `event`, bare or under `fpm`; return whether there is one."""
    fpm = event["fpm"] if isinstance(event.get("fpm"), dict) else event
    done = fpm.get("scheduled_requests")
    if not isinstance(done, dict):
        return False
    prefill, decode = number(done, "num_prefill_requests"), number(done, "num_decode_requests")
    prefill_tokens, prefill_context = number(done, "sum_prefill_tokens"), number(done, "sum_prefill_kv_tokens")
    B, S = prefill + decode, prefill_tokens + decode
    wall_s = number(fpm, "wall_time")
    waiting = number(fpm, "queued_requests", "num_prefill_requests")
    attention, longest = request_terms(done.get(EXTEND), done.get(PAST), B, S)
    row = {
        "prefill_attention": attention,
        "longest_prefill": longest,
        "B": B,
        "S": S,
        "T_ms": wall_s * MS_PER_UNIT["s"],
        "seconds": number(event, "observed_at_unix_ms") / MS_PER_UNIT["s"] - wall_s,  # observed at the end of the pass
        "prefill_requests": prefill,
        "prefill_tokens": prefill_tokens,
        "context_tokens": prefill_context + number(done, "sum_decode_kv_tokens"),
        "prefill_context_tokens": prefill_context,
        "queued_requests": waiting + number(fpm, "queued_requests", "num_decode_requests"),
        "step": number(fpm, "counter_id"),
    }
    rows.add(row | {"replica": f"{text(fpm, 'worker_id')}/{text(fpm, 'dp_rank')}"})
    return True


DYNAMO = step_reader(
    "dynamo",
    "forward-pass metrics of NVIDIA Dynamo (workers with --fpm-trace and DYN_FPM_MODE=full), vLLM or SGLang",
    lambda head: has_keys(head, "scheduled_requests", "wall_time") or has_columns(head, *FLAT),
    dynamo_steps,
)
