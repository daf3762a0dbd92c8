"""Operating points of an engine: batches at which it serves as many requests as come.

Little's law: B = rate x output tokens x time per token at B. If the time per token jumps or grows faster than B there
are several: a burst moves the engine from the fast one to the slow one.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import structs

from latfit.hardware import CERTAIN
from latfit.model import FitResult, StepNoise, step_draws
from latfit.planning.serving.evaluate import Evaluator, lengths_of
from latfit.planning.serving.result import OperatingPoint, OperatingStates
from latfit.planning.serving.stalls import mean_context
from latfit.simulation import EngineRun, EngineSettings, StepCosts, Work, captured, serve, step_ms
from latfit.stats import FloatArray, IntArray
from latfit.trace import DECODE, MIXED
from latfit.workload import ClosedLoad, OpenLoad, Poisson, Requests, Streams, make_requests

MAX_BATCHES = 512
MIN_DROP = 1.05  # of the sustainable rate beyond its peak; smaller drops are within the error of fits
SURE = 0.95  # share of the fit's draws that show such a drop
MIN_SIGMA = 2.0  # standard deviations of a Poisson number between two states that do not mix
DRAWN = 20_000
TIMES_SERVED = 25.0  # simulated time after the burst, in latencies of the slow state
MOST_SIMULATED = 200_000  # requests
Lengths = tuple[IntArray, IntArray]
Columns = Mapping[str, FloatArray]


class Rates(NamedTuple):
    """Sustainable requests per ms by the batch that decodes (m,); drawn (k, m) over the fit's draws."""

    B: FloatArray
    per_ms: FloatArray
    drawn: FloatArray | None
    measured: int


def operating_states(
    evaluator: Evaluator, settings: EngineSettings, replicas: int, fits: Sequence[FitResult]
) -> OperatingStates | None:
    """Return all operating points of a replica; None for a closed load and for whole prompts."""
    if isinstance(evaluator.load, ClosedLoad) or settings.batching != "chunked-prefill":
        return None
    law, rate = lengths_of(evaluator.load), evaluator.load.rate / replicas
    lengths = law.lengths(DRAWN, np.random.default_rng(evaluator.seed))
    output = float(lengths[1].mean())
    found = states_at(sustainable_rates(evaluator.costs, settings, lengths, fits), rate, output, replicas)
    if found.from_rate_per_s is None or len(found.points) < 2:
        return found
    load = OpenLoad(Poisson(rate), law)
    return structs.replace(found, confirmed=_burst_stays(evaluator, settings, load, output, found))


def sustainable_rates(
    costs: StepCosts, settings: EngineSettings, lengths: Lengths, fits: Sequence[FitResult] = ()
) -> Rates:
    """Return the request rate that keeps each batch size busy: one over the engine time of a request."""
    prompt, output = (float(each.mean()) for each in lengths)
    done = prompt * settings.cached_share
    prompt = max(prompt - done, 1.0)
    context = mean_context(lengths)
    most = min(settings.max_num_seqs, max(int(settings.cache_tokens / context), 1))
    B = np.unique(np.rint(np.geomspace(1, most, MAX_BATCHES))) if most > MAX_BATCHES else np.arange(1.0, most + 1)
    room = np.maximum(settings.max_num_batched_tokens - B, 1.0)
    if settings.long_prefill_token_threshold:
        room = np.minimum(room, settings.long_prefill_token_threshold)
    least = np.where(prompt > room, np.ceil(prompt / room), prompt / room)
    # Once every step is full of prompts no larger batch comes about.
    B = B[: max(int(np.argmin([*(B * least <= output), False])), 1)]
    room, least = room[: len(B)], least[: len(B)]
    steps = np.where(prompt > room, least, 1 / np.clip(B / output, 1.0, np.maximum(room / prompt, 1)))
    chunk = prompt / steps
    together = np.maximum(1 / steps, 1.0)
    nothing = np.zeros_like(B)
    decode = {"B": B, "S": B, "prefill_requests": nothing, "prefill_tokens": nothing}
    mixed = {"B": B + together, "S": B + chunk, "prefill_requests": together, "prefill_tokens": chunk}
    cached = together * (done + np.maximum(prompt - chunk, 0.0) / 2)
    decode |= {"context_tokens": B * context, "prefill_context_tokens": nothing}
    mixed |= {"context_tokens": B * context + cached, "prefill_context_tokens": cached}
    padded = np.array([captured(each) for each in B]) if settings.padded_graphs else B
    decodes, mixes = (fits[:1], decode), (fits[-1:], mixed)
    T_decode = _mean_ms(costs, {**decode, "B": padded, "S": padded}, fits[:1], DECODE)
    T_mixed = _mean_ms(costs, mixed, fits[-1:], MIXED)

    def per_ms(T_d: FloatArray, T_m: FloatArray) -> FloatArray:
        return np.asarray(B / (output * T_d + B * steps * np.maximum(T_m - T_d, 0.0)))

    # Draws of one fit are shared, those of two are in another order: they come from the same random numbers.
    ratios = [_drawn_ratios(*decodes, 0), _drawn_ratios(*mixes, len(fits) - 1)]
    drawn = None if ratios[0] is None or ratios[1] is None else per_ms(T_decode * ratios[0], T_mixed * ratios[1])
    outside = [
        times > 0 for used, steps in (decodes, mixes) for fit in used for times in fit.times_outside(**steps).values()
    ]
    measured = int(np.argmax([*np.any(outside, axis=0), True])) if outside else len(B)
    return Rates(B, per_ms(T_decode, T_mixed), drawn, measured)


