"""What AMX brings: the tables and the figure of docs/how-to/cpu-or-gpu.md, from the traces in sample_traces.

python examples/amx.py docs/amx.png
"""

import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import latfit
from latfit.queueing import linear_times, simulate_batches

SAMPLES = Path(__file__).parent.parent / "sample_traces"
RUNS = {
    "AMX, OpenVINO": "amx_openvino_smollm2-135m",
    "AMX, PyTorch": "amx_torch_smollm2-135m",
    "AVX-512 BF16, OpenVINO": "avx512_openvino_smollm2-135m",
    "AVX-512 BF16, PyTorch": "avx512_torch_smollm2-135m",
    "NumPy fp32": "numpy_smollm2-135m",
}
STEPS = {
    "decode, B = 1": ("decode", 1, 1),
    "decode, B = 32": ("decode", 32, 32),
    "decode, B = 128": ("decode", 128, 128),
    "prefill, S = 256": ("prefill", 1, 256),
    "prefill, S = 512": ("prefill", 1, 512),
    "prefill, S = 1,024": ("prefill", 1, 1024),
    "prefill, 16 × 64": ("prefill", 16, 1024),
}
LAUNCHES_MS = (2, 6, 12, 24)
SLOPE_MS = 0.05
RATE_PER_MS = 0.01
SLA_SHARE = 0.75
MAX_BATCH = 256
LAYERS = 32

Cell = tuple[str, int, int]
"""Phase, B and S of a step."""


def median_times(name: str) -> dict[Cell, float]:
    """Return the median step time of each cell of a trace, in ms."""
    steps = latfit.read(SAMPLES / f"{name}.parquet").frame
    found: dict[Cell, float] = steps.groupby(["phase", "B", "S"])["T_ms"].median().to_dict()
    return found


def provenance(name: str) -> dict[str, Any]:
    """Return what `latfit profile` wrote about the one path of a trace."""
    (found,) = latfit.read(SAMPLES / f"{name}.parquet").trace.provenance["paths"].values()
    return dict(found)


def decode_times(times: Mapping[Cell, float]) -> dict[int, float]:
    """Return the decode step time of each batch, in ms."""
    return {int(B): T for (phase, B, _), T in sorted(times.items()) if phase == "decode"}


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| ---", "|---").replace("--- |", "---|")


def step_table(runs: Mapping[str, Mapping[Cell, float]]) -> str:
    """Step times in ms, and how many times faster AMX is than AVX-512 BF16 in the same library."""
    rows = []
    for label, cell in STEPS.items():
        times = [run.get(cell) for run in runs.values()]
        amx_openvino, amx_torch, openvino, torch, _ = times
        gains = [
            None if a is None or b is None else f"{a / b:.1f}"
            for a, b in ((openvino, amx_openvino), (torch, amx_torch))
        ]
        rows.append((label, *("–" if T is None else f"{T:.0f}" for T in times), *(gain or "–" for gain in gains)))
    return table(("step", *RUNS, "gain, OpenVINO", "gain, PyTorch"), rows)


def scaled_to_all_layers(times: Mapping[Cell, float]) -> dict[Cell, float]:
    """Scale the steps of two layers to 32: the layers count 16 times, the language-model head once.

    The head runs on the last token of each request. It takes its share of the weights in a decode step of as many
    requests.
    """
    model = provenance("amx_openvino_llama-3.1-8b-2layers")["model"]
    share = model["vocab"] * model["hidden"] / model["parameters"]
    found = {}
    for (phase, B, S), T in times.items():
        head = share * times.get(("decode", B, B), T)
        found[phase, B, S] = head + LAYERS / model["layers"] * (T - head)
    return found


def gpu_table(amx: Mapping[Cell, float]) -> str:
    """Llama-3.1-8B on AMX, scaled to 32 layers, and on the RTX 4090."""
    steps = latfit.read(SAMPLES / "rtx4090_llama-3.1-8b.parquet").frame
    rows = []
    for phase, B, S in (
        ("decode", 1, 1),
        ("decode", 8, 8),
        ("decode", 64, 64),
        ("prefill", 1, 64),
        ("prefill", 1, 256),
        ("prefill", 1, 1024),
    ):
        alike = steps[(steps["phase"] == phase) & (steps["B"] == B) & (steps["S"] == S)]
        alike = alike[alike["context_tokens"] == (256 * B if phase == "decode" else 0)]
        gpu = float(alike["T_ms"].median())
        size = f"B = {B}" if phase == "decode" else f"S = {S:,}"
        rows.append(
            (f"{phase}, {size}", f"{amx[phase, B, S]:.0f} ms", f"{gpu:.0f} ms", f"{amx[phase, B, S] / gpu:.0f}")
        )
    return table(("step", "AMX, two cores", "RTX 4090", "times slower"), rows)


def crossing_batch(amx: Mapping[int, float], launch_ms: float, slope_ms: float) -> str:
    """Return B1: the batch from which the GPU is at least as fast, between measured batches by interpolation."""
    above = {B: T - launch_ms - slope_ms * B for B, T in amx.items()}
    if above[1] >= 0:
        return "1"
    for (B, before), (later, after) in pairwise(above.items()):
        if after >= 0:
            return f"{B + (later - B) * -before / (after - before):.0f}"
    return f"above {max(amx)}"


