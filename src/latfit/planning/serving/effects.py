"""What would help engines that are planned, what they bear, and what they trade: one simulation a question.

Each change is made alone, at the planned load, and said by what it does to the figure that is nearest to its limit.
Throughput and speed are traded by how many requests share the steps: with more of them an engine makes more tokens per
second and each request gets fewer. The front holds the settings of which no other is better in both, each with an
engine that always has enough to do, and so without its waiting for a place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from latfit.planning.serving.evaluate import Evaluator, Measured, Setup
from latfit.planning.serving.result import Effect, Trade
from latfit.planning.serving.search import Room
from latfit.simulation import EngineSettings, scaled_costs
from latfit.stats import IntArray
from latfit.workload import LengthDistribution, Load, RecordedLoad

FASTER = 0.8
"""Time of the steps that a change makes faster."""

MORE_CACHE = 1.5
CACHED = 0.3
"""Share of every prompt that is found in the cache, where prefixes are shared."""

MOST_SLOWER, FINE = 4.0, 1.02


def effects_of(evaluator: Evaluator, best: Measured, *, cache: bool, replicas: bool = True) -> list[Effect]:
    """What changes do to the tightest figure of a setup, the most helpful first. cache: whether the size of the KV
    cache is known; replicas: whether one more may be had."""
    setup, settings, load = best.setup, best.setup.settings, evaluator.load
    count = setup.replicas
    changed: list[tuple[str, Evaluator, Setup]] = []
    if replicas:
        changed.append((f"{count + 1} replicas", evaluator, replace(setup, replicas=count + 1)))
    for name, decode, prefill in (("prefill 20 % faster", 1.0, FASTER), ("decode 20 % faster", FASTER, 1.0)):
        costs = scaled_costs(evaluator.costs, decode, prefill)
        changed.append((name, evaluator.elsewhere(evaluator.load, costs), setup))
    if cache:
        larger = replace(settings, kv_blocks=int(settings.kv_blocks * MORE_CACHE))
        changed.append(("KV cache 50 % larger", evaluator, replace(setup, settings=larger)))
    known = isinstance(load, RecordedLoad) and load.requests.prefix is not None and settings.prefix_cache
    if settings.cached_share < CACHED and not known:
        shared = replace(settings, cached_share=CACHED)
        changed.append(("30 % of each prompt cached", evaluator, replace(setup, settings=shared)))
    changed.append(("prompts 20 % shorter", evaluator.elsewhere(shorter(load, FASTER), evaluator.costs), setup))
    figure = best.tightest
    found = []
    for change, by, to in changed:
        after = next(each for each in by.measure(to).reached if each.name == figure.name)
        values = {f"before_{figure.unit}": figure.value, f"after_{figure.unit}": after.value}
        found.append(Effect(change, figure.name, **values))
    return sorted(found, key=lambda each: each.after)


@dataclass(frozen=True)
class Shorter:
    """Lengths of which the prompts are a share."""

    lengths_of: LengthDistribution
    share: float

    def lengths(self, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """As `LengthDistribution`."""
        prompt, output = self.lengths_of.lengths(count, rng)
        return _shortened(prompt, self.share), output


def shorter(load: Load, share: float) -> Load:
    """The same requests with prompts of a share of their length."""
    if not isinstance(load, RecordedLoad):
        return replace(load, lengths=Shorter(load.lengths, share))
    requests = load.requests
    return replace(load, requests=replace(requests, prompt_tokens=_shortened(requests.prompt_tokens, share)))


def _shortened(tokens: IntArray, share: float) -> IntArray:
    return np.asarray(np.maximum(np.rint(share * tokens), 1), dtype=np.int64)


def bears(evaluator: Evaluator, best: Measured) -> float:
    """How much longer all steps may take until a target is missed, as a ratio: what a fit may be off."""
    low, high = 1.0, 1.05
    while evaluator.measure(best.setup, slower=high).met:
        if high > MOST_SLOWER:
            return high
        low, high = high, 1 + 2 * (high - 1)
    while high / low > FINE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if evaluator.measure(best.setup, slower=middle).met else (low, middle)
    return low


def front(evaluator: Evaluator, best: EngineSettings, room: Room) -> list[Trade]:
    """The settings of which no other gives more of both, by rising throughput; the planned ones always."""
    asked = {best}
    for sequences in [best, *room.alternatives(best, "max_num_seqs")]:
        asked |= {sequences, *room.alternatives(sequences, "max_num_batched_tokens")}
    found = []
    for settings in sorted(asked, key=lambda each: (each.max_num_seqs, each.max_num_batched_tokens)):
        at = evaluator.saturated(settings)
        if math.isfinite(at.tpot_ms) and at.tpot_ms > 0:
            where = settings.max_num_seqs, settings.max_num_batched_tokens
            found.append(Trade(*where, 1e3 / at.tpot_ms, at.output_tokens_per_s, settings == best))
    return undominated(found)


def undominated(trades: Sequence[Trade]) -> list[Trade]:
    """Those than which none is better in both, and the planned one, by rising throughput."""
    kept: list[Trade] = []
    fastest = -math.inf
    for each in sorted(trades, key=lambda trade: (-trade.throughput_per_s, -trade.speed_per_s)):
        if each.speed_per_s > fastest or each.best:
            kept.append(each)
        fastest = max(fastest, each.speed_per_s)
    return kept[::-1]
