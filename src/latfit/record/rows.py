"""A step as bytes, and blocks of such bytes as trace columns.

The engine's thread packs a step with one call into C, into memory that is there already; everything that costs more
(columns, phases, context) happens on whole blocks in the writer's thread.
"""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.trace.schema import PHASES
from latfit.trace.table import Array

FIELDS = (
    ("t_s", "d", "<f8"),
    ("T_ms", "d", "<f8"),
    ("step", "q", "<i8"),
    ("prefill_requests", "i", "<i4"),
    ("prefill_tokens", "q", "<i8"),
    ("decode_requests", "i", "<i4"),
    ("decode_tokens", "q", "<i8"),
    ("queued_requests", "i", "<i4"),
    ("kv_usage", "d", "<f8"),
    ("encoder_inputs", "i", "<i4"),
    ("encoder_embeddings", "q", "<i8"),
    ("dummy", "?", "?"),
)
"""Name, code for `struct`, type for NumPy: the same bytes seen from either side."""

ROW = struct.Struct("<" + "".join(code for _, code, _ in FIELDS))
ROW_TYPE = np.dtype([(name, kind) for name, _, kind in FIELDS])


class Block:
    """Memory for a file's rows. The engine's thread moves `used`, the writer's thread `written`; both count bytes.

    That each has its own is what makes locks needless: the writer may take rows from a block that still fills.
    """

    __slots__ = ("memory", "used", "written")

    def __init__(self, rows: int) -> None:
        # np.zeros asks the system for pages that cost nothing until the first row touches them.
        self.memory = np.zeros(rows * ROW.size, dtype=np.uint8).data
        self.used = 0
        self.written = 0

    def rows(self, until: int) -> NDArray[Any]:
        """The rows not yet written, up to `until` bytes: a view, structured as ROW_TYPE."""
        return np.frombuffer(self.memory[self.written : until], dtype=ROW_TYPE)


def columns(rows: NDArray[Any], labels: Mapping[str, str | int], kv_capacity_tokens: int | None) -> dict[str, Array]:
    """Trace columns of packed rows; every file has the same ones, so that a folder of files reads as one table."""
    prefill, decode = rows["prefill_requests"], rows["decode_requests"]
    # Fixed-width text, because pyarrow converts it without the interpreter's lock, which the engine needs.
    phase = np.array(PHASES)[np.where(prefill == 0, 0, np.where(decode == 0, 1, 2))]
    found: dict[str, Array] = {
        "B": prefill + decode,
        "S": rows["prefill_tokens"] + rows["decode_tokens"],
        "T_ms": rows["T_ms"].copy(),
        "t_s": rows["t_s"].copy(),
        "phase": phase,
        "prefill_requests": prefill.copy(),
        "prefill_tokens": rows["prefill_tokens"].copy(),
    }
    if kv_capacity_tokens is not None:
        found["context_tokens"] = _rounded(rows["kv_usage"] * kv_capacity_tokens)
    for name in ("queued_requests", "kv_usage", "step", "dummy", "encoder_inputs", "encoder_embeddings"):
        found[name] = rows[name].copy()
    for name, value in labels.items():
        found[name] = np.full(len(rows), value)
    return found


def _rounded(tokens: NDArray[np.float64]) -> Array:
    """Whole tokens as int64; left as float where some are unknown."""
    whole: Array = np.rint(tokens)
    return whole.astype(np.int64) if np.isfinite(whole).all() else whole
