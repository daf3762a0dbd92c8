"""What other simulators of serving engines make of the same arrivals at the same cost of a step, request by request.

`python -m benchmarks.peer_simulators --arrivals azure2023_conv.csv [--vidur FOLDER --vidur-python PYTHON]
[--blis FOLDER]`. The first FOLDER holds Vidur's source, PYTHON has its requirements. The second holds the source of
BLIS (inference-sim) and what `go build -o blis .` made of it, with `benchmarks/blis_linear_cost.go` put into its
`sim/latency/` and the lines that its comment names into `NewLatencyModel`. What is missing is skipped and named.

A step takes 8 + 0.05 tokens + 0.02 B ms, everywhere; at most 256 requests and 2048 tokens a step, blocks of 16 tokens.
Each load is the recording, played faster. Prints, for each load and simulator, TTFT and latency, and of how many
requests both are those of latfit to 0.1 ms, so that what differs is a rule and no cost; and the processor time, of
latfit's and Vidur's loop and of BLIS's whole command.
"""

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from latfit.simulation import EngineSettings, Routing, linear_costs, serve_replicas
from latfit.stats import FloatArray
from latfit.workload.recordings import read_requests
from latfit.workload.requests import Requests, make_requests

STEP_MS, REQUEST_MS, TOKEN_MS = 8.0, 0.02, 0.05
SETTINGS = EngineSettings(null_blocks=0, asynchronous=False, padded_graphs=False, reuse_freed=False)
SAME_MS = 0.1
"""BLIS counts in whole µs and rounds each step to them."""


@dataclass(frozen=True)
class Case:
    """The recording `faster` times as fast, on `replicas` in turn, each with so many blocks."""

    faster: float
    replicas: int = 1
    blocks: int = 40_000

    def __str__(self) -> str:
        engines = "1 engine" if self.replicas == 1 else f"{self.replicas} engines in turn"
        return f"{self.faster:g}x, {engines}, {self.blocks:,} blocks"


CASES = (Case(1), Case(2), Case(2.5), Case(8, replicas=4), Case(1, blocks=2_500), Case(1, blocks=2_000))
Times = tuple[FloatArray, FloatArray]
"""TTFT and latency of each request, ms, in the order of arrival."""


def ours(requests: Requests, case: Case, settings: EngineSettings = SETTINGS) -> Times:
    costs, routing = linear_costs(STEP_MS, REQUEST_MS, TOKEN_MS), Routing(case.replicas)
    run = serve_replicas(requests, costs, replace(settings, kv_blocks=case.blocks), routing)
    return run.ttft_ms, run.latency_ms


