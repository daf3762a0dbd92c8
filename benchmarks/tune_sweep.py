"""`latfit tune` compared with a sweep of eight settings and with the engine's defaults: goodput, restarts, minutes.

Planted: ten engines with T = f + r B + t S and noise. Tuning sees 2,000 noisy steps and starts each engine once with
the settings that it plans; the sweep starts it eight times and keeps the settings with the highest goodput. The TPOT
limit is 80 % of the defaults' p99; one of 46 settings meets both limits with a margin of 15 %. Goodput is simulated.

Real: `python -m benchmarks.tune_sweep --repetitions 3 --rate 4/s --lengths 200:50 --ttft 1s --tpot 40ms -- vllm serve
MODEL ...` runs tuning, the eight settings and the defaults in turn, each on a fresh start with the same client.
"""

import argparse
import math
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import latfit
from latfit.api.quantities import duration, rate as parse_rate
from latfit.planning import Goodput, RequestTarget, Targets
from latfit.planning.serving.evaluate import Evaluator, Setup
from latfit.simulation import EngineSettings, Promise, linear_costs
from latfit.trace import Trace
from latfit.tuning import send_load, start_engine, until_answered, warm_up
from latfit.workload import Constant, OpenLoad, Poisson, Streams, parse_lengths

ENGINES = 10
DEFAULTS = (256, 2048)
"""max_num_seqs and max_num_batched_tokens of vLLM."""
SWEEP = tuple(product((8, 32, 128, 256), (512, 2048)))
GRID = tuple((n, m) for n, m in product((4, 8, 16, 32, 64, 128, 256), (64, 128, 256, 512, 1024, 2048, 4096)) if n <= m)
BINDING = 0.8  # TPOT limit over the p99 TPOT of the defaults
MARGIN = 1.15
REPLICATIONS = 64  # at most: until p99s are within 10 %, as in a final answer
NOISE = 0.05
Settings = tuple[int, int]


