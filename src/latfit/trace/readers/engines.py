"""Step records of SGLang, TensorRT-LLM and NVIDIA Dynamo: JSON lines, JSON documents, flat CSV."""

import math
from array import array
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

import numpy as np

from latfit.errors import BadInput, WrongUsage
from latfit.stats import FloatArray
from latfit.trace.columns import REQUIRED
from latfit.trace.readers.source import Options, Reader, Source
from latfit.trace.readers.text import (
    Tally,
    has_columns,
    has_keys,
    member,
    number,
    numbers,
    read_delimited,
    records,
    text,
)
from latfit.trace.table import Array, Trace
from latfit.units import MS_PER_UNIT


class Rows:
    """Rows gathered by a reader; each has the same names. A number takes eight bytes."""

    def __init__(self) -> None:
        self._numbers: dict[str, array[float]] = {}
        self._labels: dict[str, list[str]] = {}
        self.count = 0

    def add(self, numbers: Mapping[str, float], labels: Mapping[str, str]) -> None:
        for name, value in numbers.items():
            self._numbers.setdefault(name, array("d")).append(value)
        for name, label in labels.items():
            self._labels.setdefault(name, []).append(label)
        self.count += 1

    def numbers(self, name: str) -> FloatArray:
        return np.array(self._numbers.get(name, ()), dtype=np.float64)

    def labels(self, name: str) -> list[str]:
        return self._labels.get(name, [])

    def columns(self) -> dict[str, Array]:
        """Return all columns but optional ones without a value."""
        found: dict[str, Array] = {name: self.numbers(name) for name in self._numbers}
        found = {name: column for name, column in found.items() if name in REQUIRED or not np.isnan(column).all()}
        return found | {name: np.array(each, dtype=object) for name, each in self._labels.items() if any(each)}

    def run_columns(self) -> dict[str, Array]:
        """Return `run`, from replica and step counter, and `t_s`, from `seconds` if any is known.

        A run ends where the counter of its replica starts again.
        """
        last: dict[str, float] = {}
        starts: dict[str, int] = {}
        runs = []
        for replica, counter in zip(self.labels("replica"), self.numbers("step").tolist(), strict=True):
            if replica not in starts or counter < last[replica]:
                starts[replica] = starts.get(replica, 0) + 1
            if math.isfinite(counter) or replica not in last:
                last[replica] = counter
            runs.append(f"{replica}#{starts[replica]}")
        names, run = np.unique(np.array(runs, dtype=object), return_inverse=True)
        columns: dict[str, Array] = {"run": np.array(runs, dtype=object)}
        seconds = self.numbers("seconds")
        if np.isfinite(seconds).any():
            first = np.full(len(names), np.inf)
            np.fmin.at(first, run, seconds)
            columns["t_s"] = np.asarray(seconds - np.where(np.isfinite(first), first, np.nan)[run])
        return columns


def refuse_table_options(options: Options, source: Source, reader: str) -> None:
    """Raise WrongUsage if a column map or a unit is given for a format that fixes both."""
    given = [name for name, value in (("--map", options.column_map), ("--unit", options.unit)) if value]
    if given:
        raise WrongUsage(
            f"does not apply to {reader} files, whose columns and units are fixed",
            where=f"{given[0]} for {source.name}",
            remedy=f"Leave {given[0]} out, or read the file as a table with --format table.",
        )


def no_steps(source: Source, expected: str, tally: Tally) -> BadInput:
    """Return the error for a file without a step."""
    unread = tally.bad + tally.cut
    seen = f" ({unread} lines could not be read)" if unread else ""
    return BadInput(f"holds no step{seen}", where=source.name, remedy=f"Expected {expected}.")


# ---------------------------------------------------------------------------------------------------- request lists

EXTEND, PAST = "extend_lengths", "past_kv_lengths"
"""Tokens that each request of a step computes, and tokens it has cached."""


def request_terms(extend: Any, past: Any, B: float, S: float) -> tuple[float, float]:
    """Return (sum of p (k + p/2), largest k + p) over the prefill chunks of p tokens behind k cached ones.

    NaN if the lists are not those of a step of B requests and S tokens, as after merging records.
    """
    if extend is None or past is None:
        return np.nan, np.nan
    try:
        p, k = (np.asarray(each, dtype=np.float64).ravel() for each in (extend, past))
    except (TypeError, ValueError):
        return np.nan, np.nan
    if not len(p) == len(k) == B or p.sum() != S or np.any(p < 1) or np.any(k < 0):
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


# ----------------------------------------------------------------------------------------------------------- SGLang


