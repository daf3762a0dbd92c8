"""Values that options take, for tests that try options: small inputs, and a command line of each verb that works."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from latfit.cli.app import run
from latfit.trace import Trace, write_trace
from tests.conftest import planted_trace
from tests.docs.reference import commands
from tests.unit.exporting.plans import of_requests

COMMANDS = dict(commands())

PATHS = ["--nominal", "gpu:launch=8ms,slope=0.05ms", "--nominal", "amx:p50=2ms"]
ENGINE = ["--fit", "gpu.fit.json", "--kv-blocks", "14"]

BASE: dict[str, list[str]] = {
    "ingest": ["two.parquet"],
    "trace show": ["two.parquet"],
    "fit": ["gpu.parquet", "--model", "saturation"],
    "predict": ["gpu.fit.json", "-B", "8", "-B", "16", "-S", "32"],
    "evaluate": ["gpu.fit.json", "again.parquet"],
    "compare": ["gpu.parquet", "again.parquet"],
    "hardware add": ["new", "gpu.fit.json"],
    "hardware remove": ["amx"],
    "hardware show": [],
    "plan": ["--sla", "60ms"],
    "export": ["vllm", "plan.json"],
    "simulate policies": [*PATHS, "--policy", "three-stage", "--rate", "200/s", "--requests", "500"],
    "simulate engine": [*ENGINE, "--rate", "40/s", "--lengths", "64:8", "--requests", "60", "--replications", "2"],
    "simulate study": [*PATHS, "--requests", "500"],
    "validate": ["gpu.fit.json", "measured.csv", "--kv-blocks", "12", "--force"],
    "report": [],
    "profile": ["--device", "numpy", "--grid", "B=1;S=1,2", "--budget", "200ms", "--processes", "1"],
    "demo": [],
}
"""Arguments of each verb with which it works in the folder that `prepare` makes."""

READING = {
    "--format": ["table", "parquet"],
    "--map": ["T_ms=other_ms"],
    "--unit": ["s"],
    "--where": ["B > 4", "not (B = 2 or S in (4, 16))"],
    "--max-t": ["40ms"],
    "--keep": ["cold_start"],
    "--drop": ["outlier"],
    "--allow-drops": [],
    "--cells": [],
    "--backend": ["local"],
    "--scheduler": ["tcp://127.0.0.1:1"],
    "--skip-bad": [],
}
VALUES: dict[str, list[str]] = {
    **READING,
    "--acceptance": ["0.3"],
    "--ageing": ["50ms"],
    "--arrival-process": ["gamma:2", "bursts:4:0.1:1s"],
    "--arrivals": ["arrivals.csv"],
    "--arrivals-window": ["5s"],
    "--autoscale": ["requests:2:1..2:100ms"],
    "--b1": ["3"],
    "--bandwidth": ["3.35e12"],
    "--batch": ["4"],
    "--batching": ["continuous", "static"],
    "--block-size": ["32"],
    "--bootstrap": ["20"],
    "--bounds": ["tau_0=1:3.5"],
    "--budget": ["300ms"],
    "--buckets": ["1,4"],
    "--class": ["chat:0.3:50ms", "batch:0.7"],
    "--context": ["512"],
    "--context-tokens": ["900"],
    "--data": ["steps.csv"],
    "--design": ["grid"],
    "--device": ["numpy"],
    "--draft-cost": ["0.5ms"],
    "--draft-tokens": ["3"],
    "--dropped": ["dropped.parquet"],
    "--figure": ["figure.png"],
    "--fit": ["other.fit.json"],
    "--fix": ["tau_0=4"],
    "--flops": ["989e12"],
    "--flops-per-token": ["2e9"],
    "--grid": ["B=1;S=1"],
    "--hardware": ["second.json"],
    "--intervals": ["profile"],
    "--kv-blocks": ["300"],
    "--launch-share": ["0.3"],
    "--length-error": ["0.5"],
    "--lengths": ["32:16"],
    "--level": ["0.5"],
    "--load-curve": ["curve.csv"],
    "--log": ["log.csv"],
    "--long-prefill-token-threshold": ["16"],
    "--longest": ["4ms"],
    "--loss": ["linear"],
    "--max-batch": ["16"],
    "--max-error": ["0.001%"],
    "--max-num-batched-tokens": ["64"],
    "--max-num-seqs": ["2"],
    "--merge-below": ["4"],
    "--model": ["linear", "tiny"],
    "--nominal": ["gpu:p50=9ms"],
    "--objective": ["p99=1,mean=0.5"],
    "--order": ["sjf", "priority"],
    "--out": ["out.parquet"],
    "--path": ["cpu"],
    "--percentile": ["95"],
    "--policy": ["cutoff", "window"],
    "--precision": ["0.2"],
    "--prefill-fit": ["slow.fit.json"],
    "--prefill-lengths": ["..100", "100.."],
    "--prefill-on": ["slow.fit.json"],
    "--prefill-replicas": ["2"],
    "--prefill-requests": ["0"],
    "--prefill-tokens": ["0"],
    "--prefix-hit-rate": ["0.5"],
    "--prefix-share": ["0.9"],
    "--price": ["2.5"],
    "--prior": ["tau_0=4:1"],
    "--prompt-lengths": ["measured.csv"],
    "--prompt-tokens": ["64"],
    "--rate": ["100/s"],
    "--replicas": ["2"],
    "--replicas-at": ["at.csv"],
    "--replications": ["3"],
    "--report": ["pages"],
    "--requests": ["700"],
    "--resample": ["residual"],
    "--residuals": ["absolute"],
    "--route": ["least-loaded"],
    "--rule": ["literal"],
    "--seed": ["7"],
    "--servers": ["amx=2"],
    "--shape": ["input:Bx3"],
    "--service": ["deterministic", "exponential"],
    "--sla": ["60ms"],
    "--solver": ["trf"],
    "--start-at": ["3"],
    "--start-up": ["100ms"],
    "--step-bytes": ["1e9"],
    "--swap": ["200us"],
    "--sweep": ["t-cut=1ms,4ms"],
    "--switch-at": ["4"],
    "--t-cut": ["3ms"],
    "--tenants": ["3"],
    "--think": ["10ms"],
    "--time": ["period"],
    "--tokens-per-request": ["4"],
    "--tolerance": ["50%"],
    "--tpot": ["30ms"],
    "--trace": ["gpu.parquet"],
    "--transfer": ["40ms"],
    "--ttft": ["150ms"],
    "--users": ["5"],
    "--wait": ["15ms"],
    "--warmup": ["0.1"],
    "--weights": ["segment"],
    "--window": ["3ms"],
    "--workers": ["2"],
    "--e2e": ["9s"],
    "--goodput": ["90%"],
    "--growth": ["2x"],
    "--gpu-memory": ["24GiB"],
    "--gpu-memory-utilization": ["0.8"],
    "--kv-dtype": ["fp8"],
    "--kv-memory": ["1GiB"],
    "--model-config": ["config.json"],
    "--price-per-hour": ["2.5"],
    "--tensor-parallel": ["2"],
    "--watts": ["700"],
    "-B": ["4"],
    "-S": ["64"],
}
"""One value or more that an option may have; none for a flag."""

OWN: dict[tuple[str, str], list[str]] = {
    ("fit", "--out"): ["out.fit.json"],
    ("plan", "--out"): ["out.json"],
    ("export", "--out"): ["serving"],
    ("export", "--model"): ["org/model"],
    ("plan", "--sla"): ["30ms"],
    ("plan", "--rate"): ["400/s"],
    ("validate", "--out"): ["out.json"],
    ("report", "--out"): ["page"],
    ("demo", "--out"): ["demo"],
    ("hardware add", "--nominal"): ["p50=2ms"],
    ("plan", "--arrivals"): ["many.csv"],
    ("simulate engine", "--requests"): ["70"],
    ("simulate engine", "--sweep"): ["max-num-seqs=1,3"],
}
"""Values of an option that has others elsewhere."""


def options_of(verb: str) -> dict[str, Any]:
    """The options of a verb by the name that is shown."""
    shown = {}
    for parameter in COMMANDS[verb].params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            long = [name for name in parameter.opts if name.startswith("--")]
            shown[(long or parameter.opts)[0]] = parameter
    return shown


def given(verb: str, option: str, which: int = 0) -> list[str]:
    """An option with one of its values, as typed."""
    values = [] if options_of(verb)[option].is_flag else OWN.get((verb, option), VALUES.get(option, []))
    return [option, values[which % len(values)]] if values else [option]


def prepare() -> None:
    """Small inputs in the working folder: traces, fits, machines, requests."""
    machine = ["--quiet", "--force", "--hardware"]
    for name, seed, slower in (("gpu", 0, 1.0), ("again", 2, 1.0), ("slow", 3, 1.8), ("other", 1, 1.4)):
        trace = planted_trace(0.03, repeats=2, seed=seed)
        steps = {column: trace[column] for column in trace.columns}
        steps["T_ms"] = steps["T_ms"] * slower
        steps["T_ms"][_quick(steps)] *= 3.5
        steps["other_ms"] = steps["T_ms"] * 1.1
        steps["warmup"] = np.isin(_rank(steps), (10, 11))
        write_trace(Path(f"{name}.parquet"), Trace(steps))
        hardware = "hardware.json" if name == "gpu" else "second.json"
        _do("fit", f"{name}.parquet", "--model", "saturation", "--path", "gpu", *machine, hardware)
    for each in ("hardware.json", "second.json"):
        _do("hardware", "add", "amx", "--nominal", "p50=6ms", "--quiet", "--hardware", each)
    _two_systems()
    Path("plan.json").write_text(json.dumps(of_requests()))
    Path("steps.csv").write_text("B,S\n1,1\n4,16\n")
    Path("curve.csv").write_text("t_s,rate_per_s\n0,100\n5,300\n10,100\n")
    Path("at.csv").write_text("t_s,replicas\n0,1\n0.3,2\n0.9,3\n1.2,2\n")
    Path("many.csv").write_text("\n".join(["t_s", *(f"{0.0025 * i:.4f}" for i in range(2000))]) + "\n")
    rows = [f"{0.05 * i:.2f},{40 + i % 7},{9 + i % 3}" for i in range(800)]
    Path("arrivals.csv").write_text("\n".join(["t_s,prompt_tokens,output_tokens", *rows]) + "\n")
    head = "t_s,prompt_tokens,output_tokens,scheduled_s,first_token_s,last_token_s"
    rows = [
        f"{0.2 * i:.1f},{40 + i},{9 + i % 3},{0.2 * i:.1f},{0.2 * i + 0.05:.2f},{0.2 * i + 0.3:.1f}" for i in range(60)
    ]
    Path("measured.csv").write_text("\n".join([head, *rows]) + "\n")


def _quick(steps: dict[str, Any]) -> int:
    """A step of several requests that is quick enough to be an outlier below every limit."""
    return int(np.argmin(np.where(steps["B"] > 4, steps["T_ms"], np.inf)))


def _rank(steps: dict[str, Any]) -> Any:
    """Rank (n,) of steps by their time, those of several requests first."""
    order = np.lexsort((steps["T_ms"], steps["B"] <= 4))
    return np.argsort(order)


def _two_systems() -> None:
    """Steps of two machines, with a cold start and a path."""
    trace = planted_trace(0.03, repeats=8, seed=3)
    rng, n = np.random.default_rng(5), len(trace)
    order = rng.permutation(n)
    steps = {column: trace[column][order] for column in trace.columns}
    steps["T_ms"][:3] *= 6
    steps["T_ms"][_quick(steps)] *= 3.5
    steps["warmup"] = np.arange(n) < 4
    steps["hardware"] = np.where(np.arange(n) % 2 == 0, "h100", "a100").astype(object)
    steps["other_ms"] = steps["T_ms"] * 1.1
    steps["step"] = np.arange(n)
    assert math.isfinite(float(steps["T_ms"].sum()))
    write_trace(Path("two.parquet"), Trace(steps))


def _do(*arguments: str) -> None:
    code = run(list(arguments))
    assert code == 0, f"latfit {' '.join(arguments)}: exit code {code}"