def decode_line() -> tuple[float, float]:
    """Return launch and slope, in ms, of the RTX 4090's decode steps with 256 cached tokens a request."""
    steps = latfit.read(SAMPLES / "rtx4090_llama-3.1-8b.parquet").frame
    decode = steps[(steps["phase"] == "decode") & (steps["context_tokens"] == 256 * steps["B"])]
    slope_ms, launch_ms = np.polyfit(decode["B"], decode["T_ms"], 1)
    return float(launch_ms), float(slope_ms)


def largest_cutoff(gpu: str, cpu_ms: float, sla_ms: float) -> str:
    """Plan both paths; return the largest T_cut whose simulated p99 meets the SLA, and that p99."""
    paths = {"cpu": f"launch={cpu_ms}ms,slope=0ms", "gpu": gpu}
    found = latfit.plan(paths, sla_ms=sla_ms, rate_per_s=1e3 * RATE_PER_MS, max_batch=MAX_BATCH).result.T_cut
    if found is None or found.value is None:
        return "none"
    return f"{found.value:.1f} ms, p99 {found.bounds_ms['simulated']:.1f} ms"


def cutoff_table(models: Mapping[str, Mapping[int, float]]) -> str:
    """B1, T_cut and its p99, for an SLA of three quarters of the p99 that the GPU reaches alone."""
    launch_ms, slope_ms = decode_line()
    gpus = [(f"{launch} ms", float(launch), SLOPE_MS, tuple(models)) for launch in LAUNCHES_MS]
    gpus.append((f"RTX 4090, {launch_ms:.1f} ms", launch_ms, slope_ms, ("8 B",)))
    rows = []
    for label, launch_ms, slope_ms, names in gpus:
        gpu = linear_times(launch_ms, slope_ms, max_batch=MAX_BATCH)
        alone_ms = simulate_batches(RATE_PER_MS, gpu).percentile(0.99)
        sla_ms = SLA_SHARE * alone_ms
        row = [label, f"{alone_ms:.1f} ms", f"{sla_ms:.1f} ms"]
        for name, times in models.items():
            if name not in names:
                row += ["–", "–"]
                continue
            row.append(crossing_batch(times, launch_ms, slope_ms))
            row.append(largest_cutoff(f"launch={launch_ms}ms,slope={slope_ms}ms", times[1], sla_ms))
        rows.append(tuple(row))
    columns = [text for name in models for text in (f"{name}: B1", "T_cut")]
    return table(("launch", "p99, GPU alone", "SLA", *columns), rows)


def draw(runs: Mapping[str, Mapping[Cell, float]], file: str | Path) -> None:
    """Draw step time over the tokens of a prompt, and over the requests of a decode step."""
    from matplotlib.figure import Figure

    looks = {
        "AMX, OpenVINO": ("#c2003a", "-"),
        "AMX, PyTorch": ("#c2003a", "--"),
        "AVX-512 BF16, OpenVINO": ("#1268b3", "-"),
        "AVX-512 BF16, PyTorch": ("#1268b3", "--"),
        "NumPy fp32": ("#6b7280", "-"),
    }
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, run in runs.items():
        color, style = looks[label]
        prompts = {S: T for (phase, B, S), T in sorted(run.items()) if phase == "prefill" and B == 1}
        for axes, times in ((left, prompts), (right, decode_times(run))):
            axes.plot(list(times), list(times.values()), style, color=color, marker="o", ms=3.5, lw=1.8, label=label)
    left.set(title="Prefill computes: AMX is about four times faster", xlabel="tokens of one prompt, S")
    right.set(title="Decode of few requests reads weights: no gain", xlabel="requests in a decode step, B")
    for axes, ticks in ((left, (16, 64, 256, 1024)), (right, (1, 4, 16, 64, 128))):
        axes.set(xscale="log", yscale="log", ylabel="step time [ms]")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_yticks((20, 50, 100, 200, 500, 1000), ("20", "50", "100", "200", "500", "1,000"))
        axes.set_yticks([], minor=True)
        axes.grid(color="#e5e7eb")
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(18, 2000)
    right.set_ylim(18, 500)
    left.legend(frameon=False)
    figure.savefig(file, dpi=130)


def main(file: str | Path) -> None:
    """Print the page's tables and write its figure."""
    runs = {label: median_times(name) for label, name in RUNS.items()}
    llama = scaled_to_all_layers(median_times("amx_openvino_llama-3.1-8b-2layers"))
    models = {
        "14 M": decode_times(median_times("amx_openvino_tiny")),
        "135 M": decode_times(runs["AMX, PyTorch"]),
        "8 B": decode_times(llama),
    }
    for text in (step_table(runs), gpu_table(llama), cutoff_table(models)):
        print(f"{text}\n")
    draw(runs, file)


if __name__ == "__main__":
    main(sys.argv[1])
