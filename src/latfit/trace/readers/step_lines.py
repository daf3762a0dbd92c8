"""Lines of text about steps: TensorRT-LLM's iteration lines, SGLang's log, tables of llama-batched-bench."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from latfit.trace.readers.engines import Rows, step_reader
from latfit.trace.readers.source import Source, Tally, has_keys, number, records, seconds_of
from latfit.trace.table import Array
from latfit.units import MS_PER_UNIT

MAX_LINE_BYTES = 1 << 20
TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
FIELD = re.compile(r"(#?\b[A-Za-z_][\w /()-]{0,40}?)'?(?:: | = |=)(-?\d{1,15}(?:\.\d{1,20})?(?:e-?\d{1,2})?)(?![\d.])")
"""A number with its name: `step = 3`, `tokens=3`, `#queue-req: 3`, `'num_ctx_tokens': 3`."""


def lines_of(source: Source) -> Iterator[str]:
    with source.open() as stream:
        while line := stream.readline(MAX_LINE_BYTES):
            yield line.decode("utf-8", "replace")


def fields_in(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in FIELD.findall(text)}


def seconds_in(text: str) -> float:
    """Return the seconds of the first `YYYY-MM-DD hh:mm:ss`, NaN without one."""
    found = TIME.search(text)
    return seconds_of(found[0]) if found else math.nan


ITERATION = re.compile(r"\biter = \d+, global_rank = \d+, rank = (\d{1,9}), .*?host_step_time = ")
STATES = ("num_ctx_requests", "num_ctx_tokens", "num_generation_tokens")


def trtllm_log_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return every iteration of `print_iter_log`. An iteration's time on the device is in the next line of its rank."""
    rows = Rows()
    waiting: dict[str, tuple[int, float]] = {}
    for line in lines_of(source):
        if (found := ITERATION.search(line)) is None:
            continue
        fields = fields_in(line[found.start() :])
        if not {*STATES, "iter", "host_step_time", "num_scheduled_requests"} <= set(fields):
            tally["bad_lines"] += 1
            continue
        step, rank, B = fields["iter"], found[1], fields["num_scheduled_requests"]
        row, before = waiting.get(rank, (0, math.nan))
        if before == step - 1 and "prev_device_step_time" in fields:
            rows.values["T_ms"][row] = fields["prev_device_step_time"]
        waiting[rank] = rows.count, step
        # Without a request, the states are those of the iteration before.
        requests, prompt, decode = (fields[name] if B else 0 for name in STATES)
        values = {
            "B": B,
            "S": prompt + decode,
            "T_ms": math.nan,
            "prefill_requests": requests,
            "prefill_tokens": prompt,
            "context_tokens": fields.get("cached_kv_tokens", math.nan),
            "kv_usage": fields.get("kv_cache_util", math.nan),
            "step": step,
            "host_step_ms": fields["host_step_time"],
            "seconds": seconds_in(line[found.end() :]),
        }
        rows.add({**values, "replica": rank})
    columns = {**rows.columns(), "idle": rows.numbers("B") == 0}
    host_ms, has_times = columns.pop("host_step_ms", rows.numbers("")), bool(np.isfinite(rows.numbers("T_ms")).any())
    facts["latency_field"] = "prev_device_step_time" if has_times else "host_step_time"
    return columns if has_times else {**columns, "T_ms": host_ms}


TRTLLM_LOG = step_reader(
    "trtllm-log",
    "a TensorRT-LLM log with print_iter_log: true",
    lambda head: b"[TRT-LLM] [" in head or ITERATION.search(head.decode("utf-8", "replace")) is not None,
    trtllm_log_steps,
)


BATCH = re.compile(r"\b(Decode|Prefill) batch(?: \[\d+\])?[,.] (#.*)")
RANKS = re.compile(r"\b(DP|PP)(\d+)\b")
SGLANG_SETTINGS = {
    "max_total_num_tokens": "kv_capacity_tokens",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_running_requests": "max_num_seqs",
    "decode_log_interval": "decode_log_interval",
    "speculative_num_draft_tokens": "speculative_num_draft_tokens",
}
USUAL_INTERVAL = 40  # decode steps per line
MAX_LOAD_CHANGE = 1 / 3  # of the running requests within a window, relative to their mean


