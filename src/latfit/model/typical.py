"""What a step's cached context is taken to be where a caller names only its requests and tokens.

Zero would be wrong by as much as the context costs, so the fit keeps what was typical of its trace: the median, over
steps that decode, of cached tokens per decoding request, and the same for prefill where the trace tells them apart. A
step of B requests and S tokens without a context of its own is given as much a request.
"""

from collections.abc import Mapping

import numpy as np

from latfit.model.features import features
from latfit.stats import FloatArray

CONTEXT, PREFILL_CONTEXT = "context_tokens", "prefill_context_tokens"


def typical_context(steps: Mapping[str, FloatArray], weights: FloatArray) -> dict[str, float]:
    """Median cached tokens a decoding request (`context_tokens`) and a prefill request (`prefill_context_tokens`) of
    steps (n,) that stand for weights (n,) each; without what the steps do not tell."""
    if CONTEXT not in steps or not np.all(np.isfinite(steps[CONTEXT])):
        return {}
    seen = features(steps)
    found = {}
    for name, tokens, requests in ((CONTEXT, "KD", "D"), (PREFILL_CONTEXT, "KP", "n")):
        some = seen[requests] > 0
        if name in steps and some.any():
            found[name] = _median(seen[tokens][some] / seen[requests][some], weights[some])
    return found


def with_typical_context(steps: Mapping[str, FloatArray], typical: Mapping[str, float]) -> Mapping[str, FloatArray]:
    """The steps (n,), with typical cached tokens where they name none."""
    if CONTEXT in steps or not typical:
        return steps
    seen = features(steps)
    prefill = typical.get(PREFILL_CONTEXT, 0.0) * seen["n"]
    if PREFILL_CONTEXT in steps:
        prefill = steps[PREFILL_CONTEXT]
    decode = typical.get(CONTEXT, 0.0) * seen["D"]
    return {**steps, CONTEXT: np.asarray(decode + prefill), PREFILL_CONTEXT: np.asarray(prefill)}


def _median(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order[int(np.searchsorted(reached, 0.5 * reached[-1]))]])