def command_of(command: Sequence[object], environment: dict[str, str]) -> tuple[str, float]:
    """What a command prints, and its processor seconds."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*map(str, command)], env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"peer simulators: {command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


def vidur(requests: Requests, case: Case, asked: argparse.Namespace, folder: Path) -> tuple[Times, float]:
    arrivals, times = folder / "arrivals.csv", folder / "times.csv"
    columns = {"t_s": requests.arrival_ms / 1000, "prompt_tokens": requests.prompt_tokens}
    write(arrivals, columns | {"output_tokens": requests.output_tokens})
    peer = Path(__file__).with_name("vidur_peer.py")
    command = [asked.vidur_python, peer, arrivals, len(requests), case.replicas, case.blocks, times]
    printed, _ = command_of(command, {"PYTHONPATH": asked.vidur, "WANDB_MODE": "disabled"})
    ttft, latency = np.loadtxt(times, delimiter=",", skiprows=1).T
    return (ttft, latency), json.loads(printed.strip().splitlines()[-1])["loop_cpu_s"]


def blis(requests: Requests, case: Case, asked: argparse.Namespace, folder: Path) -> tuple[Times, float]:
    folder_of_blis = Path(asked.blis)
    header, data, results = folder / "trace.yaml", folder / "trace.csv", folder / "results.json"
    header.write_text("trace_version: 2\ntime_unit: us\nmode: generated\nwarm_up_requests: 0\n")
    known: dict[str, Iterable[object]] = {
        "request_id": range(len(requests)),
        "input_tokens": requests.prompt_tokens,
        "text_tokens": requests.prompt_tokens,
        "output_tokens": requests.output_tokens,
        "arrival_time_us": np.round(requests.arrival_ms * 1000).astype(int),
    }
    write(data, {name: known.get(name, [fixed] * len(requests)) for name, fixed in BLIS_COLUMNS.items()})
    options = {
        "trace-header": header,
        "trace-data": data,
        "results-path": results,
        "model": "meta-llama/llama-2-7b-hf",
        "model-config-folder": folder_of_blis / "model_configs/llama-2-7b-hf",
        "defaults-filepath": folder_of_blis / "defaults.yaml",
        "hardware": "H100",
        "tp": 1,
        "num-instances": case.replicas,
        "routing-policy": "round-robin",
        "total-kv-blocks": case.blocks,
        "max-num-seqs": SETTINGS.max_num_seqs,
        "max-num-batched-tokens": SETTINGS.max_num_batched_tokens,
        "max-model-len": 32_768,
        "horizon": 10**13,
    }
    command = [f"{folder_of_blis}/blis", "replay", *(f"--{name}={value}" for name, value in options.items())]
    cost = ",".join(f"{each * 1000:g}" for each in (STEP_MS, REQUEST_MS, TOKEN_MS))
    _, spent = command_of(command, {"LINEAR_COST_US": cost})
    ttft, latency = np.full(len(requests), np.nan), np.full(len(requests), np.nan)
    for each in json.loads(results.read_text()):
        ttft[each["request_id"]], latency[each["request_id"]] = each["ttft_us"] / 1000, each["e2e_us"] / 1000
    return (ttft, latency), spent


BLIS_COLUMNS: dict[str, object] = {
    "request_id": "",
    "client_id": "c",
    "tenant_id": "t",
    "slo_class": "standard",
    "session_id": "",
    "round_index": 0,
    "prefix_group": "",
    "prefix_length": 0,
    "streaming": "true",
    **dict.fromkeys((f"{kind}_tokens" for kind in ("input", "output", "text", "image", "audio", "video")), 0),
    "reason_ratio": 0,
    "model": "",
    "deadline_us": 0,
    "server_input_tokens": 0,
    "arrival_time_us": 0,
    "send_time_us": 0,
    "first_chunk_time_us": 0,
    "last_chunk_time_us": 0,
    "num_chunks": 0,
    "status": "ok",
    "error_message": "",
    "finish_reason": "stop",
}
"""Columns of its recorded requests, version 2, and what stands in those that do not matter here."""


def write(path: Path, columns: Mapping[str, Iterable[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def line(name: str, times: Times, reference: Times, spent: float) -> str:
    ttft, latency = times
    same = [np.abs(mine - theirs) <= SAME_MS for mine, theirs in zip(times, reference, strict=True)]
    alike = 100 * np.mean(same[0] & same[1])
    shown = (np.nanmean(ttft), *np.nanpercentile(ttft, [50, 99]), np.nanmean(latency), *np.nanpercentile(latency, [99]))
    figures = "  ".join(f"{each:9,.1f}" for each in shown)
    return f"  {name:20} {figures}  {alike:6.2f} % {spent:8.2f} s"


def main(smoke: bool = False, arguments: list[str] | None = None) -> None:
    """Print what each makes of each load, and what was left out and why."""
    parser = argparse.ArgumentParser(prog="benchmarks.peer_simulators")
    for option in ("--arrivals", "--vidur", "--vidur-python", "--blis"):
        parser.add_argument(option)
    parser.add_argument("--requests", type=int, default=2000)
    asked = parser.parse_args([] if smoke else arguments)
    if asked.arrivals:
        recorded = read_requests(Path(asked.arrivals)).requests.select(slice(0, asked.requests))
    else:
        print("peer simulators: a made-up load, no --arrivals given")
        rng = np.random.default_rng(0)
        count = 200 if smoke else asked.requests
        recorded = make_requests(np.cumsum(rng.exponential(180, count)), *rng.integers(1, [[2300], [420]], (2, count)))
    for name, needed in (("vidur", "--vidur and --vidur-python"), ("blis", "--blis")):
        if getattr(asked, name) is None:
            print(f"peer simulators: {name} skipped, give {needed}")
    ours(recorded, CASES[0])  # compiles
    print(f"{'':20} {'TTFT mean':>11}{'p50':>11}{'p99':>11}{'latency mean':>14}{'p99':>8}   as latfit  processor")
    for case in CASES:
        print(f"{case}:")
        compare(replace(recorded, arrival_ms=recorded.arrival_ms / case.faster), case, asked)


def compare(requests: Requests, case: Case, asked: argparse.Namespace) -> None:
    """Print a line each. BLIS finds freed blocks again as vLLM does, Vidur does not: each beside latfit set like it."""
    began = time.process_time()
    plain = ours(requests, case)
    print(line("latfit", plain, plain, time.process_time() - began))
    kept = ours(requests, case, replace(SETTINGS, reuse_freed=True))
    for name, peer, reference in (("Vidur", vidur, plain), ("BLIS", blis, kept)):
        if getattr(asked, name.lower()) is not None:
            with tempfile.TemporaryDirectory() as folder:
                times, spent = peer(requests, case, asked, Path(folder))
            print(line(name, times, reference, spent))


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:], [each for each in sys.argv[1:] if each != "--smoke"])
