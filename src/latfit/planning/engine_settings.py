"""Settings of serving engines from a fit, without a sweep. Rules: docs/concepts/plans.md."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from latfit.hardware import ExecutionPath
from latfit.model import CONTEXT
from latfit.planning.engine_names import Flags, named_flags
from latfit.planning.request import PlanOptions
from latfit.planning.result import EngineChoice, Kind, Plan, Settings, Unknown
from latfit.planning.steps.limits import Level, level_for
from latfit.stats import FloatArray
from latfit.trace import DECODE, MIXED, PREFILL
from latfit.units import format_ms

US_PER_MS = 1000


def engine_flags(plan: Plan, settings: Settings | Unknown, largest: int | None) -> dict[str, Flags]:
    """Return settings under each engine's names. largest: largest whole batch within the SLA."""
    found: dict[str, Flags] = {}
    if isinstance(settings, Settings):
        values: dict[str, int | None] = {"requests": settings.max_num_seqs}
        if settings.max_num_batched_tokens is not None:
            values |= {"tokens": settings.max_num_batched_tokens, "chunked": None}
        if plan.B1_tokens.value is not None and plan.B1_tokens.value > 1:
            values["gpu_prompts"] = plan.B1_tokens.value
        found = named_flags(**values)
    return {**found, **_flags_by_batch(plan, largest)}


def _flags_by_batch(plan: Plan, largest: int | None) -> dict[str, Flags]:
    if largest is None:
        return {}
    preferred = min(plan.B2.value or plan.knee.value or largest, largest)
    found: dict[str, Flags] = {
        "triton": {"max_batch_size": largest, "max_queue_delay_microseconds": 0},
        "tensorrt": {"min_batch": 1, "opt_batch": preferred, "max_batch": largest},
    }
    batched = next((row for row in plan.strategies if row.kind is Kind.AMORTISED), None)
    if batched is not None and (batched.chosen or (batched.margin is not None and batched.margin >= 0)):
        # Triton waits for the stopping batch on average, within what the SLA leaves. It takes the largest of its
        # preferred sizes that waits and leaves the others waiting, so every size from the stopping batch on is one.
        stop, spare_ms = min(batched.batch or 1, largest), plan.sla_ms - (batched.percentile_ms or plan.sla_ms)
        wait_ms = (stop - 1) / (plan.rate_per_s or 1.0) * 1e3
        found["triton" if batched.chosen else "triton_batched"] = {
            "max_batch_size": largest,
            "max_queue_delay_microseconds": int(min(wait_ms, max(spare_ms, 0.0)) * US_PER_MS),
            "preferred_batch_size": [*range(stop, largest + 1)],
        }
    if plan.T_cut is not None and plan.T_cut.value is not None:
        found["triton"] = {**found["triton"], "default_timeout_microseconds": int(plan.T_cut.value * US_PER_MS)}
    return found


MEASURED = "the measured range"
KNEE = "the trade-off between sequences and prefill: most decoding requests times prefill tokens of a step"

MIN_CHUNK = 128  # prefill tokens beside decoding requests; with fewer a prompt takes too many steps
ROUNDING = 0.04  # share of the sequences that a round number (80 for 83) may cost
SAME_TTFT = 0.04  # relative difference below which two choices have the same TTFT
MAX_CHOICES = 5  # rows of the trade-off that are shown
SAMPLED_BATCHES = 9  # batches between one decoding request and all of them whose steps are checked


