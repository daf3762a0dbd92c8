"""SGLang `bench_one_batch --result-filename`: JSON lines, seconds; one prefill and one decode step each.

The decode latency is the median over the output, so its context is taken in the middle of the output.
"""

import math
from typing import Any

from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.row_builder import Gathered, no_steps, refuse_table_options
from latfit.trace.readers.source import Source
from latfit.trace.readers.text import Tally, has_keys, number, records, text
from latfit.trace.table import Trace
from latfit.units import MS_PER_UNIT

EXPECTED = "what python -m sglang.bench_one_batch --result-filename FILE writes: batch_size, input_len, prefill_latency"


def recognises(head: bytes) -> bool:
    return has_keys(head, "batch_size", "input_len", "prefill_latency")


def read(source: Source, options: Options) -> Trace:
    """Two steps a line in file order; one where the output is a single token, which prefill makes."""
    refuse_table_options(options, source, READER.name)
    tally, rows = Tally(), Gathered()
    for record in records(source, tally):
        if math.isnan(number(record, "batch_size")) or math.isnan(number(record, "prefill_latency")):
            tally.bad += 1
        else:
            _add(rows, record)
    if not rows.rows:
        raise no_steps(source, EXPECTED, tally)
    return Trace(rows.columns(), {"format": READER.name, "aggregated": "median decode step", **tally.facts()})


def _add(rows: Gathered, record: dict[str, Any]) -> None:
    B, prompt, output = (number(record, name) for name in ("batch_size", "input_len", "output_len"))
    labels = {"run_name": text(record, "run_name")}
    prefill = {
        "B": B,
        "S": B * prompt,
        "T_ms": number(record, "prefill_latency") * MS_PER_UNIT["s"],
        "prefill_requests": B,
        "prefill_tokens": B * prompt,
        "context_tokens": 0.0,
    }
    rows.add(prefill, {**labels, "phase": "prefill"})
    decode_s = number(record, "median_decode_latency")
    if not math.isnan(decode_s):
        decode = {
            "B": B,
            "S": B,
            "T_ms": decode_s * MS_PER_UNIT["s"],
            "prefill_requests": 0.0,
            "prefill_tokens": 0.0,
            "context_tokens": B * (prompt + output / 2),
        }
        rows.add(decode, {**labels, "phase": "decode"})


READER = Reader("sglang", "results of SGLang's bench_one_batch", recognises, read, path="gpu")
