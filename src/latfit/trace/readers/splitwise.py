"""The measured grid of splitwise-sim (`perf_model.csv`, milliseconds): one prefill and one mean decode step a line."""

from collections.abc import Mapping

import numpy as np

from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.row_builder import no_steps, refuse_table_options
from latfit.trace.readers.source import Source
from latfit.trace.readers.text import Tally, has_columns, numbers, read_delimited, texts
from latfit.trace.table import Array, Trace

NEEDED = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")
LABELS = ("hardware", "model")


def recognises(head: bytes) -> bool:
    return has_columns(head, *NEEDED)


def read(source: Source, options: Options) -> Trace:
    """Two steps a line in file order. The decode step is a mean over the output, its context that of the middle."""
    refuse_table_options(options, source, READER.name)
    table = read_delimited(source)
    missing = [name for name in NEEDED if name not in table.columns]
    if missing or not len(table.columns[NEEDED[0]]):
        raise no_steps(source, f"the columns {', '.join(NEEDED)}", Tally(bad=table.bad_lines))
    facts = {"format": READER.name, "aggregated": "mean decode step", **Tally(bad=table.bad_lines).facts()}
    return Trace(_columns(table.columns), facts)


def _columns(found: Mapping[str, Array]) -> dict[str, Array]:
    prompt, B, output, prefill_ms, decode_ms = (numbers(found[name]) for name in NEEDED)
    nothing = np.zeros_like(B)
    columns: dict[str, Array] = {
        "B": _alternating(B, B),
        "S": _alternating(B * prompt, B),
        "T_ms": _alternating(prefill_ms, decode_ms),
        "phase": np.array(["prefill", "decode"] * len(B), dtype=object),
        "prefill_requests": _alternating(B, nothing),
        "prefill_tokens": _alternating(B * prompt, nothing),
        "context_tokens": _alternating(nothing, B * (prompt + output / 2)),
    }
    columns |= {name: np.repeat(texts(found[name]), 2) for name in LABELS if name in found}
    if "tensor_parallel" in found:
        columns["tp"] = np.repeat(found["tensor_parallel"], 2)
    return columns


def _alternating(prefill: Array, decode: Array) -> Array:
    return np.stack([prefill, decode], axis=1).ravel()


READER = Reader("splitwise", "the measured grid of splitwise-sim", recognises, read, path="gpu")
