"""B1, B2 and the knee: docs/theory/planning.md, "Thresholds".

All batches are compared, since latency curves may cross several times.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from latfit.hardware import CERTAIN, ExecutionPath, PathLatency
from latfit.model import step_draws
from latfit.planning import wording
from latfit.planning.result import Interval, Reach, Threshold
from latfit.stats import FloatArray
from latfit.units import format_percent

AMORTISED_SHARE = 0.5  # throughput loss accepted at B2, by default
MOST_PROMPT_TOKENS = 1 << 17
DRAWN_PROMPTS = 800  # lengths at which draws are compared


def gpu_threshold(cpu: PathLatency, gpu: PathLatency, *, extra_ms: float = 0.0) -> Threshold:
    """Return B1 within the batches that both paths measured. extra_ms: before the GPU begins."""
    B = min(cpu.batches, gpu.batches, key=len)
    return _first_win((cpu.path, gpu.path), "batch", B, np.ones(len(B), dtype=bool), cpu.steps(B), extra_ms)


def prefill_threshold(cpu: ExecutionPath, gpu: ExecutionPath, *, extra_ms: float = 0.0) -> Threshold:
    """Return the prompt length from which the GPU is as fast for one request."""
    blind = [path.label for path in (cpu, gpu) if not path.fit.knows_prefill]
    if blind:
        reason = f"the fit of {' and of '.join(blind)} contains no prefill; measure some"
        return Threshold(None, reason, reach=Reach.UNKNOWN)
    top = min(int(path.fit.domain["S"][1]) for path in (cpu, gpu))
    S = np.arange(1.0, min(max(top, 1), MOST_PROMPT_TOKENS) + 1)
    drawn = np.isin(S, np.round(np.geomspace(1, S[-1], DRAWN_PROMPTS)))
    one = np.ones_like(S)
    steps = {"B": one, "S": S, "prefill_requests": one, "prefill_tokens": S}
    return _first_win((cpu, gpu), "prompt length", S, drawn, steps, extra_ms)


def _first_win(
    paths: tuple[ExecutionPath, ExecutionPath],
    what: str,
    x: FloatArray,
    some: NDArray[np.bool_],
    steps: dict[str, FloatArray],
    extra_ms: float,
) -> Threshold:
    """Return the first x (n,) at which the second path wins; draws are compared at `some` (n,) of them."""
    slow, fast = (path.fit.latency_ms(**steps) for path in paths)
    wins, top = fast + extra_ms <= slow, int(x[-1])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wins, [False]]).astype(int)))
    ranges = [(int(x[a]), int(x[b - 1])) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    reach = Reach.ALWAYS if wins.all() else Reach.FROM if ranges else Reach.NEVER
    reason = wording.describe_wins(paths[0 if reach is Reach.NEVER else 1].label, reach, ranges, what, top)
    interval, never = None, None
    fewer = {name: column[some] for name, column in steps.items()}
    drawn = [step_draws(path.fit, fewer, seed=seed) for seed, path in enumerate(paths)]
    if any(T is not None for T in drawn):  # a fit without draws (nominal) stays fixed
        slow, fast = (T[None, some] if own is None else own for T, own in zip((slow, fast), drawn, strict=True))
        won = fast + extra_ms <= slow
        values = np.where(won.any(axis=1), x[some][np.argmax(won, axis=1)], np.inf)
        interval, never = _interval_of(values), float(np.mean(np.isinf(values)))
    return Threshold(ranges[0][0] if ranges else None, reason, ranges, interval, never, reach)


def amortised_batch(latency: PathLatency, loss: float = AMORTISED_SHARE) -> Threshold:
    """Return B2 within the measured batches. loss: accepted share of the best throughput."""
    B, T = latency.batches, latency.typical_ms(latency.batches)
    share, best = format_percent(100 * (1 - loss)), int(B[int(np.argmax(B / T))])
    reason = f"from here on at least {share} of the best throughput, that of {best}"
    return _best_batch(latency, lambda T: int(np.argmax((1 - loss) * (B / T).max() <= B / T)), reason)


def knee_batch(latency: PathLatency) -> Threshold:
    """Return the batch that maximises throughput over latency, B/T(B)^2."""
    B = latency.batches
    at_end = int(np.argmax(B / latency.typical_ms(B) ** 2)) == len(B) - 1 > 0
    end = " (the largest measured: the knee may lie beyond)" if at_end else ""
    return _best_batch(latency, lambda T: int(np.argmax(B / T**2)), f"throughput over latency is highest{end}")


def _best_batch(latency: PathLatency, place: Callable[[FloatArray], int], reason: str) -> Threshold:
    B = latency.batches
    drawn = step_draws(latency.path.fit, latency.steps(B))
    interval = None if drawn is None else _interval_of(np.array([B[place(T)] for T in drawn]))
    return Threshold(int(B[place(latency.typical_ms(B))]), reason, interval=interval)


def _interval_of(values: FloatArray) -> Interval:
    ends = np.quantile(values, CERTAIN, method="inverted_cdf")
    low, high = (float(end) if np.isfinite(end) else None for end in ends)
    return low, high
