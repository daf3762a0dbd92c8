"""B1 and B2: from which batch the GPU beats the CPU, and from which batch its launch cost is paid off.

B1 is the smallest batch with T_gpu(B) + wait + transfer <= T_cpu(B). The two curves may cross never, once or several
times, so every batch is compared and all winning stretches are returned. Over the tokens of a single prompt the same
comparison gives the prefill threshold: from how many tokens on the GPU is worth going to.

B2 is the smallest batch whose throughput reaches a share 1 - eps of the best there is, B/T(B) >= (1 - eps) max_b
b/T(b); for T = tau + alpha B without a limit on B this is ceil(tau (1/eps - 1)/alpha), the batch at which the launch
cost tau is the share eps of the step. The knee maximises throughput over latency, B/T(B)^2 (Kleinrock's power); for a
straight line it is tau/alpha, the B2 of eps = 1/2.

Intervals: the same answer from each of the curves that a fit's data allow (`model.fit_result`), 2.5 % to 97.5 % of
them.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from latfit.hardware import ExecutionPath, batch_steps, typical_ms
from latfit.model import latency_draws, parameter_draws
from latfit.planning.result import Interval, Threshold
from latfit.stats import FloatArray

AMORTISED_SHARE = 0.5
"""eps of B2: half of the best throughput."""

MOST_PROMPT_TOKENS = 1 << 17
CERTAIN = (0.025, 0.975)


def batches_of(*paths: ExecutionPath, tokens: int = 1) -> FloatArray:
    """1, 2, 3, ... up to the largest batch of such requests that every path has measured."""
    top = min(int(path.fit.domain["B"][1]) for path in paths)
    fits = min(int(path.fit.domain["S"][1] // tokens) for path in paths)
    return np.arange(1.0, max(min(top, fits), 1) + 1)


def gpu_threshold(
    cpu: ExecutionPath,
    gpu: ExecutionPath,
    tokens_per_request: int,
    *,
    extra_ms: float = 0.0,
    context: float | None = None,
) -> Threshold:
    """B1 for requests of so many tokens each, within the batches that both paths have measured.

    extra_ms: what a request pays before the GPU begins (expected wait, transfer).
    """
    B = batches_of(cpu, gpu, tokens=tokens_per_request)
    steps = batch_steps(B, tokens_per_request, context)
    wins = gpu.fit.latency_ms(**steps) + extra_ms <= cpu.fit.latency_ms(**steps)
    found = _first_win(B, wins, cpu.label, gpu.label, "batch")
    return _with_interval(found, cpu, gpu, steps, extra_ms)


def prefill_threshold(cpu: ExecutionPath, gpu: ExecutionPath, *, extra_ms: float = 0.0) -> Threshold:
    """Prompt tokens from which the GPU is at least as fast for a single request, as far as both paths have measured."""
    blind = [path.label for path in (cpu, gpu) if not path.fit.knows_prefill]
    if blind:
        return Threshold(None, f"the fit of {' and of '.join(blind)} has seen no prefill; measure some")
    top = min(int(path.fit.domain["S"][1]) for path in (cpu, gpu))
    S = np.arange(1.0, min(max(top, 1), MOST_PROMPT_TOKENS) + 1)
    one = np.ones_like(S)
    steps = {"B": one, "S": S, "prefill_requests": one, "prefill_tokens": S}
    wins = gpu.fit.latency_ms(**steps) + extra_ms <= cpu.fit.latency_ms(**steps)
    found = _first_win(S, wins, cpu.label, gpu.label, "prompt length")
    some = np.unique(np.round(np.geomspace(1, S[-1], 800))).astype(int) - 1
    return _with_interval(found, cpu, gpu, {name: column[some] for name, column in steps.items()}, extra_ms)


def amortised_batch(
    path: ExecutionPath, tokens_per_request: int, share: float = AMORTISED_SHARE, context: float | None = None
) -> Threshold:
    """B2 of a path, within the batches it has measured; share is eps."""
    B = batches_of(path, tokens=tokens_per_request)
    steps = batch_steps(B, tokens_per_request, context)

    def reached(T: FloatArray) -> int:
        rate = B / T
        return int(B[np.flatnonzero(rate >= (1 - share) * rate.max())[0]])

    T = path.fit.latency_ms(**steps)
    best = int(B[int(np.argmax(B / T))])
    reason = f"from here on {1 - share:.0%} of the best measured throughput, reached at {best}"
    return replace(Threshold(reached(T), reason), interval=_interval_of(path, steps, reached))


def knee_batch(path: ExecutionPath, tokens_per_request: int, context: float | None = None) -> Threshold:
    """The batch with the highest throughput over latency, B/T(B)^2."""
    B = batches_of(path, tokens=tokens_per_request)
    steps = batch_steps(B, tokens_per_request, context)

    def knee(T: FloatArray) -> int:
        return int(B[int(np.argmax(B / T**2))])

    value = knee(path.fit.latency_ms(**steps))
    end = " (the largest measured: the knee may lie beyond)" if value == int(B[-1]) > 1 else ""
    reason = f"throughput over latency is highest{end}"
    return replace(Threshold(value, reason), interval=_interval_of(path, steps, knee))


def drawn_ms(path: ExecutionPath, steps: dict[str, FloatArray], seed: int = 0) -> FloatArray | None:
    """Typical latency in ms (n, m) of m steps for the n curves that the fit's data allow; None where it keeps none."""
    draws = parameter_draws(path.fit, seed=seed)
    return None if draws is None else latency_draws(path.fit, draws, **steps)


