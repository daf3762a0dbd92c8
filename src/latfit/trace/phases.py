"""Which phase a step is in: as the trace says, else as its columns imply."""

import numpy as np
from numpy.typing import NDArray

from latfit.trace.table import Trace

DECODE, PREFILL, MIXED = "decode", "prefill", "mixed"
UNKNOWN = "prefill or mixed"
"""A step with more tokens than requests, where nothing says whether some of them decode."""


def phases(trace: Trace) -> NDArray[np.object_]:
    """DECODE, PREFILL, MIXED or UNKNOWN for each row (n,); other names that a source uses are kept."""
    if "phase" in trace:
        return np.array([str(phase) for phase in trace["phase"].tolist()], dtype=object)
    B, S = trace.floats("B"), trace.floats("S")
    if "prefill_tokens" in trace:
        prefill = trace.floats("prefill_tokens")
        return np.where(prefill == 0, DECODE, np.where(prefill >= S, PREFILL, MIXED)).astype(object)
    return np.where(S == B, DECODE, UNKNOWN).astype(object)
