"""Read results of load generators, and logs of requests in JSON, as one row a request: see docs/formats.md.

A format yields each request as a row, or the reason to leave it out (a key of `recordings.LEFT_OUT`).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from latfit.errors import BadInput
from latfit.trace import Source, Tally, member, number, records

S, NS = 1e3, 1e-6  # units of time in ms

MAX_CHUNKS = 1 << 20  # of one streamed response


class Row(NamedTuple):
    """A request: when it was sent in ms, lengths in tokens, ms from then to the first and the last token."""

    sent_ms: float
    prompt: float
    output: float
    first_ms: float = math.nan
    last_ms: float = math.nan


@dataclass
class Log:
    """What a file holds besides requests: notes, ids of the blocks of prompts, and when its clock began (seconds)."""

    tally: Tally = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)
    contents: list[Any] = field(default_factory=list)
    began_s: float | None = None


Rows = Iterator[Row | str]


def _first(record: Any, *paths: str) -> float:
    found = (number(record, *path.split(".")) for path in paths)
    return next((value for value in found if not math.isnan(value)), math.nan)


def _most_requests(source: Source, log: Log, runs: str, requests: str, remedy: str) -> list[Any]:
    """Return the longest list of requests in a document of several runs."""
    for record in records(source, Tally()):
        every = record.get(runs)
        lists = [member(run, *requests.split(".")) for run in (every if isinstance(every, list) else ())]
        lists = [each for each in lists if isinstance(each, list)]
        if lists:
            longest: list[Any] = max(lists, key=len)
            if len(lists) > 1:
                log.notes.append(
                    f"{len(lists)} {runs} in the file: taken is the one with the most requests ({len(longest)})"
                )
            return longest
    raise BadInput(f"no {runs.removesuffix('s')} with its requests in it", remedy=remedy)


def _aiperf(source: Source, log: Log) -> Rows:
    names = ("input_sequence_length", "output_sequence_length", "time_to_first_token", "request_latency")
    for record in records(source, log.tally):
        if record.get("error"):
            yield "failed"
        elif member(record, "metadata", "benchmark_phase") not in (None, "profiling"):
            yield "warmup"
        else:
            sent_ms = number(record, "metadata", "request_start_ns") * NS
            yield Row(sent_ms, *(number(record, "metrics", name, "value") for name in names))


def _vllm_bench(source: Source, log: Log) -> Rows:
    """Yield the requests of a document with a list for each column; `start_times` come with --save-detailed."""
    record = next(records(source, log.tally), None)
    if record is None:
        raise BadInput("is cut short: its JSON does not end", remedy="Copy it again, or repeat the run.")
    starts = record.get("start_times")
    if not isinstance(starts, list):
        remedy = (
            "Run `vllm bench serve --save-result --save-detailed` of a newer version, or draw arrivals with --rate."
        )
        raise BadInput("holds lengths but no start times, so when the requests came is not known", remedy=remedy)
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):  # in the client's zone, taken for ours
        log.began_s = datetime.strptime(record["date"], "%Y%m%d-%H%M%S").timestamp() - float(record["duration"])
    columns: list[Any] = [record.get(name) for name in ("input_lens", "output_lens", "errors", "ttfts", "itls")]
    columns = [each if isinstance(each, list) else [None] * len(starts) for each in columns]
    for start, prompt, output, error, ttft, gaps in zip(starts, *columns, strict=False):
        if error or not output:
            yield "failed"
            continue
        first_ms = S * number(ttft)
        last_ms = first_ms + S * math.fsum(map(number, gaps)) if isinstance(gaps, list) else math.nan
        yield Row(S * number(start), number(prompt), number(output), first_ms, last_ms)


def _guidellm(source: Source, log: Log) -> Rows:
    remedy = "It may be cut short; else let GuideLLM save the requests, not only their summary."
    for request in _most_requests(source, log, "benchmarks", "requests.successful", remedy):
        yield Row(
            S * _first(request, "request_start_time", "start_time"),
            number(request, "prompt_tokens"),
            number(request, "output_tokens"),
            number(request, "time_to_first_token_ms"),
            number(request, "request_latency") * S,
        )


def _genai_perf(source: Source, log: Log) -> Rows:
    """Yield the requests by their responses; lengths are in the server's `usage` only."""
    for request in _most_requests(source, log, "experiments", "requests", "Give genai-perf's profile_export.json."):
        sent = number(request, "timestamp")
        moments, outputs = member(request, "response_timestamps"), member(request, "response_outputs")
        usage: Any = None
        with_text = []
        if isinstance(moments, list) and isinstance(outputs, list):
            for moment, output in zip(moments, outputs, strict=False):
                chunks = list(_chunks(member(output, "response")))
                usage = next((each["usage"] for each in chunks if isinstance(each.get("usage"), dict)), usage)
                if any(map(_has_text, chunks)):
                    with_text.append(number(moment))
        prompt, output_tokens = number(usage, "prompt_tokens"), number(usage, "completion_tokens")
        if not with_text or math.isnan(prompt + output_tokens + sent):
            yield "no_usage"
        else:
            yield Row(sent * NS, prompt, output_tokens, (with_text[0] - sent) * NS, (with_text[-1] - sent) * NS)


