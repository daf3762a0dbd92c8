"""Read results of load generators, and logs of requests in JSON, as one row a request: see docs/formats.md.

A format finds its requests in a file and turns each into a row, or into the reason to leave it out (a key of
`recordings.LEFT_OUT`). genai-perf has lengths only in the server's `usage`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from latfit.errors import BadInput
from latfit.trace import Source, Tally, member, number, records

S, MS, NS = 1e3, 1.0, 1e-6
"""Units of time in ms."""

MAX_CHUNKS = 1 << 20  # of one streamed response


class Row(NamedTuple):
    """A request: when it was sent (in the format's unit), lengths in tokens, ms to the first and the last token."""

    sent: float
    prompt: float
    output: float
    first_ms: float = math.nan
    last_ms: float = math.nan


class Found(NamedTuple):
    """The requests of a file, the unit of their times in ms, notes, and when they began in seconds since 1970.

    contents: ids of the blocks of each prompt, if known.
    """

    requests: Iterable[Any]
    unit_ms: float
    notes: tuple[str, ...] = ()
    began_s: float | None = None
    contents: Sequence[Any] = ()


@dataclass(frozen=True)
class Format:
    """One format: find the requests of a file (raises BadInput), and turn a request into a row."""

    find: Callable[[Source, Tally], Found]
    row: Callable[[Any], Row | str]


def rows_of(source: Source, name: str, tally: Tally) -> tuple[Found, list[Row], Counter[str]]:
    """Return what a format finds, the rows of its requests, and how many were left out by reason. Raises BadInput."""
    found = FORMATS[name].find(source, tally)
    made = [FORMATS[name].row(request) for request in found.requests]
    dropped = Counter(each for each in made if isinstance(each, str))
    if 2 * dropped["no_usage"] > len(made):
        raise BadInput(
            f"has no lengths of {dropped['no_usage']:,} of {len(made):,} requests",
            where=source.name,
            remedy="Let the server report them: genai-perf ... --extra-inputs"
            ' \'{"stream_options": {"include_usage": true}}\', or measure with AIPerf.',
        )
    return found, [each for each in made if isinstance(each, Row)], +dropped


def _first(record: Any, *paths: str) -> float:
    """Return the first number under dotted paths."""
    found = (number(record, *path.split(".")) for path in paths)
    return next((value for value in found if not math.isnan(value)), math.nan)


def _most_requests(source: Source, runs: str, requests: str, remedy: str) -> tuple[list[Any], tuple[str, ...]]:
    """Return the longest list of requests in a document of several runs, and a note if there are several."""
    for record in records(source, Tally()):
        every = record.get(runs)
        lists = [member(run, *requests.split(".")) for run in (every if isinstance(every, list) else ())]
        lists = [each for each in lists if isinstance(each, list)]
        if lists:
            longest = max(lists, key=len)
            note = f"{len(lists)} {runs} in the file: taken is the one with the most requests ({len(longest)})"
            return longest, (note,) if len(lists) > 1 else ()
    raise BadInput(f"no {runs.removesuffix('s')} with its requests in it", where=source.name, remedy=remedy)


# ----------------------------------------------------------------------------------------------------------- AIPerf


def _aiperf_row(record: Any) -> Row | str:
    if record.get("error"):
        return "failed"
    if member(record, "metadata", "benchmark_phase") not in (None, "profiling"):
        return "warmup"
    names = ("input_sequence_length", "output_sequence_length", "time_to_first_token", "request_latency")
    return Row(
        number(record, "metadata", "request_start_ns"), *(number(record, "metrics", name, "value") for name in names)
    )


# ------------------------------------------------------------------------------------------------------- vLLM bench


def _vllm_bench(source: Source, tally: Tally) -> Found:
    """Find the requests of a document with a list for each column; `start_times` come with --save-detailed."""
    for record in records(source, tally):
        starts, *columns = (record.get(name) for name in ("start_times", "input_lens", "output_lens"))
        if not isinstance(starts, list):
            raise BadInput(
                "holds lengths but no start times, so when the requests came is not known",
                where=source.name,
                remedy="Run `vllm bench serve --save-result --save-detailed` of a version that writes start_times, or"
                " draw arrivals with --rate.",
            )
        if all(isinstance(column, list) for column in columns):
            others = [record.get(name) for name in ("errors", "ttfts", "itls")]
            others = [each if isinstance(each, list) else [None] * len(starts) for each in others]
            return Found(zip(starts, *columns, *others, strict=False), S, began_s=_began_s(record))
    raise BadInput("no result of vllm bench serve in it", where=source.name, remedy="It may be cut short.")


def _vllm_bench_row(request: Any) -> Row | str:
    start, prompt, output, error, ttft, gaps = request
    if error or not output:
        return "failed"
    first_ms = S * number(ttft)
    last_ms = first_ms + S * math.fsum(map(number, gaps)) if isinstance(gaps, list) else math.nan
    return Row(number(start), number(prompt), number(output), first_ms, last_ms)


def _began_s(record: Mapping[str, Any]) -> float | None:
    """Return when a benchmark began, from its end `date` in the client's zone, taken for this machine's."""
    try:
        ended = datetime.strptime(record["date"], "%Y%m%d-%H%M%S")
        return ended.timestamp() - float(record["duration"])
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None


# --------------------------------------------------------------------------------------------------------- GuideLLM


def _guidellm(source: Source, _: Tally) -> Found:
    remedy = "It may be cut short; else let GuideLLM save the requests, not only their summary."
    requests, notes = _most_requests(source, "benchmarks", "requests.successful", remedy)
    return Found(requests, S, notes)


def _guidellm_row(request: Any) -> Row:
    return Row(
        _first(request, "request_start_time", "start_time"),
        number(request, "prompt_tokens"),
        number(request, "output_tokens"),
        number(request, "time_to_first_token_ms"),
        number(request, "request_latency") * S,
    )


# ------------------------------------------------------------------------------------------------------- genai-perf


def _genai_perf(source: Source, _: Tally) -> Found:
    requests, notes = _most_requests(source, "experiments", "requests", "Give genai-perf's profile_export.json.")
    return Found(requests, NS, notes)


def _genai_perf_row(request: Any) -> Row | str:
    """Return a row by the request's responses; those without lengths or text are left out."""
    sent = number(request, "timestamp")
    moments, outputs = member(request, "response_timestamps"), member(request, "response_outputs")
    usage: Any = None
    with_text = []
    if isinstance(moments, list) and isinstance(outputs, list):
        for moment, output in zip(moments, outputs, strict=False):
            chunks = _chunks(member(output, "response"))
            usage = next((each["usage"] for each in chunks if isinstance(each.get("usage"), dict)), usage)
            if any(map(_has_text, chunks)):
                with_text.append(number(moment))
    prompt, output_tokens = number(usage, "prompt_tokens"), number(usage, "completion_tokens")
    if not with_text or math.isnan(prompt + output_tokens + sent):
        return "no_usage"
    return Row(sent, prompt, output_tokens, (with_text[0] - sent) * NS, (with_text[-1] - sent) * NS)


def _chunks(response: Any) -> list[dict[str, Any]]:
    """Return the objects of a response: one, or events of a stream, `data: {...}`."""
    found = []
    for line in response.splitlines()[:MAX_CHUNKS] if isinstance(response, str) else ():
        try:
            chunk = json.loads(line.removeprefix("data:"))
        except (ValueError, RecursionError):
            continue
        if isinstance(chunk, dict):
            found.append(chunk)
    return found


def _has_text(chunk: Mapping[str, Any]) -> bool:
    """Return whether a chunk adds text to the answer, in the APIs for chats and completions."""
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    places = (("delta", "content"), ("delta", "reasoning_content"), ("message", "content"), ("text",))
    return any(isinstance(text := member(first, *place), str) and text for place in places)


# --------------------------------------------------------------------------------------------------- inference-perf


def _inference_perf_row(record: Any) -> Row | str:
    info, sent = record.get("info"), number(record, "start_time")
    times = (
        member(info, "response_metrics", "output_token_times")
        or member(info, "response_metrics", "chunk_times")
        or member(info, "output_token_times")
    )
    moments = list(map(number, times)) if isinstance(times, list) and times else [math.nan]
    output = _first(info, "response_metrics.output_tokens", "output_tokens")
    if record.get("error") or not isinstance(info, dict) or output == 0:
        return "failed"
    last = number(record, "end_time") if math.isnan(moments[-1]) else moments[-1]
    prompt = _first(info, "request_metrics.text.input_tokens", "input_tokens")
    return Row(sent, prompt, output, (moments[0] - sent) * S, (last - sent) * S)


# --------------------------------------------------------------------------------------------------------- Mooncake


def _mooncake(source: Source, tally: Tally) -> Found:
    """Find requests in order of arrival; traces with conversations (Qwen's, of Alibaba) count in seconds."""
    requests = list(records(source, tally))
    unit_ms = S if any("chat_id" in each for each in requests) else MS
    return Found(requests, unit_ms, contents=[each.get("hash_ids") for each in requests])


def _mooncake_row(record: Any) -> Row:
    return Row(*(number(record, name) for name in ("timestamp", "input_length", "output_length")))


def _summary(source: Source, _: Tally) -> Found:
    raise BadInput(
        "holds statistics of a run, not its requests",
        where=source.name,
        remedy="Give the file beside it: profile_export.json (genai-perf), profile_export.jsonl (AIPerf) or"
        " per_request_lifecycle_metrics.json (inference-perf).",
    )


FORMATS: Mapping[str, Format] = {
    "AIPerf": Format(lambda source, tally: Found(records(source, tally), NS), _aiperf_row),
    "GuideLLM": Format(_guidellm, _guidellm_row),
    "genai-perf": Format(_genai_perf, _genai_perf_row),
    "inference-perf": Format(lambda source, tally: Found(records(source, tally), S), _inference_perf_row),
    "statistics": Format(_summary, lambda _: "failed"),
    "vLLM bench": Format(_vllm_bench, _vllm_bench_row),
    "Mooncake": Format(_mooncake, _mooncake_row),
}
"""By the names of `latfit.trace.request_format`; a file of none of these is a table."""
