"""Whether what is promised of waiting holds: random systems, measured, fitted, promised, and compared with the truth.

A system is drawn (`promises_truth.random_systems`): step times that grow, jump or fall, noise from 1 % to pauses of 60
times or of a time of their own, per step or per second, arrivals from regular to bursts, loads of .1 to .97 of the
limit. A trace of its steps is measured, and where its arrivals are no Poisson stream they are recorded: 20,000 of them.
From these alone come a fit, the 99th percentile of the response with its 95 % interval, and the highest rate that is
promised to meet a limit. The truth is simulated by a program that shares no code with the package.

Printed by family of noise: promises, how many are broken (the truth lies beyond the harmful end by more than twice its
own standard error; aim 2.5 %), and over-provisioning: the rate that is truly carried over the promised one, or planned
over needed replicas. `python -m benchmarks.promises [--smoke] [--systems N] [--seed N] [--pauses] [--only KIND]`.
Policies of two paths are compared with a plain simulation in `tests/oracle/test_two_paths.py`.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from benchmarks import promises_truth as truth_of
from benchmarks.promises_truth import Planted, System
from latfit.planning.load.strategies import Machine, Target
from latfit.planning.result import Strategy

Q = 0.99
RECORDED = 20_000
ENGINE_ROWS = 10_000
"""Steps of a serving engine that are measured: 20 to 200 pauses."""

TRUTH = truth_of.Effort(tolerance=0.008, budget=10_000_000)
COARSE = truth_of.Effort(tolerance=0.03, budget=1_500_000)
BISECTIONS = 5
SLACK = 2.0
"""Standard errors of the truth that count for the promise."""

KINDS = ("one path", "oracle", "requests", "bursts")


@dataclass(frozen=True)
class Outcome:
    """One promise beside its truth, in ms or, for rates, per ms; low and high None where an end is open."""

    kind: str
    group: str
    promised: float
    low: float
    high: float
    true: float
    error: float
    declined: str = ""
    seed: int = 0
    provision: float = math.nan
    """What is truly carried over what is promised, or replicas planned over those needed; of rates and requests."""
    oracle: float = math.nan
    """Of rates: the same of a promise that knows all but how often pauses come and how long they are."""

    @property
    def broken(self) -> bool:
        return self.true - SLACK * self.error > self.high

    @property
    def cautious(self) -> bool:
        return self.true + SLACK * self.error < self.low


def outcomes(planted: Planted, seed: int, *, oracle: bool = False) -> list[Outcome]:
    """What is promised of a system with one path, and the truth. oracle: whether to compare rates with the oracle's."""
    from latfit.fitting.fit import fit_trace
    from latfit.fitting.problem import FitOptions
    from latfit.hardware.profile import ExecutionPath, HardwareProfile
    from latfit.planning.load.capacity import feasible_rates, range_of
    from latfit.planning.load.strategies import machine_of
    from latfit.planning.load.uncertainty import estimate_percentile, robust_rate
    from latfit.planning.load.varying import load_from_arrivals
    from latfit.planning.request import PlanOptions
    from latfit.planning.result import Kind
    from latfit.trace.table import Trace

    trace = Trace(truth_of.measure(planted, planted.rows, seed))
    model = "linear" if planted.shape == "linear" else "auto"
    fit = fit_trace(trace, FitOptions(model))
    group = f"{planted.shape}, {planted.noise}, {planted.load}"
    if not fit.status.ok:
        return [Outcome("percentile", group, math.nan, math.nan, math.nan, math.nan, 0.0, fit.status.code)]
    profile = HardwareProfile({"gpu": ExecutionPath("gpu", fit)})
    rate = planted.system.arrivals.rate
    request = PlanOptions(rate=rate, max_batch=planted.system.cap)
    if planted.load != "poisson":
        moments = np.cumsum(recording(planted.system, seed))
        load = load_from_arrivals(moments, "recording", float(moments[-1] - moments[0]))
        request = PlanOptions(load=replace(load, rates=np.array([rate])), max_batch=planted.system.cap)
    exact = truth_of.truth(planted.system, TRUTH, seed=seed).quantile(Q)
    sla = exact.value * float(np.random.default_rng([seed, 7]).uniform(1.2, 3))
    machine, target, strategy = machine_of(profile, 1, request), Target(sla, Q, 1), Strategy(Kind.GREEDY, ("gpu",))
    found = estimate_percentile(machine, strategy, target, rate)
    if found is None:
        return [Outcome("percentile", group, math.nan, 0, math.inf, exact.value, exact.error, "overloaded by the fit")]
    low, high = found.interval
    why = "; ".join(each.message for each in found.doubts) or ("no upper end" if high is None else "")
    high = math.inf if high is None else high
    first = Outcome("percentile", group, found.percentile_ms, low or 0.0, high, exact.value, exact.error, why)
    sure = None
    if not why and (most := range_of(feasible_rates(machine, strategy, target), rate)[1]) > 0:
        sure = robust_rate(machine, strategy, target, found.slowest, most)
    if sure is None:
        return [first]
    rated = _rate_outcome(planted.system, sure, sla, group, seed)
    if oracle and planted.system.main.stalls is not None:
        carried = oracle_rate(planted, seed, machine, strategy, target)
        rated = replace(rated, oracle=rated.provision * sure / carried if carried else math.inf)
    return [first, rated]