def _mean_ms(costs: StepCosts, steps: Columns, fits: Sequence[FitResult], phase: str) -> FloatArray:
    noise: StepNoise | None = fits[0].step_noise(phase) if fits else None
    names = ("B", "S", "prefill_requests", "prefill_tokens", "context_tokens", "prefill_context_tokens")
    T = []
    for B, S, n, P, held, k in zip(*(steps[name] for name in names), strict=True):
        each = max(n, 1.0)
        T.append(step_ms(costs, Work(B, S, n, P, k, held - k, P * (k + P / 2) / each, (k + P) / each)))
    found = np.array(T)
    return found if noise is None else noise.mean_ms(found * noise.levels.factors(steps["S"]), steps["B"])


def _drawn_ratios(fits: Sequence[FitResult], steps: Columns, seed: int) -> FloatArray | None:
    """Return drawn over fitted times (k, m) of steps."""
    drawn = step_draws(fits[0], steps, seed=seed) if fits else None
    return None if drawn is None else drawn / fits[0].latency_ms(**steps)


def states_at(rates: Rates, rate: float, output: float, replicas: int = 1) -> OperatingStates:
    """Return the operating points at a rate per ms of one replica, and the rates of all with several stable points."""
    known = rates.per_ms[: max(rates.measured, 1)]
    dip = int(np.argmax(np.maximum.accumulate(known) / known))  # the largest drop from a peak
    peak = int(np.argmax(known[: dip + 1]))
    several = rates.per_ms[peak] >= MIN_DROP * rates.per_ms[dip]
    if several and rates.drawn is not None:
        shown = [each[peak] >= MIN_DROP * each[dip] for each in rates.drawn]
        several = float(np.mean(shown)) >= SURE
    between = math.sqrt(rates.per_ms[peak] * rates.per_ms[dip])
    several = several and len(_separate(_crossings(rates.B, rates.per_ms, between))) > 1
    crossed = _separate(_crossings(rates.B, rates.per_ms, rate))
    drawn = [] if rates.drawn is None else [_separate(_crossings(rates.B, each, rate)) for each in rates.drawn]
    alike = np.array([[B for B, _ in each] for each in drawn if len(each) == len(crossed)])
    points = []
    for place, (B, stable) in enumerate(crossed):
        ends = tuple(np.quantile(alike[:, place], CERTAIN).tolist()) if len(alike) else None
        served = min(rate, float(np.interp(B, rates.B, rates.per_ms)))
        points.append(OperatingPoint(B, B / (served * output), stable, bool(served < (1 - 1e-9) * rate), ends))
    if not several:
        return OperatingStates(points)
    low, high = (float(1e3 * replicas * rates.per_ms[at]) for at in (dip, peak))
    return OperatingStates(points, low, high, int(rates.B[peak]))


def _crossings(B: FloatArray, per_ms: FloatArray, rate: float) -> list[tuple[float, bool]]:
    """Return (batch, stable) where the sustainable rate crosses the load, or ends below it, by rising batch."""
    above = per_ms >= rate
    found = [(float(rate / per_ms[0] * B[0]), True)] if above[0] else []
    for at in np.flatnonzero(above[1:] != above[:-1]).tolist():
        share = (rate - per_ms[at]) / (per_ms[at + 1] - per_ms[at])
        found.append((float(B[at] + share * (B[at + 1] - B[at])), bool(above[at + 1])))
    return found if above[-1] else [*found, (float(B[-1]), True)]


def _separate(points: list[tuple[float, bool]]) -> list[tuple[float, bool]]:
    """Drop pairs of a stable and an unstable point that the number of requests passes by chance."""
    kept = list(points)
    while len(kept) > 1:
        gaps = [(b - a) / math.sqrt(max(b, 1.0)) for (a, _), (b, _) in pairwise(kept)]
        nearest = int(np.argmin(gaps))
        if gaps[nearest] >= MIN_SIGMA:
            break
        del kept[nearest : nearest + 2]
    return kept


def with_burst(load: OpenLoad, size: int, time_ms: float, seed: int) -> Requests:
    """Return the requests of a load for twice a time, with `size` more in the middle."""
    count = max(int(2.2 * load.rate * time_ms), 100)
    usual = load.sample(count, Streams(seed))
    prompt, output = load.lengths.lengths(size, np.random.default_rng([seed, size]))
    arrival = np.concatenate([usual.arrival_ms, np.full(size, usual.arrival_ms[-1] / 2)])
    order = np.argsort(arrival, kind="stable")
    columns = ((usual.prompt_tokens, prompt), (usual.output_tokens, output))
    return make_requests(arrival[order], *(np.concatenate(each)[order] for each in columns))


def _burst_stays(
    evaluator: Evaluator, settings: EngineSettings, load: OpenLoad, output: float, states: OperatingStates
) -> bool:
    """Return whether an engine is fast before a burst and slow long after it; False if too costly to simulate."""
    barrier = next(each.batch for each in states.points if not each.stable)
    time_ms = TIMES_SERVED * output * max(each.tpot_ms for each in states.points)
    if 2.2 * load.rate * time_ms > MOST_SIMULATED:
        return False
    burst = with_burst(load, 2 * settings.max_num_seqs, time_ms, evaluator.seed)
    run = serve(burst, evaluator.costs, settings, evaluator.seed)
    return in_system(run, 0.25, 0.5) < barrier < in_system(run, 0.8, 1.0)


def in_system(run: EngineRun, start: float, end: float) -> float:
    """Return the mean number of requests in the engine between two shares of the time of arrivals."""
    arrival = run.requests.arrival_ms
    low, high = start * float(arrival[-1]), end * float(arrival[-1])
    held = np.minimum(run.last_ms, high) - np.maximum(arrival, low)
    return float(np.maximum(held, 0.0).sum()) / (high - low)
