"""Lines of text about steps: TensorRT-LLM's iteration lines, SGLang's log, tables of llama-batched-bench."""

import math
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import numpy as np

from latfit.trace.readers.engines import Rows, no_steps, refuse_table_options
from latfit.trace.readers.source import Options, Reader, Source
from latfit.trace.readers.text import Tally, has_keys, number, records
from latfit.trace.table import Trace
from latfit.units import MS_PER_UNIT

MAX_LINE_BYTES = 1 << 20
TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")


def lines_of(source: Source) -> Iterator[str]:
    with source.open() as stream:
        while line := stream.readline(MAX_LINE_BYTES):
            yield line.decode("utf-8", "replace")


def seconds_in(text: str) -> float:
    """Return the seconds of the first `YYYY-MM-DD hh:mm:ss`, NaN without one."""
    found = TIME.search(text)
    try:
        return datetime.fromisoformat(f"{found[0]}+00:00").timestamp() if found else math.nan
    except ValueError:
        return math.nan


# ----------------------------------------------------------------------------------------------------- TensorRT-LLM

DECIMAL = r"\d{1,15}(?:\.\d{1,20})?(?:e-\d{1,2})?"
ITERATION = re.compile(
    r"\biter = (?P<step>\d{1,15}), global_rank = \d+, rank = (?P<rank>\d{1,9}), .*?"
    rf"host_step_time = (?P<host>{DECIMAL}) ?ms, prev_device_step_time = (?:(?P<previous>{DECIMAL}) ?ms|N/A), "
)
STATES = re.compile(
    r"'num_ctx_requests': (\d{1,15}), 'num_ctx_tokens': (\d{1,15}), 'num_generation_tokens': (\d{1,15})\b"
)
SCHEDULED = re.compile(r"num_scheduled_requests(?::| =) (\d{1,15})")
CACHED = re.compile(r"'cached_kv_tokens': (\d{1,15})")
CACHE_USAGE = re.compile(r"kv_cache_util = (\d\.\d{1,9})")


def read_trtllm_log(source: Source, options: Options) -> Trace:
    """Return every iteration of `print_iter_log`. An iteration's time on the device is in the next line of its rank."""
    refuse_table_options(options, source, "trtllm-log")
    tally, rows = Tally(), Rows()
    T: list[float] = []
    waiting: dict[str, tuple[int, int]] = {}
    for line in lines_of(source):
        found = ITERATION.search(line)
        if found is None:
            continue
        states, scheduled = STATES.search(line, found.end()), SCHEDULED.search(line)
        if states is None or scheduled is None:
            tally.bad += 1
            continue
        step, rank, B = int(found["step"]), found["rank"], int(scheduled[1])
        row, before = waiting.get(rank, (0, -1))
        if before == step - 1 and found["previous"]:
            T[row] = float(found["previous"])
        waiting[rank] = rows.count, step
        T.append(math.nan)
        # Without a request, the states are those of the iteration before.
        requests, prompt, decode = map(int, states.groups()) if B else (0, 0, 0)
        cached, usage = CACHED.search(line), CACHE_USAGE.search(line)
        values = {
            "B": B,
            "S": prompt + decode,
            "prefill_requests": requests,
            "prefill_tokens": prompt,
            "context_tokens": float(cached[1]) if cached else math.nan,
            "kv_usage": float(usage[1]) if usage else math.nan,
            "step": step,
            "host_step_ms": float(found["host"]),
            "seconds": seconds_in(line[found.end() :]),
        }
        rows.add(values, {"replica": rank})
    if not rows.count:
        raise no_steps(source, "the log of TensorRT-LLM with print_iter_log: true", tally)
    times = np.array(T)
    field = "prev_device_step_time"
    if not np.isfinite(times).any():
        field, times = "host_step_time", rows.numbers("host_step_ms")
    columns = {name: each for name, each in rows.columns().items() if name not in ("host_step_ms", "seconds")}
    columns |= {"T_ms": times, "idle": rows.numbers("B") == 0, **rows.run_columns()}
    if len(set(columns["run"].tolist())) == 1:
        del columns["run"], columns["replica"]
    return Trace(columns, {"format": "trtllm-log", "latency_field": field, **tally.facts()})