def oracle_rate(planted: Planted, seed: int, machine: Machine, strategy: Strategy, target: Target) -> float:
    """The rate that is promised to him who knows T, F and the kind of the pauses: from the pauses of the same trace he
    estimates their rate (Jeffreys' prior) and the parameters of their lengths (fiducial distributions)."""
    from latfit.model import Pauses, noise_of
    from latfit.planning.load.capacity import feasible_rates, range_of
    from latfit.planning.load.uncertainty import DRAWS, percentile_ratios, robust_rate
    from latfit.queueing import ServiceTimes

    main, stalls = planted.system.main, planted.system.main.stalls
    assert stalls is not None
    law, per_second = stalls.lengths_ms, stalls.per_ms
    without = replace(planted, system=replace(planted.system, main=replace(main, stalls=None)))
    calm = truth_of.measure(without, planted.rows, seed)
    added = truth_of.measure(planted, planted.rows, seed)["T_ms"] - calm["T_ms"]
    lengths = np.sort(added[added > 1e-9])
    exposure = float(calm["T_ms"].sum()) if per_second else float(planted.rows)
    F = noise_of(main.laws[0].draw(200_000, np.random.default_rng([seed, 12])), np.ones(200_000))
    T = np.asarray(main.times_ms)[: planted.system.cap]
    shares = np.concatenate([np.linspace(0, 0.9, 91), 1 - np.geomspace(0.1, 1e-4, 91)[1:], [1.0]])
    middle = (shares[1:] + shares[:-1]) / 2

    def made(per: float, quantiles: np.ndarray) -> Machine:
        per_step, per_ms = (0.0, per * F.pooled.mean) if per_second else (per, 0.0)
        pauses = Pauses(quantiles, np.zeros(len(middle)), np.diff(shares), per_step, per_ms, len(lengths))
        times = ServiceTimes(T, replace(F, pauses=pauses), 0.0)
        return replace(machine, gpu=replace(machine.main, times=times))

    class Known(Machine):
        def drawn(self, draw: int) -> Machine:
            rng, n = np.random.default_rng([seed, 13, draw]), len(lengths)
            quantiles: np.ndarray = np.full(len(middle), lengths.mean())
            if law.kind == truth_of.EXPONENTIAL:
                quantiles = np.log1p(-middle) * (-lengths.sum() / rng.standard_gamma(n))
            elif law.kind == truth_of.UNIFORM:
                u = np.sort(rng.random(n))
                width = (lengths[-1] - lengths[0]) / max(u[-1] - u[0], 1e-9)
                quantiles = np.maximum(lengths[0] + (middle - u[0]) * width, 1e-9)
            found = made(rng.standard_gamma(n + 0.5) / exposure, quantiles)
            return replace(found, arrivals=machine.arrivals.drawn(np.random.default_rng(draw)))

    of_all = made(stalls.rate, np.quantile(law.draw(200_000, np.random.default_rng([seed, 14])), middle))
    known = Known(of_all.cpu, of_all.gpu, of_all.arrivals, of_all.steady, of_all.seed)
    rate = planted.system.arrivals.rate
    ratios = percentile_ratios(known, strategy, target, rate, range(DRAWS))
    most = range_of(feasible_rates(known, strategy, target), rate)[1]
    assert ratios is not None
    return robust_rate(known, strategy, target, np.argsort(-ratios, kind="stable").tolist(), most) or 0.0