@dataclass(frozen=True)
class _Engine:
    """Step times of a path at a level by phase. context: cached tokens of a decoding request."""

    path: ExecutionPath
    levels: Mapping[str, Level]
    context: float | None
    prompt: float

    def decode_ms(self, D: FloatArray) -> FloatArray:
        none = np.zeros_like(D)
        cached = {} if self.context is None else {"context_tokens": D * self.context, "prefill_context_tokens": none}
        steps = {"B": D, "S": D, "prefill_requests": none, "prefill_tokens": none, **cached}
        return self.levels[DECODE].at(D) * self.path.fit.latency_ms(**steps)

    def slowest_ms(self, D: FloatArray, budget: int) -> FloatArray:
        """Return the slowest step (n,) of `budget` tokens, up to D - 1 (n,) of them of decoding requests."""
        decoding = np.linspace(np.minimum(1, D - 1), D - 1, SAMPLED_BATCHES).round().ravel()
        tokens = budget - decoding
        # Prompts follow each other, so at most one is continued: the last chunk of a long prompt, or the rest of one.
        prompts = np.where(tokens > self.prompt, np.ceil(tokens / self.prompt) + 1, 1.0)
        history = np.maximum(self.prompt - np.minimum(tokens, self.prompt - 1), 0.0)
        times = self._prefill_ms(decoding, tokens, history, prompts)
        return np.asarray(times.reshape(SAMPLED_BATCHES, -1).max(axis=0))

    def first_token_ms(self, D: int, chunk: int) -> float:
        """Return the time of a whole prompt in chunks beside D - 1 decoding requests."""
        # Each chunk attends to those before it: the mean of the first and the last is an upper bound.
        tokens = np.full(2, min(float(chunk), self.prompt))
        history = np.array([0.0, self.prompt - tokens[1]])
        times = self._prefill_ms(np.full(2, D - 1.0), tokens, history, np.ones(2))
        return float(np.ceil(self.prompt / chunk) * times.mean())

    def _prefill_ms(self, D: FloatArray, P: FloatArray, history: FloatArray, prompts: FloatArray) -> FloatArray:
        steps = {"B": D + prompts, "S": D + P, "prefill_requests": prompts, "prefill_tokens": P}
        if self.path.fit.reads_context:
            each = self.path.fit.typical.get(CONTEXT, 0.0) if self.context is None else self.context
            steps |= {"context_tokens": D * each + history, "prefill_context_tokens": history}
        B = D + prompts
        factors = np.where(D > 0, self.levels[MIXED].at(B), self.levels[PREFILL].at(B))
        return np.asarray(factors * self.path.fit.latency_ms(**steps))


def prices_tokens(path: ExecutionPath) -> bool:
    """Return whether the path has a cost per token."""
    return path.nominal is None or path.nominal.per_token_ms > 0


