"""Result files of load generators as measured runs: when each request was sent, its lengths, its first and last token.

- vLLM's `bench serve --save-result --save-detailed`: `start_times`, `ttfts` and gaps `itls` in seconds.
- AIPerf's `profile_export.jsonl`: `request_start_ns`, `time_to_first_token` and `request_latency` in ms.
- GuideLLM's JSON: `request_start_time`, `time_to_first_token_ms`, `request_latency` in seconds; of several benchmarks
  the one with the most requests.

They count from when the client sent a request, so the network is in what was measured. Failed requests and warm-up are
left out.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.readers.jsonlines import Tally, has_keys, member, number, records
from latfit.trace.readers.source import Source

Row = tuple[float, float, float, float, float]
"""Sent (ms on a clock of the file's own), prompt, output, time to first token (ms), latency (ms)."""


def rows_of(source: Source) -> FloatArray | None:
    """The requests (n, 5), in order of sending from moment 0 on, as in `Row`; None for a file of another kind."""
    for keys, read in FORMATS:
        if not has_keys(source.head, *keys):
            continue
        table = np.array(list(read(source)), dtype=np.float64).reshape(-1, 5)
        if not len(table):
            raise BadInput("no request with its times in it", where=source.name, remedy="It may be cut short.")
        table[:, 0] -= np.nanmin(table[:, 0])
        return table[np.argsort(table[:, 0], kind="stable")]
    return None


def _vllm_bench(source: Source) -> Iterator[Row]:
    names = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
    for record in records(source, Tally()):
        columns: list[Any] = [record.get(name) for name in names]
        missing = [name for name, column in zip(names, columns, strict=True) if not isinstance(column, list)]
        if missing:
            raise BadInput(
                f"holds no {', '.join(missing)}, so when tokens came is not known",
                where=source.name,
                remedy="Run `vllm bench serve --save-result --save-detailed` of a version that writes them.",
            )
        errors = record.get("errors") or [""] * len(columns[0] or [])
        for sent, prompt, output, ttft, gaps, error in zip(*columns, errors, strict=False):
            if not error and output:
                yield 1e3 * sent, prompt, output, 1e3 * ttft, 1e3 * (ttft + sum(gaps))


def _aiperf(source: Source) -> Iterator[Row]:
    for record in records(source, Tally()):
        if record.get("error") or member(record, "metadata", "benchmark_phase") not in (None, "profiling"):
            continue
        # Whole nanoseconds since 1970 lose digits as floats of milliseconds: microseconds here, which is enough.
        yield (
            number(record, "metadata", "request_start_ns") * 1e-6,
            number(record, "metrics", "input_sequence_length", "value"),
            number(record, "metrics", "output_sequence_length", "value"),
            number(record, "metrics", "time_to_first_token", "value"),
            number(record, "metrics", "request_latency", "value"),
        )


def _guidellm(source: Source) -> Iterator[Row]:
    found: list[list[Any]] = []
    for record in records(source, Tally()):
        for benchmark in record.get("benchmarks") or []:
            served = member(benchmark, "requests", "successful")
            found += [served] if isinstance(served, list) else []
    for each in max(found, key=len, default=[]):
        sent = number(each, "request_start_time")
        yield (
            1e3 * (sent if np.isfinite(sent) else number(each, "start_time")),
            number(each, "prompt_tokens"),
            number(each, "output_tokens"),
            number(each, "time_to_first_token_ms"),
            1e3 * number(each, "request_latency"),
        )


FORMATS: tuple[tuple[tuple[str, ...], Callable[[Source], Iterator[Row]]], ...] = (
    (("metadata", "metrics", "request_start_ns"), _aiperf),
    (("benchmarks", "guidellm_version"), _guidellm),
    (("benchmarks", "generative_benchmark"), _guidellm),
    (("input_lens", "output_lens"), _vllm_bench),
)
"""Keys that a format's first bytes hold."""
