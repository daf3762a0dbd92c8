"""Which phase a step is in: as the trace says, else as its columns imply."""

import numpy as np
from numpy.typing import NDArray

from latfit.trace.table import Trace

UNKNOWN = "prefill or mixed"
"""A step with more tokens than requests, where nothing says whether some of them decode."""


def phases(trace: Trace) -> NDArray[np.object_]:
    """`decode`, `prefill`, `mixed` or UNKNOWN for each row (n,); other names that a source uses are kept."""
    if "phase" in trace:
        return np.array([str(phase) for phase in trace["phase"].tolist()], dtype=object)
    B, S = trace.floats("B"), trace.floats("S")
    if "prefill_tokens" in trace:
        prefill = trace.floats("prefill_tokens")
        return np.where(prefill == 0, "decode", np.where(prefill >= S, "prefill", "mixed")).astype(object)
    return np.where(S == B, "decode", UNKNOWN).astype(object)