def requests_outcome(noise: str, seed: int) -> list[Outcome]:
    """Replicas that are planned for a limit of p99 TTFT, and how many are needed."""
    from latfit.fitting.fit import fit_trace
    from latfit.fitting.problem import FitOptions
    from latfit.planning.fit_quality import quality_of
    from latfit.planning.serving.effects import max_step_slowdown
    from latfit.planning.serving.evaluate import Evaluator, requests_for
    from latfit.planning.serving.search import Search, SearchSpace
    from latfit.planning.serving.targets import RequestTarget, Targets
    from latfit.simulation import EngineSettings, step_costs
    from latfit.trace.table import Trace
    from latfit.workload import OpenLoad, Poisson, Resampled

    rng = np.random.default_rng([seed, 8])
    engine, engines = truth_of.random_engine(noise, rng), int(rng.integers(2, 5))
    rate = float(rng.uniform(0.3, 0.97)) * engines * engine.most_per_ms()
    limit = engine.ttft(rate, engines, seed).value * float(rng.uniform(1.1, 2))
    fit = fit_trace(Trace(engine.measure(ENGINE_ROWS, seed)), FitOptions("linear"))
    settings = EngineSettings(
        max_num_seqs=truth_of.MOST_RUNNING, max_num_batched_tokens=truth_of.STEP_TOKENS, kv_blocks=1_000_000,
        asynchronous=False, padded_graphs=False,
    )  # fmt: skip
    load = OpenLoad(Poisson(rate), Resampled(engine.prompt, engine.output))
    evaluator = Evaluator(load, step_costs(fit), Targets((RequestTarget("ttft", limit, 99.0, None, ""),)), seed=seed)
    evaluator.alone_ms = evaluator.alone(settings).summary.latency["mean"].value
    evaluator.requests = requests_for(load, evaluator.alone_ms)
    fixed = {"max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "batching", "order"}
    found = Search(evaluator, settings, SearchSpace(frozenset(fixed))).run()
    group = f"requests, {noise}, {engines} engines"
    if found.best is None:
        return [Outcome("requests", group, limit, 0.0, limit, math.nan, 0.0, "no number of replicas")]
    planned = found.best.setup.replicas
    slower_pct = 100 * (max_step_slowdown(evaluator, found.best, found.capacity) - 1)
    sure = found.best.certain and slower_pct >= quality_of("", fit).worst_pct
    tail = engine.ttft(rate, planned, seed + 1)
    needed = planned
    while needed > 1 and engine.ttft(rate, needed - 1, seed + 2).value <= limit:
        needed -= 1
    while needed == planned and engine.ttft(rate, needed, seed + 2).value > limit:
        needed += 1
    why = "" if sure else "decided by chance, or not kept with steps longer by the fit's error"
    return [Outcome("requests", group, limit, 0.0, limit, tail.value, tail.error, why, provision=planned / needed)]


def burst_outcomes(seed: int) -> list[Outcome]:
    """Two engines that serve one request a slot, and bursts of requests: by no policy is the 99th percentile above that
    of the first engine alone, whose answers are counted off round by round."""
    from latfit.policies import POLICIES, Settings, named_policy
    from latfit.simulation import Options, System as TwoPaths, simulate, table_path
    from latfit.simulation.policies.service import path_times
    from latfit.workload import RecordedLoad, make_requests

    rng = np.random.default_rng([seed, 11])
    slots, at_once = int(rng.integers(1, 17)), int(rng.integers(20, 400))
    main_ms, side_ms = float(rng.uniform(100, 2000)), float(rng.uniform(2000, 9000))
    gap_ms = float(rng.uniform(1, 2)) * (math.ceil(at_once / slots) * main_ms + side_ms)
    alone_ms = math.ceil(math.ceil(Q * at_once) / slots) * main_ms
    arrive = (np.arange(20)[:, None] * gap_ms + np.zeros(at_once)).ravel()
    main = table_path("gpu", [main_ms], servers=slots)
    system = TwoPaths(main, table_path("cpu", [side_ms], servers=int(rng.integers(1, 5))))
    found = []
    for name in [name for name, policy in POLICIES.items() if policy.needs_side]:
        policy = named_policy(name, 1.0, path_times(system), Settings(B1=1))
        load = RecordedLoad(make_requests(arrive))
        options = Options(len(arrive), replications=1, warmup=0.0)
        late = simulate(policy, system, load, options).latency[f"p{100 * Q:g}"].value
        group = f"{name}, {slots} slots, {at_once} at once"
        found.append(Outcome("burst", group, alone_ms, 0.0, alone_ms * (1 + 1e-9), late, 0.0))
    return found


def _rate_outcome(system: System, carried: float, sla: float, group: str, seed: int) -> Outcome:
    """The limit at the promised rate: a promise of a percentile at most `sla`."""
    if carried >= system.limit:
        return Outcome("rate", group, sla, 0.0, sla, math.inf, 0.0)
    late = truth_of.truth(_at_rate(system, carried), TRUTH, seed=seed + 1).quantile(Q)
    low, high = carried, system.limit
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        # Nearer to the limit of stability no rate is worth the time that it takes to tell.
        kept = middle < 0.97 * system.limit and (
            truth_of.truth(_at_rate(system, middle), COARSE, seed=seed + 2).quantile(Q).value <= sla
        )
        low, high = (middle, high) if kept else (low, middle)
    return Outcome("rate", group, sla, 0.0, sla, late.value, late.error, provision=low / carried)


def _at_rate(system: System, rate: float) -> System:
    return replace(system, arrivals=system.arrivals.at_rate(rate))


def recording(system: System, seed: int) -> np.ndarray:
    """Gaps in ms of RECORDED arrivals; of a recording its own."""
    count = len(system.arrivals.gaps_ms) or RECORDED
    return system.arrivals.gaps(count, np.random.default_rng([seed, 3]))


def _one(job: tuple[Planted, int], kinds: Sequence[str]) -> list[Outcome]:
    planted, seed = job
    found = outcomes(planted, seed, oracle="oracle" in kinds) if {"one path", "oracle"} & set(kinds) else []
    if "requests" in kinds and planted.noise in ("narrow", "pauses", *truth_of.STALLS):
        found += requests_outcome(planted.noise, seed)
    if "bursts" in kinds:
        found += burst_outcomes(seed)
    return [replace(row, seed=seed) for row in found]


def report(found: Sequence[Outcome]) -> None:
    """Print the table by kind of promise and family of noise, the policies of bursts, and broken promises."""
    for kind in dict.fromkeys(row.kind for row in found):
        rows = [row for row in found if row.kind == kind]
        print(f"{kind}:\n    {'':24} drawn promised  broken  below  over-provisioned  oracle")
        families = dict.fromkeys(row.group.split(", ")[1 if kind != "burst" else 0] for row in rows)
        for family in (*sorted(families), "all"):
            some = [row for row in rows if family in ("all", *row.group.split(", "))]
            made = [row for row in some if not row.declined]
            provision, oracle = (_median([getattr(row, name) for row in made]) for name in ("provision", "oracle"))
            broken, below = sum(row.broken for row in made), sum(row.cautious for row in made)
            print(f"    {family:24} {len(some):5} {len(made):8} {broken:7} {below:6} {provision:17.2f} {oracle:7.2f}")
        declined = Counter(row.declined.split(" (")[0].split(":")[0] for row in rows if row.declined)
        print("".join(f"    declined, {why}: {count}\n" for why, count in declined.most_common()), end="")
    for row in found:
        if row.broken and not row.declined:
            print("  broken:", row)


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def run(systems: int, seed: int, kinds: Sequence[str], log: str, families: Sequence[str], rows: int) -> list[Outcome]:
    """All outcomes, on all cores. log: a file that takes each as it comes. families: of noise; empty for all. rows: how
    many times as many steps are measured."""
    drawn = enumerate(truth_of.random_systems(systems, seed))
    jobs = [(replace(each, rows=rows * each.rows), 1000 * seed + i) for i, each in drawn]
    jobs = [job for job in jobs if not families or job[0].noise in families]
    found: list[Outcome] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for outcome in pool.map(partial(_one, kinds=kinds), jobs, chunksize=1):
            found += outcome
            if log:
                with open(log, "a") as stream:
                    stream.writelines(f"{json.dumps(asdict(row))}\n" for row in outcome)
    return found


def main(smoke: bool = False, arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.promises")
    parser.add_argument("--systems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", default="", help="file that takes each outcome as it comes")
    parser.add_argument("--pauses", action="store_true", help="only systems whose pauses add to steps")
    parser.add_argument("--family", action="append", default=[], help="only systems with this noise")
    parser.add_argument("--only", action="append", choices=KINDS, help="of the promises")
    parser.add_argument("--rows", type=int, default=1, help="how many times as many steps are measured")
    asked = parser.parse_args(arguments)
    began = time.perf_counter()
    kinds = asked.only or [kind for kind in KINDS if kind != "oracle"]
    systems, families = (2 if smoke else asked.systems), truth_of.STALLS if asked.pauses else asked.family
    if smoke:
        found = [row for i, each in enumerate(truth_of.random_systems(systems, 1)) for row in _one((each, i), kinds)]
    else:
        found = run(systems, asked.seed, kinds, asked.log, families, asked.rows)
    print(f"promises: {systems} random systems, {time.perf_counter() - began:.0f} s")
    report(found)


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:], [each for each in sys.argv[1:] if each != "--smoke"])