TRTLLM_LOG = Reader(
    "trtllm-log",
    "a TensorRT-LLM log with print_iter_log",
    lambda head: b"[TRT-LLM] [" in head or ITERATION.search(head.decode("utf-8", "replace")) is not None,
    read_trtllm_log,
    path="gpu",
)

# ----------------------------------------------------------------------------------------------------------- SGLang

BATCH = re.compile(r"\b(Decode|Prefill) batch(?: \[\d+\])?[,.] (#.*)")
RANKS = re.compile(r"\b(DP|PP)(\d+)\b")
SGLANG_SETTINGS = {
    "max_total_num_tokens": "kv_capacity_tokens",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_running_requests": "max_num_seqs",
    "decode_log_interval": "decode_log_interval",
    "speculative_num_draft_tokens": "speculative_num_draft_tokens",
}
SETTING = re.compile(rf"\b({'|'.join(SGLANG_SETTINGS)})=(\d+)")
USUAL_INTERVAL = 40  # decode steps per line
MAX_LOAD_CHANGE = 1 / 3  # of the running requests within a window, relative to their mean


def read_sglang_log(source: Source, options: Options) -> Trace:
    """Return a row for each window of decode steps, and for each prefill step whose time the log shows.

    A decode line reports the tokens per second since the one before, so with B requests a step takes B over these. A
    prefill line reports those of the prefill step before it, if no other step came between: sure only for steps that
    fill `chunked_prefill_size`, behind which the rest of the prompt is due. Both hold only within three lines of a
    kind, since a line may be written a step early. All other lines are counted as `unsteady`.
    """
    refuse_table_options(options, source, "sglang-log")
    rows = Rows()
    settings: dict[str, int] = {}
    history: dict[str, list[tuple[str, dict[str, float]]]] = {}
    unsteady = starts = 0
    for line in lines_of(source):
        if "max_total_num_tokens=" in line or "server_args=" in line:
            settings |= {SGLANG_SETTINGS[name]: int(value) for name, value in SETTING.findall(line)}
            starts += "server_args=" in line
        if (found := BATCH.search(line)) is None:
            continue
        ranks = dict(RANKS.findall(line[: found.start()]))
        if ranks.get("PP", "0") != "0":
            continue
        replica = f"DP{ranks.get('DP', '0')}/{starts}"
        last = history.setdefault(replica, [])
        last.append((found[1], _fields(found[2])))
        del last[:-3]
        row = _row_of_sglang(last, settings)
        if row is None:
            unsteady += 1
            continue
        rows.add(row | {"seconds": seconds_in(line[: found.start()])}, {"replica": replica})
    if not rows.count:
        seen = f" ({unsteady} of changing load)" if unsteady else ""
        raise no_steps(source, f"lines of steady decode batches of SGLang's scheduler{seen}", Tally())
    columns = {name: each for name, each in rows.columns().items() if name != "seconds"}
    columns |= rows.run_columns()
    return Trace(columns, {"format": "sglang-log", **settings, "unsteady": unsteady})


def _fields(text: str) -> dict[str, float]:
    """Return the numbers of `#running-req: 3, token usage: 0.02, ...`."""
    parts = (part.partition(": ") for part in text.strip().rstrip(",").split(", "))
    return {name: number({"": value}, "") for name, _, value in parts}


