"""What would help a planned setup, its margin, its throughput-latency trade-off."""

import math
from dataclasses import replace

import numpy as np

from latfit.planning.serving.evaluate import FIRST, Evaluator, Measured, Setup, with_lengths
from latfit.planning.serving.result import Effect, Trade
from latfit.planning.serving.search import SearchSpace
from latfit.queueing import bracket
from latfit.simulation import EngineSettings, scaled_costs
from latfit.workload import RecordedLoad

FASTER = 0.8  # duration of accelerated steps, and length of shorter prompts
MORE_CACHE = 1.5
CACHED = 0.3  # of each prompt, for shared prefixes
MOST_SLOWER, FINE = 4.0, 1.02
NEAR_CAPACITY = 0.75  # exponent of the first factor of step times that is tried


def effects_of(evaluator: Evaluator, best: Measured, *, cache: bool, replicas: bool = True) -> list[Effect]:
    """Return the effect of each change on the tightest target, the most helpful first."""
    setup, settings, load = best.setup, best.setup.settings, evaluator.load
    changed: list[tuple[str, Evaluator, Setup]] = []
    if replicas:
        changed.append((f"{setup.replicas + 1:,} replicas", evaluator, replace(setup, replicas=setup.replicas + 1)))
    for name, decode, prefill in (("prefill 20 % faster", 1.0, FASTER), ("decode 20 % faster", FASTER, 1.0)):
        costs = scaled_costs(evaluator.costs, decode, prefill)
        changed.append((name, replace(evaluator, costs=costs), setup))
    if cache:
        larger = replace(settings, kv_blocks=int(settings.kv_blocks * MORE_CACHE))
        changed.append(("KV cache 50 % larger", evaluator, replace(setup, settings=larger)))
    recorded = isinstance(load, RecordedLoad) and load.requests.prefix is not None and settings.prefix_cache
    if settings.cached_share < CACHED and not recorded:
        shared = replace(settings, cached_share=CACHED)
        changed.append(("30 % of each prompt cached", evaluator, replace(setup, settings=shared)))
    shorter = with_lengths(
        load, lambda prompt, output: (np.maximum(np.rint(FASTER * prompt), 1).astype(np.int64), output)
    )
    changed.append(("prompts 20 % shorter", replace(evaluator, load=shorter), setup))
    tightest = best.tightest
    found = []
    for change, by, to in changed:
        after = next(each for each in by.measure(to, replications=FIRST).reached if each.name == tightest.name)
        values = {f"before_{tightest.unit}": tightest.value, f"after_{tightest.unit}": after.value}
        found.append(Effect(change, tightest.name, **values))
    return sorted(found, key=lambda each: each.after)


def max_step_slowdown(evaluator: Evaluator, best: Measured, capacity: float) -> float:
    """Return the largest factor on all step times at which every target is still met. capacity: relative load."""

    def met(factor: float) -> bool:
        slower = replace(evaluator, costs=scaled_costs(evaluator.costs, factor, factor))
        return factor == 1.0 or slower.measure(best.setup).met

    # Slower steps are a higher load with tighter limits, so the factor lies below both of these.
    start = max(1.0, min(capacity, 1 / max(best.ratio, 1 / MOST_SLOWER))) ** NEAR_CAPACITY
    return bracket(met, start, growth=1.1, precision=FINE, least=0.0, most=2 * MOST_SLOWER)[0]


def front(evaluator: Evaluator, best: EngineSettings, space: SearchSpace) -> list[Trade]:
    """Return the Pareto-optimal settings of a saturated engine and the planned ones, by rising throughput."""
    tried = {best}
    for sequences in [best, *space.alternatives(best, "max_num_seqs")]:
        tried |= {sequences, *space.alternatives(sequences, "max_num_batched_tokens")}
    trades = []
    for settings in sorted(tried, key=lambda each: (each.max_num_seqs, each.max_num_batched_tokens)):
        at = evaluator.saturated(settings)
        if math.isfinite(at.tpot_ms) and at.tpot_ms > 0:
            where = settings.max_num_seqs, settings.max_num_batched_tokens
            trades.append(Trade(*where, 1e3 / at.tpot_ms, at.output_tokens_per_s, settings == best))
    kept: list[Trade] = []
    fastest = -math.inf
    for each in sorted(trades, key=lambda trade: (-trade.throughput_per_s, -trade.speed_per_s)):
        if each.speed_per_s > fastest or each.best:
            kept.append(each)
        fastest = max(fastest, each.speed_per_s)
    return kept[::-1]