def sglang_log_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return a row for each window of decode steps, and for each prefill step whose time the log shows.

    A decode line reports tokens per second since the one before, so with B requests a step takes B over these. A
    prefill line reports those of the prefill step before it, which is sure only for steps that fill
    `chunked_prefill_size`. Both hold only within three lines of a kind; all other lines are counted as `unsteady`.
    """
    rows = Rows()
    settings: dict[str, int] = {}
    history: dict[str, list[tuple[str, dict[str, float]]]] = {}
    unsteady = starts = 0
    for line in lines_of(source):
        if "max_total_num_tokens=" in line or "server_args=" in line:
            fields = fields_in(line)
            settings |= {ours: int(fields[name]) for name, ours in SGLANG_SETTINGS.items() if name in fields}
            starts += "server_args=" in line
        if (found := BATCH.search(line)) is None:
            continue
        ranks = dict(RANKS.findall(line[: found.start()]))
        if ranks.get("PP", "0") != "0":
            continue
        replica = f"DP{ranks.get('DP', '0')}/{starts}"
        last = history.setdefault(replica, [])
        last.append((found[1], fields_in(found[2])))
        del last[:-3]
        row = _row_of_sglang(last, settings)
        if row is None:
            unsteady += 1
            continue
        rows.add({**row, "seconds": seconds_in(line[: found.start()]), "replica": replica})
    facts |= {**settings, "unsteady": unsteady}
    return rows.columns()


def _row_of_sglang(lines: list[tuple[str, dict[str, float]]], settings: dict[str, int]) -> dict[str, float] | None:
    """Return the step that the last of three lines of a kind shows; None if it shows none."""
    kinds, fields = zip(*lines, strict=True)
    if len(lines) < 3 or len(set(kinds)) > 1:
        return None
    first, before, now = ({name.replace("full ", ""): value for name, value in each.items()} for each in fields)
    row = {"queued_requests": now.get("#queue-req", math.nan), "kv_usage": now.get("token usage", math.nan)}
    row |= dict.fromkeys(("step", "context_tokens", "window_ms", "window_steps"), math.nan)
    if kinds[0] == "Decode":
        running = before.get("#running-req", 0), now.get("#running-req", 0)
        B, rate = sum(running) / 2, now.get("gen throughput (token/s)", 0)
        if min(running) < 1 or abs(running[1] - running[0]) > MAX_LOAD_CHANGE * B or not rate > 0:
            return None
        T = B * now.get("accept len", 1.0) / rate * MS_PER_UNIT["s"]
        cached = sum(each.get("#token", math.nan) for each in (before, now)) / 2
        steps = settings.get("decode_log_interval", USUAL_INTERVAL)
        S = B * settings.get("speculative_num_draft_tokens", 1)
        row |= {"B": B, "S": S, "T_ms": T, "prefill_requests": 0, "prefill_tokens": 0, "context_tokens": cached}
        return row if steps == 1 else row | {"window_ms": steps * T, "window_steps": float(steps)}
    chunk, rate = before.get("#new-token", 0), now.get("input throughput (token/s)", 0)
    if not 0 < settings.get("max_num_batched_tokens", 0) == chunk == first.get("#new-token") or not rate > 0:
        return None
    B = before.get("#new-seq", math.nan)
    T = chunk / rate * MS_PER_UNIT["s"]
    return row | {"B": B, "S": chunk, "T_ms": T, "prefill_requests": B, "prefill_tokens": chunk}


SGLANG_LOG = step_reader(
    "sglang-log",
    "the log of an SGLang server with lines of steady decode batches",
    lambda head: b"server_args=ServerArgs(" in head or BATCH.search(head.decode("utf-8", "replace")) is not None,
    sglang_log_steps,
)


BENCH_NAMES = {"PP": "pp", "TG": "tg", "B": "pl", "T_PP s": "t_pp", "S_PP t/s": "speed_pp"}
BENCH_NAMES |= {"T_TG s": "t_tg", "S_TG t/s": "speed_tg"}
BENCH_HEADER = re.compile(r"^\|\s*PP \|\s+TG \|\s+B \|.*T_PP s", re.MULTILINE)
USUAL_BATCH = 2048


def llama_bench_steps(source: Source, tally: Tally, facts: dict[str, Any]) -> Mapping[str, Array]:
    """Return two steps per result, prefill and decode, each the mean of its calls of llama_decode."""
    rows = Rows()
    facts["aggregated"] = "mean step of a result"
    for result in _bench_results(source, tally):
        prompt, output, B = (number(result, name) for name in ("pp", "tg", "pl"))
        if not (B >= 1 and prompt >= 0 and output >= 0):
            tally["bad_lines"] += 1
            continue
        batch = number(result, "n_batch")
        of_prompt = 1 if number(result, "is_pp_shared") == 1 else B
        at_once = 1 if number(result, "is_tg_separate") == 1 else B
        tokens = prompt * of_prompt
        batches = math.ceil(tokens / (batch if batch >= 1 else USUAL_BATCH))
        path = "cpu" if number(result, "n_gpu_layers") == 0 else "gpu"
        for name, calls, total, requests, prefill in (
            ("pp", batches, tokens, max(of_prompt / max(batches, 1), 1.0), True),
            ("tg", output * B / at_once, output * B, at_once, False),
        ):
            if not calls:
                continue
            time_s, speed = number(result, f"t_{name}"), number(result, f"speed_{name}")
            # The table has three decimals of the time, two of the speed: the one with more digits counts.
            seconds = total / speed if speed > 10 * time_s else time_s
            S = total / calls
            values = {
                "B": requests,
                "S": S,
                "T_ms": seconds / calls * MS_PER_UNIT["s"],
                "prefill_requests": requests if prefill else 0,
                "prefill_tokens": S if prefill else 0,
                "context_tokens": math.nan if prefill else requests * (prompt + output / 2),
            }
            rows.add({**values, "phase": "prefill" if prefill else "decode", "path": path})
    return rows.columns()


def _bench_results(source: Source, tally: Tally) -> Iterator[dict[str, Any]]:
    """Yield each result under the names of the JSON form, with the settings above its table."""
    if has_keys(source.head, *BENCH_NAMES.values()):
        yield from records(source, tally)
        return
    settings: dict[str, Any] = {}
    header: list[str] = []
    for line in lines_of(source):
        cells = [cell.strip() for cell in line.strip().strip("\\").strip("|").split("|")]
        if BENCH_HEADER.match(line):
            header = cells
        elif not line.startswith("|"):
            settings |= fields_in(line)
        elif header and not cells[0].startswith("-"):
            if len(cells) == len(header):
                yield {**settings, **{BENCH_NAMES.get(n, n): cell for n, cell in zip(header, cells, strict=True)}}
            else:
                tally["bad_lines"] += 1


LLAMA_BENCH = step_reader(
    "llama-bench",
    "the table of llama-batched-bench, or its lines with --output-format jsonl",
    lambda head: (
        has_keys(head, *BENCH_NAMES.values()) or BENCH_HEADER.search(head.decode("utf-8", "replace")) is not None
    ),
    llama_bench_steps,
    path=None,
)