def curve_range(path: ExecutionPath, B: FloatArray, tokens: int, context: float | None = None) -> FloatArray:
    """Typical latency and its 95 % range over the draws, in ms (3, n): typical, low, high; low = high = typical where
    the fit keeps no draws."""
    T = typical_ms(path, B, tokens, context)
    drawn = drawn_ms(path, batch_steps(B, tokens, context))
    if drawn is None:
        return np.stack([T, T, T])
    low, high = np.quantile(drawn, CERTAIN, axis=0)
    return np.stack([T, low, high])


def _first_win(x: FloatArray, wins: NDArray[np.bool_], cpu: str, gpu: str, what: str) -> Threshold:
    stretches = _stretches(x, wins)
    top = int(x[-1])
    if not stretches:
        return Threshold(None, f"never: {cpu} is faster at every measured {what}, 1 to {top:,}")
    first = stretches[0][0]
    if bool(wins.all()):
        return Threshold(1, f"always: {gpu} is at least as fast at every measured {what}, 1 to {top:,}", stretches)
    if len(stretches) == 1 and stretches[0][1] == top:
        return Threshold(first, f"{gpu} is at least as fast from {first:,} to {top:,}, the largest measured", stretches)
    spans = ", ".join(f"{low:,} to {high:,}" for low, high in stretches)
    plural = "batches" if what == "batch" else "prompts of"
    return Threshold(first, f"{gpu} is at least as fast only for {plural} {spans}", stretches)


def _with_interval(
    found: Threshold, cpu: ExecutionPath, gpu: ExecutionPath, steps: dict[str, FloatArray], extra_ms: float
) -> Threshold:
    """Its interval over both fits' draws; a fit without draws (a quoted one) stands still while the other varies."""
    drawn = [drawn_ms(path, steps, seed) for seed, path in enumerate((cpu, gpu))]
    if all(T is None for T in drawn):
        return found
    slow, fast = (
        path.fit.latency_ms(**steps)[None, :] if T is None else T for path, T in zip((cpu, gpu), drawn, strict=True)
    )
    wins = fast + extra_ms <= slow
    x = steps["S"] if "prefill_tokens" in steps and np.all(steps["B"] == 1) else steps["B"]
    values = np.where(wins.any(axis=1), x[np.argmax(wins, axis=1)], np.inf)
    never = float(np.mean(np.isinf(values)))
    return replace(found, interval=_quantiles(values), never_share=never)


def _interval_of(
    path: ExecutionPath, steps: dict[str, FloatArray], answer: Callable[[FloatArray], int]
) -> Interval | None:
    drawn = drawn_ms(path, steps)
    return None if drawn is None else _quantiles(np.array([float(answer(T)) for T in drawn]))


def _quantiles(values: FloatArray) -> Interval:
    """Whole numbers that hold 95 % of the values; an infinite one is None."""
    low, high = np.quantile(values, CERTAIN, method="inverted_cdf")
    return (_end(float(low)), _end(float(high)))


def _end(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _stretches(B: FloatArray, wins: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wins, [False]]).astype(int)))
    return [(int(B[start]), int(B[end - 1])) for start, end in zip(edges[::2], edges[1::2], strict=True)]
