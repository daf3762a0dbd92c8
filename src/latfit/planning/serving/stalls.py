"""Stalls by long prompts: the longest gap between two tokens of decoding requests, by token budget."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from msgspec import structs

from latfit.model import FitResult
from latfit.planning.serving.result import Stall, Stalls
from latfit.planning.serving.search import BUDGETS
from latfit.simulation import EngineSettings, StepCosts, Work, step_ms
from latfit.stats import IntArray
from latfit.trace import MIXED

LONG_PROMPT = 0.99  # quantile of the prompts that the stall is given for
SIDED = 0.95  # one-sided level of each end of a 90 % interval
MAX_CHOICES = 5
NEAR_BEST = 0.95  # of the highest throughput; the shortest stall from there on is the knee


def stalls_of(
    costs: StepCosts,
    settings: EngineSettings,
    lengths: tuple[IntArray, IntArray],
    decoding: float,
    most_tokens: float,
    throughput: Callable[[EngineSettings], float],
    fit: FitResult | None = None,
) -> Stalls | None:
    """Return the stall at the planned and at other token budgets; None if nothing decodes beside a prompt.

    lengths: prompt and output tokens (n,). decoding: requests beside the prompt. throughput: output tokens/s of a
    saturated engine. fit: for intervals.
    """
    D = min(round(decoding), settings.max_num_seqs - 1)
    if D < 1:
        return None
    longest = int(np.quantile(lengths[0], LONG_PROMPT, method="higher"))
    context, own = mean_context(lengths), settings.max_num_batched_tokens
    top = min(next((budget for budget in BUDGETS if budget >= longest + D), BUDGETS[-1]), most_tokens)
    chunks = settings.batching == "chunked-prefill"
    others = [each for each in BUDGETS if settings.max_num_seqs <= each <= top and not (chunks and each == own)]
    others = sorted(others, key=lambda each: abs(np.log(each / own)))[: MAX_CHOICES - 1]
    chunked = replace(settings, batching="chunked-prefill", long_prefill_token_threshold=0)
    rows = []
    for each in [settings, *(replace(chunked, max_num_batched_tokens=budget) for budget in others)]:
        gap_ms, chunk = longest_gap(costs, each, D, longest, context)
        shown = each.max_num_batched_tokens, each.batching, chunk, gap_ms, _interval(fit, gap_ms, D, chunk)
        rows.append(Stall(*shown, throughput(each), planned=each is settings))
    enough = NEAR_BEST * max(each.output_tokens_per_s for each in rows)
    knee = min((each for each in rows if each.output_tokens_per_s >= enough), key=lambda each: each.gap_ms)
    rows = [structs.replace(each, knee=each is knee) for each in rows]
    return Stalls(longest, D, sorted(rows, key=lambda each: (each.max_num_batched_tokens, each.batching)))


def mean_context(lengths: tuple[IntArray, IntArray]) -> float:
    """Return the mean cached tokens of a decoding request, weighted by output steps."""
    prompt, output = lengths
    return float(np.sum(output * (prompt + output / 2)) / np.sum(output))


def longest_gap(costs: StepCosts, settings: EngineSettings, D: int, prompt: int, context: float) -> tuple[float, int]:
    """Return the longest gap in ms between tokens of D requests beside a prompt, and that step's prompt tokens."""
    done = min(int(settings.cached_share * prompt) // settings.block_size * settings.block_size, prompt - 1)
    chunk = prompt - done
    if settings.batching == "chunked-prefill":
        chunk = min(chunk, settings.max_num_batched_tokens - D, settings.long_prefill_token_threshold or chunk)
    interrupts = settings.batching in ("continuous", "static")
    beside = 0 if interrupts else D
    steps = []
    for k in range(done, prompt, chunk):
        p = min(float(chunk), float(prompt - k))
        work = Work(beside + 1.0, beside + p, 1.0, p, float(k), beside * context, p * (k + 0.5 * p), k + p)
        steps.append((float(step_ms(costs, work)), k))
    gap_ms, at = max(steps)
    if interrupts:  # the next step decodes the new request, too
        gap_ms += float(step_ms(costs, Work(D + 1.0, D + 1.0, 0.0, 0.0, 0.0, D * context + prompt, 0.0, 0.0)))
    return gap_ms, min(chunk, prompt - at)


def _interval(fit: FitResult | None, gap_ms: float, D: int, chunk: int) -> tuple[float, float] | None:
    if fit is None:
        return None
    low, high = (fit.limits.pooled_factor(MIXED, SIDED, side) for side in ("lower", "upper"))
    one, tokens = np.ones(1), np.array([float(chunk)])
    wider = float(fit.widening(one * (D + 1), tokens + D, prefill_requests=one, prefill_tokens=tokens)[0])
    if low is None or high is None or not np.isfinite(wider):
        return None
    return gap_ms * low / wider, gap_ms * high * wider
