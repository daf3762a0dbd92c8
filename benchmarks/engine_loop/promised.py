"""The promise kept by a server: a plan from recorded steps, exported, given to a new server, and loaded again.

The plan is for one replica and two limits, of TTFT and of TPOT. Its settings go to vLLM as the exported YAML; the same
load is then served with vLLM's own settings. Both are held against the limits by the engine's own clock, and the first
against what the plan said.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.engine_loop.comparison import STATISTICS
from benchmarks.engine_loop.loads import Load, LoadRun, measured, warm_up
from benchmarks.engine_loop.server import Installation, serving
from latfit.api import EnginePlan, export, fit_phases, plan_engine, read
from latfit.stats import FloatArray
from latfit.trace import PERIOD, timed
from latfit.units import format_ms, format_percent


def promised_loop(
    vllm: Installation, place: Path, runs: Sequence[LoadRun], limits: str, load: Load, options: Sequence[str]
) -> None:
    """Print what was planned from the steps of `runs`, and what two servers then did. limits: TTFT:TPOT, such as
    3s:40ms; options: of either server, beside what is exported."""
    ttft, tpot = limits.split(":")
    fits = fit_phases([str(each) for run in runs for each in run.steps])
    plan = plan_engine(
        fits.decode,
        f"{load.rate_per_s:g}/s",
        str(runs[0].arrived),
        prefill_fit=fits.prefill,
        ttft=ttft,
        tpot=tpot,
        replicas=1,
    )
    print(plan.summary())
    if not plan.feasible:
        print("engine loop: nothing to export; ask for a lower --promised-rate or longer limits")
        return
    export(plan, "vllm", model=str(place / "model")).save(place / "exported")
    settings = ["--config", str(place / "exported" / "vllm.yaml")]
    tpot_ms = plan.result.targets[1].limit
    for name, more in (("as planned", settings), ("vLLM's own settings", [])):
        with serving(
            vllm, place / "model", place / name.replace(" ", "-").replace("'", ""), [*options, *more]
        ) as server:
            warm_up(server, load.lengths)
            run = measured(server, load)
        print(f"engine loop: {name}, {load.rate_per_s:g}/s, limits {ttft} and {tpot}")
        show(plan if more else None, run, tpot_ms)


def show(plan: EnginePlan | None, run: LoadRun, tpot_ms: float) -> None:
    """TTFT and TPOT by the engine's clock, beside the plan's where it was planned; steps above the limit of TPOT."""
    ttft = run.of_requests("queued_time") + run.of_requests("prefill_time")
    found = {"TTFT": ttft, "TPOT": run.of_requests("mean_time_per_output_token")}
    for name, times in found.items():
        for which in ("mean", "p99"):
            value = STATISTICS[which](times)
            beside = ""
            if plan is not None and plan.result.outcome is not None:
                said = getattr(plan.result.outcome, name.lower())[which].value
                beside = f"planned {format_ms(said)}, {format_percent(100 * (said / value - 1), signed=True)}"
            print(f"  {name} {which:<5}{format_ms(value):>10}  {beside}")
    period = _periods(run)
    above = float(np.mean(period > tpot_ms))
    most = read([str(each) for each in run.steps]).trace.floats("B").max()
    print(
        f"  {len(period):,} steps of up to {most:.0f} requests,"
        f" {format_percent(100 * above)} of them longer than {format_ms(tpot_ms)}"
    )


def _periods(run: LoadRun) -> FloatArray:
    trace = timed(read([str(each) for each in run.steps]), PERIOD).trace
    found: FloatArray = trace.floats("T_ms")
    return found