def engine_settings(
    path: ExecutionPath,
    sla_ms: float,
    percentile: float,
    request: PlanOptions,
    max_batch: int | None = None,
) -> Settings | Unknown:
    """Choose the sequences and the token budget that keep TPOT (the SLA if not given) and TTFT.

    With a TTFT the choice with the most sequences is taken, else the knee: the largest product of decoding requests and
    prefill tokens. Without measured prefill there is no token budget. For a rate of batches settings would carry less.
    """
    if request.rate_each is not None:
        return Unknown("the plan is of whole batches; plan requests with --lengths 1000:250 --ttft 1s --tpot 50ms")
    if not prices_tokens(path):
        return Unknown(f"{path.label} has no cost per token (per_token=1us), so prompts would look free")
    levels = {phase: level_for(path, percentile, phase) for phase in (DECODE, PREFILL, MIXED)}
    engine = _Engine(path, levels, request.context, float(request.prompt_tokens))
    tpot, ttft = request.tpot_ms or sla_ms, request.ttft_ms and format_ms(request.ttft_ms)
    largest = min(path.fit.largest_batch, max_batch or path.fit.largest_batch)
    times = engine.decode_ms(np.arange(1.0, largest + 1))
    within = np.flatnonzero(times <= tpot)
    if not len(within):
        least = format_ms(float(times.min()))
        return Unknown(f"no decode step on {path.label} meets {format_ms(tpot)}: the fastest takes {least}")
    most = int(within[-1]) + 1
    chunk = min(MIN_CHUNK, request.prompt_tokens)
    top = int(path.fit.domain["S"][1])
    if not path.fit.knows_prefill or top <= chunk:
        return Settings(
            path=path.label,
            max_num_seqs=most,
            prompt_tokens=request.prompt_tokens,
            tpot_ms=float(times[most - 1]),
            binding=MEASURED if most == path.fit.largest_batch else "the time between tokens",
            reason=f"decode steps within {format_ms(tpot)}; the fit contains no prefill, so there is no token budget",
        )
    if largest == 1:
        return Unknown(f"steps on {path.label} hold one request, so none decodes beside a prompt")
    # Token budgets that people type (160, 192, 224, 256, 320, ...), above one chunk and within the data.
    budgets = sorted(size << shift for shift in range(22) for size in (4, 5, 6, 7) if chunk < size << shift <= top)
    limit = request.ttft_ms or np.inf
    found = [_most_sequences(engine, each, min(most, each - chunk + 1), tpot, limit) for each in budgets]
    choices = [choice for choice in found if choice is not None]
    if not choices:
        prompt = f" and a prompt of {request.prompt_tokens:,} tokens within {ttft}" if ttft else ""
        reason = f"no token budget up to {top:,} keeps a step within {format_ms(tpot)}{prompt}"
        if (fastest := float(engine.slowest_ms(np.array([2.0]), chunk + 1)[0])) > tpot:
            reason = f"a step with {chunk} prefill tokens and one decoding request takes {format_ms(fastest)}"
            reason += f" (decode alone: {most} requests within {format_ms(tpot)})"
        return Unknown(f"on {path.label} {reason}; relax the SLA, or serve prefill apart")
    in_time = f", first token of {request.prompt_tokens:,} within {ttft}" if ttft else ""

    def rank(choice: EngineChoice) -> tuple[float, float]:
        product = choice.max_num_seqs * choice.chunk_tokens
        return (choice.max_num_seqs, product) if ttft else (product, choice.max_num_seqs)

    useful = [each for each in choices if not any(_beats(other, each) for other in choices)]
    best = max(useful, key=rank)
    first = max(0, min(useful.index(best) - MAX_CHOICES // 2, len(useful) - MAX_CHOICES))
    at_edge = best.max_num_seqs == next(_fewer(path.fit.largest_batch)) or best.max_num_batched_tokens == budgets[-1]
    fewest = [each.max_num_batched_tokens for each in choices if each.max_num_seqs >= best.max_num_seqs]
    return Settings(
        path=path.label,
        max_num_seqs=best.max_num_seqs,
        max_num_batched_tokens=best.max_num_batched_tokens,
        min_num_batched_tokens=None if request.ttft_ms is None else min(fewest),
        chunk_tokens=best.chunk_tokens,
        prompt_tokens=request.prompt_tokens,
        ttft_ms=best.ttft_ms,
        tpot_ms=float(engine.slowest_ms(np.array([float(best.max_num_seqs)]), best.max_num_batched_tokens)[0]),
        binding=MEASURED if at_edge else KNEE if request.ttft_ms is None else "the time to the first token",
        reason=f"every step in which requests decode within {format_ms(tpot)}{in_time}",
        choices=tuple(useful[first : first + MAX_CHOICES]),
    )


def _most_sequences(engine: _Engine, budget: int, most: int, tpot: float, ttft: float) -> EngineChoice | None:
    tried = np.array([*_fewer(most)], dtype=np.float64)
    within = tried[engine.slowest_ms(tried, budget) <= tpot].astype(int).tolist() if len(tried) else []
    D = next((D for D in within if engine.first_token_ms(D, budget - D + 1) <= ttft), None)
    if D is None:
        return None
    chunk = budget - D + 1
    decode_ms = float(engine.decode_ms(np.array([float(D)]))[0])
    return EngineChoice(D, budget, chunk, engine.first_token_ms(D, chunk), D / decode_ms * 1e3)


def _fewer(most: int) -> Iterator[int]:
    """Yield multiples of large powers of two from `most` down, each about ROUNDING below the last."""
    D = most
    while D >= 2:
        rounded = next(D >> k << k for k in range(D.bit_length(), -1, -1) if D >> k << k >= (1 - ROUNDING) * D)
        yield rounded
        D = min(rounded - 1, int(D * (1 - ROUNDING / 2)))


def _beats(other: EngineChoice, each: EngineChoice) -> bool:
    """Return whether a choice has more sequences or an earlier first token, at a TTFT alike at the worst."""
    more, sooner = other.max_num_seqs - each.max_num_seqs, other.ttft_ms < each.ttft_ms
    return (more > 0 or (more == 0 and sooner)) and other.ttft_ms <= each.ttft_ms * (1 + SAME_TTFT)
