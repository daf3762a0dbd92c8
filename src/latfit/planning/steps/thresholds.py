"""Batch thresholds: B1, from which the GPU beats the CPU; B2, which reaches a share of the best throughput; the knee.

All batches are compared, since the latency curves may cross several times. Intervals are the 95 % quantiles of each
answer over the fit's parameter draws. Formulas: docs/theory/planning.md, "Thresholds".
"""

from collections.abc import Callable

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from latfit.hardware import CERTAIN, ExecutionPath, PathLatency, step_draws
from latfit.planning import wording
from latfit.planning.result import Interval, Reach, Threshold
from latfit.stats import FloatArray
from latfit.units import format_percent

AMORTISED_SHARE = 0.5
"""Throughput loss eps accepted at B2: half of the best throughput."""

MOST_PROMPT_TOKENS = 1 << 17


def gpu_threshold(cpu: PathLatency, gpu: PathLatency, *, extra_ms: float = 0.0) -> Threshold:
    """Return B1 within the batches that both paths measured. extra_ms: wait and transfer before the GPU begins."""
    B = min(cpu.batches, gpu.batches, key=len)
    wins = gpu.typical_ms(B) + extra_ms <= cpu.typical_ms(B)
    found = _first_win(B, wins, cpu.label, gpu.label, "batch")
    return _with_interval(found, (cpu.path, gpu.path), B, cpu.steps(B), extra_ms)


def prefill_threshold(cpu: ExecutionPath, gpu: ExecutionPath, *, extra_ms: float = 0.0) -> Threshold:
    """Return the prompt length from which the GPU is as fast for one request, within the measured lengths."""
    blind = [path.label for path in (cpu, gpu) if not path.fit.knows_prefill]
    if blind:
        reason = f"the fit of {' and of '.join(blind)} contains no prefill; measure some"
        return Threshold(None, reason, reach=Reach.UNKNOWN)
    top = min(int(path.fit.domain["S"][1]) for path in (cpu, gpu))
    S = np.arange(1.0, min(max(top, 1), MOST_PROMPT_TOKENS) + 1)
    one = np.ones_like(S)
    steps = {"B": one, "S": S, "prefill_requests": one, "prefill_tokens": S}
    wins = gpu.fit.latency_ms(**steps) + extra_ms <= cpu.fit.latency_ms(**steps)
    found = _first_win(S, wins, cpu.label, gpu.label, "prompt length")
    some = np.unique(np.round(np.geomspace(1, S[-1], 800))).astype(int) - 1
    steps = {name: column[some] for name, column in steps.items()}
    return _with_interval(found, (cpu, gpu), steps["S"], steps, extra_ms)


def amortised_batch(latency: PathLatency, share: float = AMORTISED_SHARE) -> Threshold:
    """Return B2 within the measured batches. share: accepted throughput loss eps."""
    B = latency.batches

    def reached(T: FloatArray) -> int:
        rate = B / T
        return int(B[np.flatnonzero(rate >= (1 - share) * rate.max())[0]])

    T = latency.typical_ms(B)
    best = int(B[int(np.argmax(B / T))])
    reason = f"from here on at least {format_percent(100 * (1 - share))} of the best throughput, that of {best}"
    return Threshold(reached(T), reason, interval=_interval_of(latency, reached))


def knee_batch(latency: PathLatency) -> Threshold:
    """Return the batch that maximises throughput over latency, B/T(B)^2."""
    B = latency.batches

    def knee(T: FloatArray) -> int:
        return int(B[int(np.argmax(B / T**2))])

    value = knee(latency.typical_ms(B))
    end = " (the largest measured: the knee may lie beyond)" if value == int(B[-1]) > 1 else ""
    return Threshold(value, f"throughput over latency is highest{end}", interval=_interval_of(latency, knee))


def _first_win(x: FloatArray, wins: NDArray[np.bool_], cpu: str, gpu: str, what: str) -> Threshold:
    stretches = _stretches(x, wins)
    top = int(x[-1])
    reach = Reach.ALWAYS if wins.all() else Reach.FROM if stretches else Reach.NEVER
    reason = wording.faster(cpu if reach is Reach.NEVER else gpu, reach, stretches, what, top)
    return Threshold(stretches[0][0] if stretches else None, reason, stretches, reach=reach)


def _with_interval(
    found: Threshold,
    paths: tuple[ExecutionPath, ExecutionPath],
    x: FloatArray,
    steps: dict[str, FloatArray],
    extra_ms: float,
) -> Threshold:
    """Add the interval in x over both fits' draws; a fit without draws (nominal) stays fixed."""
    drawn = [step_draws(path, steps, seed) for seed, path in enumerate(paths)]
    if all(T is None for T in drawn):
        return found
    slow, fast = (
        path.fit.latency_ms(**steps)[None, :] if T is None else T for path, T in zip(paths, drawn, strict=True)
    )
    wins = fast + extra_ms <= slow
    values = np.where(wins.any(axis=1), x[np.argmax(wins, axis=1)], np.inf)
    never = float(np.mean(np.isinf(values)))
    return structs.replace(found, interval=_quantiles(values), never_share=never)


def _interval_of(latency: PathLatency, answer: Callable[[FloatArray], int]) -> Interval | None:
    drawn = step_draws(latency.path, latency.steps(latency.batches))
    return None if drawn is None else _quantiles(np.array([float(answer(T)) for T in drawn]))


def _quantiles(values: FloatArray) -> Interval:
    """Return the interval of integers that contains 95 % of the values; an infinite end is None."""
    low, high = np.quantile(values, CERTAIN, method="inverted_cdf")
    return (_end(float(low)), _end(float(high)))


def _end(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _stretches(B: FloatArray, wins: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wins, [False]]).astype(int)))
    return [(int(B[start]), int(B[end - 1])) for start, end in zip(edges[::2], edges[1::2], strict=True)]