def read_sglang(source: Source, options: Options) -> Trace:
    """Return two steps per line: prefill and decode; prefill alone if the output is a single token.

    The decode latency is the median over the output, so its context is that in the middle of the output.
    """
    refuse_table_options(options, source, "sglang")
    tally, rows = Tally(), Rows()
    for record in records(source, tally):
        B, prompt, output = (number(record, name) for name in ("batch_size", "input_len", "output_len"))
        prefill_s, decode_s = (number(record, name) for name in ("prefill_latency", "median_decode_latency"))
        if math.isnan(B) or math.isnan(prefill_s):
            tally.bad += 1
            continue
        steps = [("prefill", prefill_s, B * prompt, B, B * prompt, 0.0)]
        if not math.isnan(decode_s):
            steps.append(("decode", decode_s, B, 0.0, 0.0, B * (prompt + output / 2)))
        names = ("B", "T_ms", "S", "prefill_requests", "prefill_tokens", "context_tokens")
        for phase, seconds, *values in steps:
            row = dict(zip(names, (B, seconds * MS_PER_UNIT["s"], *values), strict=True))
            rows.add(row, {"run_name": text(record, "run_name"), "phase": phase})
    if not rows.count:
        expected = "what python -m sglang.bench_one_batch --result-filename FILE writes"
        raise no_steps(source, f"{expected}: batch_size, input_len, prefill_latency", tally)
    return Trace(rows.columns(), {"format": "sglang", "aggregated": "median decode step", **tally.facts()})


SGLANG = Reader(
    "sglang",
    "results of SGLang's bench_one_batch",
    lambda head: has_keys(head, "batch_size", "input_len", "prefill_latency"),
    read_sglang,
    path="gpu",
)

# ----------------------------------------------------------------------------------------------------- TensorRT-LLM

STATS = "inflightBatchingStats"
TIMES = ("gpuForwardTimeMS", "hostStepTimeMS", "iterLatencyMS")
"""The time of a step, by preference: of the forward pass; of the scheduler, where it overlaps steps; of the whole
iteration, which under overlap spans about two steps."""
MIN_KNOWN_SHARE = 0.5  # of the busy iterations; the first ones of a log may lack a field


def recognises_trtllm(head: bytes) -> bool:
    known = has_keys(head, STATS) or has_keys(head, "kvCacheStats")
    return known and any(has_keys(head, name) for name in TIMES)


def read_trtllm(source: Source, options: Options) -> Trace:
    """Return every iteration; those without a request are `idle`. One time field serves the whole file."""
    refuse_table_options(options, source, "trtllm")
    tally, rows = Tally(), Rows()
    overlapped = 0
    for record in records(source, tally):
        if isinstance(record.get(STATS), dict):
            _add_iteration(rows, record)
            overlapped += record.get("schedulerMode") == "overlap"
        else:
            tally.bad += 1
    if not rows.count:
        expected = "iteration statistics of TensorRT-LLM: set enable_iter_perf_stats: true and save what GET /metrics"
        raise no_steps(source, f"{expected} answers", tally)
    busy = rows.numbers("B") > 0
    field = _time_field(rows, busy, bool(overlapped))
    T = rows.numbers(field)
    columns = {name: column for name, column in rows.columns().items() if name not in (*TIMES, "seconds")}
    columns |= {"T_ms": T, "idle": ~busy, **rows.run_columns()}
    if len(set(columns["run"].tolist())) == 1:
        del columns["run"]
    facts: dict[str, Any] = {"format": "trtllm", "latency_field": field, **tally.facts()}
    if missing := int((busy & np.isnan(T)).sum()):
        facts["latency_missing"] = missing
    if overlapped and field == TIMES[2]:
        facts["note"] = "steps overlap, so that iterLatencyMS spans about two of them; newer versions log better times"
    return Trace(columns, facts)


def _add_iteration(rows: Rows, record: dict[str, Any]) -> None:
    stats, cache = member(record, STATS), member(record, "kvCacheStats")
    prefill, decode = number(stats, "numContextRequests"), number(stats, "numGenRequests")
    prefill_tokens, per_request = number(stats, "numCtxTokens"), number(stats, "avgNumDecodedTokensPerIter")
    decode_tokens = float(np.rint(decode * per_request)) if per_request > 0 else decode
    used, blocks = number(cache, "usedNumBlocks"), number(cache, "maxNumBlocks")
    prefill_context = number(stats, "numCtxKvTokens")
    context = prefill_context + number(stats, "numGenKvTokens")
    row = {
        "B": prefill + decode,
        "S": prefill_tokens + decode_tokens,
        "prefill_requests": prefill,
        "prefill_tokens": prefill_tokens,
        "context_tokens": used * number(cache, "tokensPerBlock") if np.isnan(context) else context,
        "prefill_context_tokens": prefill_context,
        "queued_requests": number(record, "numQueuedRequests"),
        "kv_usage": used / blocks if blocks > 0 else np.nan,
        "step": number(record, "iter"),
        "seconds": _parse_time(text(record, "timestamp")),
        **{name: number(record, name) for name in TIMES},
    }
    rows.add(row, {"replica": text(record, "attentionDpRank") or text(record, "rank")})


