"""Read results of genai-perf and inference-perf as rows (time sent, prompt, output, ms to first and last token).

genai-perf's `profile_export.json` has lengths only in the server's `usage`. inference-perf writes
`per_request_lifecycle_metrics.json`. https://github.com/triton-inference-server/perf_analyzer,
https://github.com/kubernetes-sigs/inference-perf/docs/how-to/size-deployment.md
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from latfit.errors import BadInput
from latfit.trace import Source, Tally, member, number, records

Row = tuple[float, float, float, float, float]
S, NS = 1e3, 1e-6
"""Units of time in ms."""

MOST_CHUNKS = 1 << 20


def genai_perf_rows(source: Source) -> tuple[list[Row], Mapping[str, int], tuple[str, ...]]:
    """(rows, dropped, notes) of the experiment with the most requests; the time sent in ns. Raises BadInput."""
    for record in records(source, Tally()):
        experiments = record.get("experiments")
        if not isinstance(experiments, list):
            continue
        lists = [each for each in (member(one, "requests") for one in experiments) if isinstance(each, list)]
        if not lists:
            break
        longest = max(lists, key=len)
        rows = [row for request in longest if (row := _of_responses(request)) is not None]
        if len(rows) < len(longest) / 2:
            raise BadInput(
                f"tells no lengths of {len(longest) - len(rows):,} of {len(longest):,} requests",
                where=source.name,
                remedy="Let the server tell them: genai-perf ... --extra-inputs"
                ' \'{"stream_options": {"include_usage": true}}\', or measure with AIPerf.',
            )
        note = f"{len(lists)} experiments in the file: taken is the one with the most requests ({len(longest)})"
        dropped = {"no_usage": len(longest) - len(rows)} if len(rows) < len(longest) else {}
        return rows, dropped, (note,) if len(lists) > 1 else ()
    raise BadInput(
        "no experiment with its requests in it", where=source.name, remedy="Give genai-perf's profile_export.json."
    )


def _of_responses(request: Any) -> Row | None:
    """A request by its responses; None where they tell no lengths or hold no text."""
    sent, moments, outputs = (
        member(request, name) for name in ("timestamp", "response_timestamps", "response_outputs")
    )
    if not isinstance(moments, list) or not isinstance(outputs, list):
        return None
    usage: Any = None
    told: list[float] = []
    for moment, output in zip(moments, outputs, strict=False):
        chunks = list(_chunks(member(output, "response")))
        usage = next((each["usage"] for each in chunks if isinstance(each.get("usage"), dict)), usage)
        if any(_text(each) for each in chunks):
            told.append(number(moment))
    prompt, output_tokens = number(usage, "prompt_tokens"), number(usage, "completion_tokens")
    begun = number(sent)
    if not told or math.isnan(prompt + output_tokens + begun):
        return None
    return begun, prompt, output_tokens, (told[0] - begun) * NS, (told[-1] - begun) * NS


def _chunks(response: Any) -> Iterator[dict[str, Any]]:
    """The objects of a response: one, or events of a stream, `data: {...}`."""
    if not isinstance(response, str):
        return
    for line in response.splitlines()[:MOST_CHUNKS]:
        text = line.removeprefix("data:").strip()
        if not text.startswith("{"):
            continue
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def _text(chunk: Mapping[str, Any]) -> str:
    """What a chunk adds to the answer, of the APIs for chats and completions."""
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    places = (("delta", "content"), ("delta", "reasoning_content"), ("message", "content"), ("text",))
    return next((text for place in places if isinstance(text := member(first, *place), str) and text), "")


def inference_perf_rows(source: Source) -> tuple[list[Row], Mapping[str, int]]:
    """(rows, dropped), the time sent in seconds."""
    tally = Tally()
    dropped: Counter[str] = Counter()
    rows = []
    for record in records(source, tally):
        info, response = record.get("info"), member(record, "info", "response_metrics")
        if record.get("error") or not isinstance(info, dict):
            dropped["failed"] += 1
            continue
        begun, ended = number(record, "start_time"), number(record, "end_time")
        times = (
            member(response, "output_token_times") or member(response, "chunk_times") or info.get("output_token_times")
        )
        first = last = math.nan
        if isinstance(times, list) and times:
            first, last = number(times[0]), number(times[-1])
        prompt = _first(number(info, "request_metrics", "text", "input_tokens"), number(info, "input_tokens"))
        output = _first(number(response, "output_tokens"), number(info, "output_tokens"))
        if output == 0:
            dropped["failed"] += 1
            continue
        rows.append((begun, prompt, output, (first - begun) * S, (_first(last, ended) - begun) * S))
    return rows, {**dropped, **tally.facts()}


def _first(*values: float) -> float:
    return next((value for value in values if not math.isnan(value)), math.nan)