def _row_of_sglang(lines: list[tuple[str, dict[str, float]]], settings: dict[str, int]) -> dict[str, float] | None:
    """Return the step that the last of three lines of a kind shows; None if it shows none."""
    kinds, fields = zip(*lines, strict=True)
    if len(lines) < 3 or len(set(kinds)) > 1:
        return None
    first, before, now = fields
    usage = next((now[name] for name in ("token usage", "full token usage") if name in now), math.nan)
    row = {"queued_requests": now.get("#queue-req", math.nan), "kv_usage": usage}
    row |= dict.fromkeys(("step", "context_tokens", "window_ms", "window_steps"), math.nan)
    if kinds[0] == "Decode":
        running = before.get("#running-req", 0), now.get("#running-req", 0)
        B, rate = sum(running) / 2, now.get("gen throughput (token/s)", 0)
        if min(running) < 1 or abs(running[1] - running[0]) > MAX_LOAD_CHANGE * B or not rate > 0:
            return None
        T = B * now.get("accept len", 1.0) / rate * MS_PER_UNIT["s"]
        cached = sum(each.get("#token", each.get("#full token", math.nan)) for each in (before, now)) / 2
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


SGLANG_LOG = Reader(
    "sglang-log",
    "the log of an SGLang server",
    lambda head: b"server_args=ServerArgs(" in head or BATCH.search(head.decode("utf-8", "replace")) is not None,
    read_sglang_log,
    path="gpu",
)

# ------------------------------------------------------------------------------------------------------- llama.cpp

BENCH_NAMES = {
    "PP": "pp",
    "TG": "tg",
    "B": "pl",
    "T_PP s": "t_pp",
    "S_PP t/s": "speed_pp",
    "T_TG s": "t_tg",
    "S_TG t/s": "speed_tg",
}
BENCH_HEADER = re.compile(r"^\|\s*PP \|\s+TG \|\s+B \|.*T_PP s", re.MULTILINE)
BENCH_SETTING = re.compile(r"\b(n_batch|is_pp_shared|is_tg_separate|n_gpu_layers) = (-?\d+)")
USUAL_BATCH = 2048


def read_llama_bench(source: Source, options: Options) -> Trace:
    """Return two steps per result, prefill and decode, each the mean of its calls of llama_decode.

    A prompt is computed in calls of `n_batch` tokens. The decode step's context is that in the middle of the output.
    """
    refuse_table_options(options, source, "llama-bench")
    tally, rows = Tally(), Rows()
    for result in _bench_results(source, tally):
        prompt, output, B = (number(result, name) for name in ("pp", "tg", "pl"))
        if not (B >= 1 and prompt >= 0 and output >= 0):
            tally.bad += 1
            continue
        known = {name: number(result, name) for name in ("n_batch", "is_pp_shared", "is_tg_separate")}
        of_prompt = 1 if known["is_pp_shared"] == 1 else B
        at_once = 1 if known["is_tg_separate"] == 1 else B
        tokens = prompt * of_prompt
        batches = math.ceil(tokens / (known["n_batch"] if known["n_batch"] >= 1 else USUAL_BATCH))
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
            rows.add(values, {"phase": "prefill" if prefill else "decode", "path": path})
    if not rows.count:
        raise no_steps(source, "the table of llama-batched-bench, or its lines with --output-format jsonl", tally)
    return Trace(rows.columns(), {"format": "llama-bench", "aggregated": "mean step of a result", **tally.facts()})


def _bench_results(source: Source, tally: Tally) -> Iterator[dict[str, Any]]:
    """Yield each result under the names of the JSON form, with the settings above its table."""
    if has_keys(source.head, *BENCH_NAMES.values()):
        yield from records(source, tally)
        return
    settings: dict[str, Any] = {}
    header: list[str] = []
    for line in lines_of(source):
        settings |= BENCH_SETTING.findall(line)
        cells = [cell.strip() for cell in line.strip().strip("\\").strip("|").split("|")]
        if BENCH_HEADER.match(line):
            header = cells
        elif line.startswith("|") and header and not cells[0].startswith("-"):
            if len(cells) == len(header):
                yield {**settings, **{BENCH_NAMES.get(n, n): cell for n, cell in zip(header, cells, strict=True)}}
            else:
                tally.bad += 1


LLAMA_BENCH = Reader(
    "llama-bench",
    "results of llama-batched-bench",
    lambda head: (
        has_keys(head, *BENCH_NAMES.values()) or BENCH_HEADER.search(head.decode("utf-8", "replace")) is not None
    ),
    read_llama_bench,
)
