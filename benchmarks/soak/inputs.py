"""Small inputs, and a command line of each verb that works."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from tests.conftest import planted_trace
from tests.docs.reference import commands
from tests.unit.exporting.plans import of_requests

from latfit.cli.app import run
from latfit.trace import Trace, write_trace

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


def options_of(verb: str) -> dict[str, Any]:
    """The options of a verb by the name that is shown."""
    shown = {}
    for parameter in COMMANDS[verb].params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            long = [name for name in parameter.opts if name.startswith("--")]
            shown[(long or parameter.opts)[0]] = parameter
    return shown


def given(verb: str, option: str, which: int = 0) -> list[str]:
    """An option with a small number or quantity, as typed."""
    parameter = options_of(verb)[option]
    if parameter.is_flag:
        return [option]
    values = ["2", "20ms", "4/s", "0.5"]
    return [option, str(values[which % len(values)])]


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