def _chunks(response: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a response: one, or events of a stream, `data: {...}`."""
    for line in response.splitlines()[:MAX_CHUNKS] if isinstance(response, str) else ():
        with suppress(ValueError, RecursionError):
            chunk = json.loads(line.removeprefix("data:"))
            if isinstance(chunk, dict):
                yield chunk


def _has_text(chunk: Mapping[str, Any]) -> bool:
    """Return whether a chunk adds text to the answer, in the APIs for chats and completions."""
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    places = (("delta", "content"), ("delta", "reasoning_content"), ("message", "content"), ("text",))
    return any(isinstance(text := member(first, *place), str) and text for place in places)


def _inference_perf(source: Source, log: Log) -> Rows:
    places = (("response_metrics", "output_token_times"), ("response_metrics", "chunk_times"), ("output_token_times",))
    for record in records(source, log.tally):
        info, sent = record.get("info"), number(record, "start_time")
        times = next((found for place in places if (found := member(info, *place))), None)
        moments = list(map(number, times)) if isinstance(times, list) else [math.nan]
        output = _first(info, "response_metrics.output_tokens", "output_tokens")
        if record.get("error") or not isinstance(info, dict) or output == 0:
            yield "failed"
            continue
        last = number(record, "end_time") if math.isnan(moments[-1]) else moments[-1]
        prompt = _first(info, "request_metrics.text.input_tokens", "input_tokens")
        yield Row(S * sent, prompt, output, (moments[0] - sent) * S, (last - sent) * S)


def _mooncake(source: Source, log: Log) -> Rows:
    """Yield requests with times in ms; traces with conversations (Qwen's, of Alibaba) count in seconds."""
    requests = list(records(source, log.tally))
    unit_ms = S if any("chat_id" in each for each in requests) else 1.0
    log.contents = [each.get("hash_ids") for each in requests]
    for record in requests:
        prompt, output = number(record, "input_length"), number(record, "output_length")
        yield Row(number(record, "timestamp") * unit_ms, prompt, output)


def _summary(source: Source, _: Log) -> Rows:
    remedy = "Give the file next to it: profile_export.json(l), or per_request_lifecycle_metrics.json (inference-perf)."
    raise BadInput("holds statistics of a run, not its requests", remedy=remedy)


FORMATS: Mapping[str, Callable[[Source, Log], Rows]] = {
    "AIPerf": _aiperf,
    "GuideLLM": _guidellm,
    "genai-perf": _genai_perf,
    "inference-perf": _inference_perf,
    "statistics": _summary,
    "vLLM bench": _vllm_bench,
    "Mooncake": _mooncake,
}  # by the names of `latfit.trace.request_format`; a file of none of these is a table
