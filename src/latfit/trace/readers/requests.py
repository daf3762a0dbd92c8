"""Recognise files of request arrivals, which hold no steps: reading one names the command that uses it."""

import shlex

from latfit.errors import BadInput
from latfit.trace.readers.source import Options, Reader, Source, has_keys, header_of
from latfit.trace.table import REQUIRED, Trace

TIMES = ("t_s", "arrived_at")
PROMPTS = ("prompt_tokens", "num_prefill_tokens")
OUTPUTS = ("output_tokens", "num_decode_tokens")

TABLES = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
)  # Azure (times are dates) and BurstGPT (seconds)

FORMATS = (
    ("AIPerf", ("metadata", "metrics", "request_start_ns")),
    ("GuideLLM", ("benchmarks", "guidellm_version")),
    ("GuideLLM", ("benchmarks", "generative_benchmark")),
    ("genai-perf", ("experiments", "requests", "response_timestamps")),
    ("inference-perf", ("start_time", "end_time", "info")),
    ("inference-perf", ("scheduled_time", "start_time", "end_time")),
    ("statistics", ("request_throughput", "request_latency", "avg")),
    ("statistics", ("load_summary", "successes")),
    ("vLLM bench", ("input_lens", "output_lens")),
    ("Mooncake", ("timestamp", "input_length", "output_length")),
)  # JSON of load generators and of recorded requests, by keys in its first bytes


def request_format(head: bytes) -> str | None:
    """Return which of FORMATS a file is, by its first bytes; None for a table or another file."""
    return next((name for name, keys in FORMATS if has_keys(head, *keys)), None)


def recognises(head: bytes) -> bool:
    """Return whether this is a table or JSON of requests with their lengths, in a known shape."""
    names = set(header_of(head))
    known = {*names, *(key for key in (*TIMES, *PROMPTS, *OUTPUTS, *REQUIRED) if has_keys(head, key))}
    if any(set(table) <= names for table in TABLES) or request_format(head) is not None:
        return True
    return all(known & set(group) for group in (TIMES, PROMPTS, OUTPUTS)) and not set(REQUIRED) <= known


def read(source: Source, options: Options) -> Trace:
    raise BadInput(
        "holds request arrivals, not steps",
        where=source.name,
        remedy=f"Simulate them with latfit simulate engine --arrivals {shlex.quote(source.name)};"
        " a fit needs a trace of steps.",
    )


READER = Reader("arrivals", "request arrivals (for latfit simulate engine)", recognises, read)
