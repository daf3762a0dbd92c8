"""B1 and B2: from which batch the GPU beats the CPU, and from which batch its launch cost is paid off.

B1 is the smallest batch with T_gpu(B) <= T_cpu(B). The two curves may cross never, once or several times, so every
batch is compared and all winning stretches are returned. B2 is the smallest batch whose throughput reaches a share 1
- eps of the best throughput there is, B/T(B) >= (1 - eps) max_b b/T(b); for T = tau + alpha B without a limit on B
this is ceil(tau (1/eps - 1)/alpha), the batch at which the launch cost tau is the share eps of the step.
"""

import numpy as np
from numpy.typing import NDArray

from latfit.hardware.profile import ExecutionPath
from latfit.plan.result import Threshold
from latfit.stats import FloatArray

AMORTISED_SHARE = 0.5
"""eps of B2: half of the best throughput."""


def batches_of(*paths: ExecutionPath) -> FloatArray:
    """1, 2, 3, ... up to the largest batch that every path has measured."""
    top = min(int(path.fit.domain["B"][1]) for path in paths)
    return np.arange(1.0, max(top, 1) + 1)


def gpu_threshold(cpu: ExecutionPath, gpu: ExecutionPath, tokens_per_request: int) -> Threshold:
    """B1 for requests of so many tokens each, within the batches that both paths have measured."""
    B = batches_of(cpu, gpu)
    S = B * tokens_per_request
    wins = gpu.fit.latency_ms(B, S) <= cpu.fit.latency_ms(B, S)
    stretches = _stretches(B, wins)
    top = int(B[-1])
    if not stretches:
        return Threshold(None, f"never: {cpu.name} is faster at every measured batch, 1 to {top}")
    first = stretches[0][0]
    if bool(wins.all()):
        return Threshold(1, f"always: {gpu.name} is at least as fast at every measured batch, 1 to {top}", stretches)
    if len(stretches) == 1 and stretches[0][1] == top:
        return Threshold(
            first, f"{gpu.name} is at least as fast from {first} to {top}, the largest measured", stretches
        )
    spans = ", ".join(f"{low} to {high}" for low, high in stretches)
    return Threshold(first, f"{gpu.name} is at least as fast only for batches {spans}", stretches)


def amortised_batch(path: ExecutionPath, tokens_per_request: int) -> Threshold:
    """B2 of a path, within the batches it has measured."""
    B = batches_of(path)
    rate = B / path.fit.latency_ms(B, B * tokens_per_request)
    reached = np.flatnonzero(rate >= (1 - AMORTISED_SHARE) * rate.max())
    best = int(B[int(np.argmax(rate))])
    share = f"{(1 - AMORTISED_SHARE):.0%}"
    return Threshold(int(B[reached[0]]), f"from here on {share} of the best measured throughput, reached at {best}")


def _stretches(B: FloatArray, wins: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wins, [False]]).astype(int)))
    return [(int(B[start]), int(B[end - 1])) for start, end in zip(edges[::2], edges[1::2], strict=True)]