class Planted:
    """An engine with a load and limits that bind."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([11, seed])
        self.fixed, self.request, self.token = rng.uniform(4, 20), rng.uniform(0.05, 0.4), rng.uniform(0.02, 0.08)
        prompt, output = int(rng.integers(100, 1500)), int(rng.integers(50, 400))
        self.lengths = f"{prompt}:{output}"
        costs = linear_costs(self.fixed, self.request, self.token)
        # 70 % of what 64 requests at once generate
        step_ms = self.fixed + 64 * (self.request + self.token * (1 + prompt / output))
        self.rate = 0.7 * 64 / (output * step_ms)
        load = OpenLoad(Poisson(self.rate), Constant(prompt, output))
        loose = Targets((RequestTarget("ttft", 1e9), RequestTarget("tpot", 1e9)))
        self.evaluator = Evaluator(load, costs, loose, seed=seed)
        found = {each: self.p99(each) for each in GRID}
        self.tpot = BINDING * found[DEFAULTS][1]
        self.ttft = MARGIN * min(ttft for ttft, tpot in found.values() if MARGIN * tpot <= self.tpot)

    def p99(self, settings: Settings) -> tuple[float, float]:
        ttft, tpot = self.measure(settings, self.evaluator)
        return ttft, tpot

    def measure(self, settings: Settings, evaluator: Evaluator) -> list[float]:
        engine = EngineSettings(max_num_seqs=settings[0], max_num_batched_tokens=settings[1], kv_blocks=50_000_000)
        found = evaluator.measure(Setup(engine, 1), replications=REPLICATIONS)
        return [each.value for each in found.reached]

    def goodput_pct(self, settings: Settings) -> float:
        goodput = Goodput(99.0, Promise(ttft_ms=self.ttft, tpot_ms=self.tpot))
        return 100 - self.measure(settings, replace(self.evaluator, targets=Targets((), goodput)))[0]

    def meets(self, settings: Settings) -> bool:
        ttft, tpot = self.p99(settings)
        return ttft <= self.ttft and tpot <= self.tpot

    def fit(self, seed: int) -> "latfit.Fit":
        """Fit 2,000 noisy steps as an engine under load runs them."""
        rng = np.random.default_rng([12, seed])
        B = np.round(np.exp(rng.uniform(0, np.log(256), 2000)))
        prefills = rng.random(2000) < 0.4
        S = B + np.where(prefills, np.round(rng.uniform(1, 4096 - 256, 2000)), 0)
        T = (self.fixed + self.request * B + self.token * S) * np.exp(rng.normal(0, NOISE, 2000))
        n = prefills.astype(int)
        return latfit.fit(Trace({"B": B, "S": S, "T_ms": T, "prefill_requests": n, "prefill_tokens": S - B + n}))

    def tune(self, seed: int) -> Settings | None:
        limits: dict[str, Any] = {"ttft": f"{self.ttft}ms", "tpot": f"{self.tpot}ms"}
        plan = latfit.plan_engine(self.fit(seed), f"{1e3 * self.rate}/s", self.lengths, replicas=1, **limits)
        if not plan.feasible:
            return None
        return plan.engine["max_num_seqs"], plan.engine["max_num_batched_tokens"]


def planted(engines: int) -> None:
    """Print a row an engine."""
    print("planted engines: goodput in % of requests, p99 within both limits, restarts")
    print(f"{'engine':>6}  {'load':24}  {'tune':>20}  {'sweep of 8':>20}  {'defaults':>12}")
    met = np.zeros(3, dtype=int)
    goodput = np.zeros((engines, 3))
    for seed in range(engines):
        engine = Planted(seed)
        swept = max(SWEEP, key=engine.goodput_pct)
        chosen = (engine.tune(seed), swept, DEFAULTS)
        goodput[seed] = [0.0 if each is None else engine.goodput_pct(each) for each in chosen]
        met += [each is not None and engine.meets(each) for each in chosen]
        texts = [
            f"{value:.1f} ({'none' if each is None else f'{each[0]}/{each[1]}'})"
            for value, each in zip(goodput[seed], chosen, strict=True)
        ]
        load = f"{1e3 * engine.rate:.3g}/s of {engine.lengths}"
        print(f"{seed:6}  {load:24}  {texts[0]:>20}  {texts[1]:>20}  {texts[2]:>12}", flush=True)
    mean = goodput.mean(axis=0)
    print(
        f"both p99s within limits: tune {met[0]}, sweep {met[1]}, defaults {met[2]} of {engines}; mean goodput", end=" "
    )
    print(f"{mean[0]:.2f}, {mean[1]:.2f}, {mean[2]:.2f} %; restarts 1, 8, 0")


def measure(words: list[str], request: argparse.Namespace, folder: Path, seed: int) -> tuple[float, float, float]:
    """Start an engine, load it, and return the goodput in % and the p99s of TTFT and TPOT in ms."""
    per_ms, load_ms = parse_rate(request.rate), duration(request.load, "--load")
    engine = start_engine(words, folder / "engine.log", {}, request.url)
    try:
        model = until_answered(request.url, 600.0, engine.why_gone)
        lengths = parse_lengths(request.lengths)
        count = round(0.2 * per_ms * load_ms)
        load = OpenLoad(Poisson(per_ms), lengths)
        warm_up(lambda number: send_load(request.url, model, load.sample(count, Streams(seed, number)), (seed, number)))
        requests = load.sample(round(per_ms * load_ms), Streams(seed, 99))
        answers = send_load(request.url, model, requests, (seed, 99))
    finally:
        engine.stop()
    counted = [each for each in answers if each.due_s >= 0.2e-3 * load_ms]
    ttft = np.array([math.inf if each.failure else each.ttft_ms for each in counted])
    tpot = np.array([math.inf if each.failure else each.tpot_ms for each in counted])
    good = (ttft <= duration(request.ttft, "--ttft")) & (tpot <= duration(request.tpot, "--tpot"))
    slowest, longest = (float(np.quantile(each, 0.99, method="inverted_cdf")) for each in (ttft, tpot))
    return 100 * float(np.mean(good)), slowest, longest


def with_settings(command: list[str], settings: Settings) -> list[str]:
    return [*command, "--max-num-seqs", str(settings[0]), "--max-num-batched-tokens", str(settings[1])]


def row(way: str, settings: Settings | None, found: tuple[float, float, float], restarts: int, spent_s: float) -> None:
    text = "own" if settings is None else f"{settings[0]}/{settings[1]}"
    numbers = f"{found[0]:9.1f}  {found[1]:11.1f}  {found[2]:11.2f}"
    print(f"{way:12}  {text:>9}  {numbers}  {restarts:8}  {spent_s / 60:7.1f}", flush=True)


def tuned(request: argparse.Namespace, folder: Path, seed: int) -> tuple[Settings | None, int]:
    """Return the settings that `latfit tune` finds, None if none meet the limits, and its restarts."""
    limits: dict[str, Any] = {"ttft": request.ttft, "tpot": request.tpot, "load": request.load, "rate": request.rate}
    found = latfit.tune(request.command, lengths=request.lengths, out=folder / "tuned", seed=seed, **limits).result
    names = ("max_num_seqs", "max_num_batched_tokens")
    settings = (int(found.settings[names[0]]), int(found.settings[names[1]])) if found.settings else None
    return settings, found.restarts


def real(request: argparse.Namespace) -> None:
    """Print a row a repetition and way; each ends with the same load on a fresh start."""
    print(f"{'way':12}  {'settings':>9}  goodput %  p99 TTFT ms  p99 TPOT ms  restarts  minutes")
    for seed in range(request.repetitions):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            row("defaults", None, measure(request.command, request, folder, seed), 0, 0.0)
            began = time.monotonic()
            settings, restarts = tuned(request, folder, seed)
            spent_s = time.monotonic() - began
            command = request.command if settings is None else with_settings(request.command, settings)
            row("tune", settings, measure(command, request, folder, seed), restarts, spent_s)
            began = time.monotonic()
            found = {
                point: measure(with_settings(request.command, point), request, folder, 100 + seed) for point in SWEEP
            }
            spent_s = time.monotonic() - began
            best = max(SWEEP, key=lambda point: found[point][0])
            again = measure(with_settings(request.command, best), request, folder, seed)
            row("sweep of 8", best, again, len(SWEEP), spent_s)


def main(smoke: bool = False) -> None:
    """Run the planted engines."""
    if smoke:
        print("tune_sweep: skipped, it is no small run")
    else:
        planted(ENGINES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--url", default="http://127.0.0.1:18000")
    for name, usual in (("rate", "4/s"), ("lengths", "200:50"), ("ttft", "1s"), ("tpot", "40ms"), ("load", "25s")):
        parser.add_argument(f"--{name}", default=usual)
    parser.add_argument("command", nargs="*")
    asked = parser.parse_args()
    real(asked) if asked.command else main(asked.smoke)
