"""NVIDIA Dynamo forward-pass metrics: `dynamo.fpm.trace.v1` JSON lines, with or without their envelope, and flat CSV.

S is the prefill tokens computed in the step and one token a decode request. `counter_id` numbers the passes of one
(worker, data-parallel rank), idle heartbeats among them, so gaps in it mean lost records, unless sampling left them
out.
"""

import math
from typing import Any

import numpy as np

from latfit.stats import FloatArray
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.request_lists import EXTEND, LONGEST, PAST, WORK, filled, request_terms
from latfit.trace.readers.row_builder import Gathered, from_start_of_run, no_steps, refuse_table_options, run_names
from latfit.trace.readers.source import Source
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

SCHEMA = b"dynamo.fpm.trace.v1"
FLAT = ("wall_time_s", "prefill_tokens", "prefill_requests", "decode_requests")
EXPECTED = "forward-pass metrics of Dynamo: start the workers with --fpm-trace and DYN_FPM_MODE=full"


def recognises(head: bytes) -> bool:
    return (has_keys(head, "fpm") and SCHEMA in head) or _is_flat(head)


def read(source: Source, options: Options) -> Trace:
    """Every pass in file order; heartbeats of an idle worker have B = 0 and the flag `idle`."""
    refuse_table_options(options, source, READER.name)
    return _read_flat(source) if _is_flat(source.head) else _read_lines(source)


def _is_flat(head: bytes) -> bool:
    return has_columns(head, *FLAT)


def _read_flat(source: Source) -> Trace:
    table = read_delimited(source)
    column = {name: numbers(values) for name, values in table.columns.items()}
    if not len(column[FLAT[0]]):
        raise no_steps(source, EXPECTED, Tally(bad=table.bad_lines))
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
    return Trace(found, {"format": READER.name, **Tally(bad=table.bad_lines).facts()})


def _read_lines(source: Source) -> Trace:
    tally, rows = Tally(), Gathered()
    modes: set[str] = set()
    for record in records(source, tally):
        event = record["event"] if isinstance(record.get("event"), dict) else record
        if isinstance(member(event, "fpm", "scheduled_requests"), dict):
            _add(rows, event)
            modes.add(text(event, "capture_mode") or "full")
        else:
            tally.bad += 1
    if not rows.rows:
        raise no_steps(source, EXPECTED, tally)
    runs = run_names(rows.labels("replica"), rows.numbers("step"))
    columns = {name: column for name, column in rows.columns().items() if name != "seconds"}
    columns |= {"run": np.array(runs, dtype=object), "idle": rows.numbers("B") == 0}
    seconds = rows.numbers("seconds")
    if np.isfinite(seconds).any():
        columns["t_s"] = from_start_of_run(seconds, runs)
    facts: dict[str, Any] = {"format": READER.name, "capture_mode": "+".join(sorted(modes)), **tally.facts()}
    if modes != {"full"}:
        facts["note"] = "sampled: steps between the samples are missing; DYN_FPM_MODE=full keeps them all"
    else:
        facts["lost_steps"] = _lost(runs, rows.numbers("step"))
    if WORK in columns:
        columns, refused = filled(columns)
        facts |= refused
    return Trace(columns, facts)


def _add(rows: Gathered, event: dict[str, Any]) -> None:
    fpm = event["fpm"]
    done = fpm["scheduled_requests"]
    prefill, decode = number(done, "num_prefill_requests"), number(done, "num_decode_requests")
    prefill_tokens, prefill_context = number(done, "sum_prefill_tokens"), number(done, "sum_prefill_kv_tokens")
    wall_s = number(fpm, "wall_time")
    waiting = number(fpm, "queued_requests", "num_prefill_requests")
    paused = number(fpm, "queued_requests", "num_decode_requests")
    work, longest = request_terms(done.get(EXTEND), done.get(PAST), prefill + decode, prefill_tokens + decode)
    rows.add(
        {
            WORK: work,
            LONGEST: longest,
            "B": prefill + decode,
            "S": prefill_tokens + decode,
            "T_ms": wall_s * MS_PER_UNIT["s"],
            # A record is written when the pass is over.
            "seconds": number(event, "observed_at_unix_ms") / MS_PER_UNIT["s"] - wall_s,
            "prefill_requests": prefill,
            "prefill_tokens": prefill_tokens,
            "context_tokens": prefill_context + number(done, "sum_decode_kv_tokens"),
            "prefill_context_tokens": prefill_context,
            "queued_requests": waiting + paused,
            "step": number(fpm, "counter_id"),
        },
        {"replica": f"{text(fpm, 'worker_id')}/{text(fpm, 'dp_rank')}"},
    )


def _lost(runs: list[str], counters: FloatArray) -> int:
    """How many counter values are missing inside the runs."""
    last: dict[str, float] = {}
    lost = 0.0
    for run, counter in zip(runs, counters.tolist(), strict=True):
        if not math.isfinite(counter):
            continue
        lost += max(0.0, counter - last.get(run, counter - 1) - 1)
        last[run] = counter
    return int(lost)


READER = Reader("dynamo", "forward-pass metrics of NVIDIA Dynamo", recognises, read, path="gpu")