def _time_field(rows: Rows, busy: Array, overlapped: bool) -> str:
    """Return the preferred field that most busy iterations have, else the most frequent one."""
    known = {name: np.isfinite(rows.numbers(name)) for name in TIMES if overlapped or name != TIMES[1]}
    if busy.any():
        known = {name: mask & busy for name, mask in known.items()}
    needed = max(MIN_KNOWN_SHARE * np.count_nonzero(busy), 1)
    enough = (name for name, mask in known.items() if np.count_nonzero(mask) >= needed)
    return next(enough, max(TIMES, key=lambda name: np.count_nonzero(np.isfinite(rows.numbers(name)))))


def _parse_time(stamp: str) -> float:
    """Return the seconds of `MM-DD-YYYY hh:mm:ss.ffffff`; NaN for anything else."""
    try:
        return datetime.fromisoformat(f"{stamp[6:10]}-{stamp[:2]}-{stamp[3:5]}T{stamp[11:]}+00:00").timestamp()
    except (ValueError, OverflowError):
        return math.nan


TRTLLM = Reader("trtllm", "iteration statistics of TensorRT-LLM", recognises_trtllm, read_trtllm, path="gpu")

# ----------------------------------------------------------------------------------------------------------- Dynamo

FLAT = ("wall_time_s", "prefill_tokens", "prefill_requests", "decode_requests")
FPM_EXPECTED = "forward-pass metrics, such as Dynamo's: start the workers with --fpm-trace and DYN_FPM_MODE=full"


def recognises_dynamo(head: bytes) -> bool:
    return has_keys(head, "scheduled_requests", "wall_time") or has_columns(head, *FLAT)


def read_dynamo(source: Source, options: Options) -> Trace:
    """Return every forward pass; heartbeats of an idle worker are `idle`. A decode request computes one token."""
    refuse_table_options(options, source, "dynamo")
    return _read_flat(source) if has_columns(source.head, *FLAT) else _read_passes(source)


def _read_flat(source: Source) -> Trace:
    table = read_delimited(source)
    column = {name: numbers(values) for name, values in table.columns.items()}
    tally = Tally(bad=table.bad_lines)
    if not len(column[FLAT[0]]):
        raise no_steps(source, FPM_EXPECTED, tally)
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
    return Trace(found, {"format": "dynamo", **tally.facts()})


def _read_passes(source: Source) -> Trace:
    tally, rows = Tally(), Rows()
    modes: set[str] = set()
    for record in records(source, tally):
        event = record["event"] if isinstance(record.get("event"), dict) else record
        if add_pass(rows, event):
            modes.add(text(event, "capture_mode") or "full")
        else:
            tally.bad += 1
    if not rows.count:
        raise no_steps(source, FPM_EXPECTED, tally)
    return trace_of_passes(rows, modes).with_provenance(**tally.facts())


def trace_of_passes(rows: Rows, modes: Collection[str] = ("full",)) -> Trace:
    """Return the trace of rows made by `add_pass`."""
    columns = {name: column for name, column in rows.columns().items() if name != "seconds"}
    columns |= {"idle": rows.numbers("B") == 0, **rows.run_columns()}
    facts: dict[str, Any] = {"format": "dynamo", "capture_mode": "+".join(sorted(modes))}
    if set(modes) != {"full"}:
        facts["note"] = "sampled: steps between the samples are missing; DYN_FPM_MODE=full keeps them all"
    if "prefill_attention" in columns:
        columns, refused = fill_refused(columns)
        facts |= refused
    return Trace(columns, facts)


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
    rows.add(row, {"replica": f"{text(fpm, 'worker_id')}/{text(fpm, 'dp_rank')}"})
    return True


DYNAMO = Reader(
    "dynamo", "forward-pass metrics of NVIDIA Dynamo, vLLM or SGLang", recognises_dynamo, read_dynamo, path="gpu"
)
