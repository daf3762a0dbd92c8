"""The catalogue's entries, fitted anew: `python -m benchmarks.catalog [--only rtx4090]`.

Reads sample_traces/ and, where LATFIT_DATA names a folder with them, the step tables of IBM, splitwise and Vidur; then
prints the error of each system predicted from its nearest neighbour. An entry whose table is missing stays as it is.
"""

import argparse
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import latfit
from latfit.catalogue import KERNELS, STEPS, CatalogEntry, all_entries, fit_of, nearest
from latfit.catalogue.entry import SHIPPED
from latfit.catalogue.scaling import GRID, ratio_of
from latfit.files import dumps
from latfit.units import format_percent

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "sample_traces"
DATA = Path(os.environ.get("LATFIT_DATA", ROOT.parent / "shared" / "data")) / "steps"
DIGITS = 10
"""Significant digits of the numbers in an entry."""

OWN = ("latfit profile", "Apache-2.0", "measured for latfit, sample_traces/")
SPLITWISE = ("splitwise", "MIT", "https://github.com/Mutinifni/splitwise-sim")
IBM = ("TGI", "CDLA-Permissive-2.0", "https://github.com/IBM/LLM-performance-prediction")
VIDUR = ("Vidur's profiler", "MIT", "https://github.com/microsoft/vidur")
SERVINGSIM = ("vLLM kernels", "MIT", "https://github.com/casys-kaist/LLMServingSim")
NO_HOST = "host time of the engine"
NO_ATTENTION = "attention, and host time of the engine"

WEIGHTS = {
    "llama-3.1-8b": 8.03e9, "llama-3.2-1b": 1.236e9, "llama-3.2-3b": 3.213e9, "qwen2.5-0.5b": 0.494e9,
    "llama-2-70b": 68.98e9, "bloom-176b": 176.2e9, "llama-13b": 13.02e9, "llama-7b": 6.738e9, "starcoder": 15.52e9,
    "llama-2-7b-dense": 6.476e9, "smollm2-135m": 0.1345e9,
}  # fmt: skip
"""Parameters of the models, by their cards; of Llama-2-7B's dense layers without embedding and head."""


@dataclass(frozen=True)
class Table:
    """A system in a table of steps. where: its rows."""

    name: str
    file: Path
    about: tuple[str, str, str]
    contents: str
    lacks: str = ""
    dtype: str = "bfloat16"
    tp: int = 1
    where: str | None = None


def tables() -> Iterator[Table]:
    yield Table("rtx4090/llama-3.1-8b", SAMPLES / "rtx4090_llama-3.1-8b.parquet", SERVINGSIM, KERNELS, NO_HOST)
    for gpu, model in (
        ("h100", "llama-3.1-8b"),
        ("h100", "llama-3.2-1b"),
        ("h100", "llama-3.2-3b"),
        ("h200", "llama-3.1-8b"),
    ):
        yield Table(f"{gpu}/{model}", SAMPLES / f"{gpu}_{model}.parquet", OWN, KERNELS, NO_HOST)
    for path, model in (("amx16", "llama-3.2-1b"), ("amx", "smollm2-135m")):
        file = f"{path}_{model}" if path == "amx16" else f"{path}_torch_{model}"
        yield Table(f"xeon-{path}/{model}", SAMPLES / f"{file}.parquet", OWN, KERNELS, NO_HOST)
    for gpu in ("a100-80gb", "h100-80gb"):
        for tp, theirs, model in (
            (4, "llama2-70b", "llama-2-70b"),
            (8, "llama2-70b", "llama-2-70b"),
            (8, "bloom-176b", "bloom-176b"),
        ):
            yield Table(
                f"{gpu.removesuffix('-80gb') if gpu[0] == 'h' else gpu}/{model}@tp{tp}",
                DATA / "splitwise_a100_h100_tp4_tp8.parquet", SPLITWISE, STEPS,
                dtype="float16", tp=tp, where=f"hardware == '{gpu}' and model == '{theirs}' and tp == {tp}",
            )  # fmt: skip
    for file, name, tp in (
        ("llama-13b_a100_tp4", "a100-80gb/llama-13b@tp4", 4),
        ("llama-7b_h100_tp1", "h100/llama-7b", 1),
        ("starcoder_h100_tp1", "h100/starcoder", 1),
    ):
        yield Table(name, DATA / f"ibm_llm_pilot_{file}.parquet", IBM, STEPS, dtype="float16", tp=tp)
    for gpu, ours in (("a40", "a40"), ("a100", "a100-80gb"), ("h100", "h100")):
        for tp in (1, 2, 4, 8):
            yield Table(
                f"{ours}/llama-2-7b-dense{f'@tp{tp}' if tp > 1 else ''}",
                DATA / "vidur_dense_llama-2-7b.parquet", VIDUR, "dense layers", NO_ATTENTION,
                dtype="float16", tp=tp, where=f"hardware == '{gpu}' and tp == {tp}",
            )  # fmt: skip


def entry_of(table: Table) -> CatalogEntry:
    fit = latfit.fit(str(table.file), where=table.where).result
    gpu, _, model = table.name.partition("/")
    model = model.partition("@")[0]
    engine, licence, source = table.about
    document = rounded(fit.to_json())
    document["provenance"] = {"identity": {"hardware": gpu, "model": model, "tp": str(table.tp)}}
    document["data"] |= {"source": table.name, "sources": [table.name]}
    return CatalogEntry(
        name=table.name,
        gpu=gpu,
        model=model,
        tp=table.tp,
        dtype=table.dtype,
        engine=engine,
        contents=table.contents,
        lacks=table.lacks,
        B=tuple(fit.domain["B"]),  # type: ignore[arg-type]
        S=tuple(fit.domain["S"]),  # type: ignore[arg-type]
        steps=int(fit.metrics.n or 0),
        error_pct=fit.cross_validation.mape_pct,
        weights=WEIGHTS[model],
        licence=licence,
        source=source,
        fit=document,
    )


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def draw(found: list[tuple[CatalogEntry, CatalogEntry, float]]) -> None:
    """Write the errors of systems left out as bars into docs/leave_one_out.png."""
    from matplotlib.figure import Figure

    rows = sorted(found, key=lambda row: row[2])
    figure = Figure((8, 6), layout="constrained")
    axes = figure.subplots()
    colours = ["#9aa5b1" if system.lacks == NO_ATTENTION else "#1f77b4" for system, _, _ in rows]
    axes.barh(
        [f"{system.name}  from  {source.name}" for system, source, _ in rows],
        [100 * e for *_, e in rows],
        color=colours,
    )
    axes.set_xlabel("mean error of step times, % (grey: dense layers alone)")
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "leave_one_out.png", dpi=110)


def left_out(entries: dict[str, CatalogEntry]) -> Iterator[tuple[CatalogEntry, CatalogEntry, float]]:
    """Yield (system, its nearest neighbour, mean error) of every system that has a neighbour of the same contents."""
    for entry in entries.values():
        if entry.weights is None:
            continue
        others = {name: each for name, each in entries.items() if each is not entry and each.contents == entry.contents}
        if found := nearest(others, entry.gpu, entry.model, entry.weights, entry.tp):
            yield entry, found, mean_error(found, entry)


def mean_error(source: CatalogEntry, target: CatalogEntry) -> float:
    """Return the mean error of a scaled neighbour against a system's own fit, over the ranges that both measured."""
    assert target.weights is not None
    most = {axis: min(getattr(each, axis)[1] for each in (source, target)) for axis in ("B", "S")}
    sizes = {axis: np.unique(np.rint(np.geomspace(1, high, GRID))) for axis, high in most.items()}
    B, S = np.array([(b, s) for b in sizes["B"] for s in (b, *sizes["S"]) if s >= b]).T
    scaled = fit_of(source).latency_ms(B, S) * ratio_of(source, target.gpu, target.weights, target.tp, S)
    return float(np.abs(scaled / fit_of(target).latency_ms(B, S) - 1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="entries whose names begin so")
    given = parser.parse_args()
    for table in tables():
        if not table.name.startswith(given.only) or not table.file.exists():
            continue
        entry = entry_of(table)
        text = json.dumps(json.loads(dumps(entry.to_json())), separators=(",", ":")).encode()
        file = SHIPPED / f"{entry.name.replace('/', '--')}.json.gz"
        file.write_bytes(gzip.compress(text, 9, mtime=0))
        print(
            f"{entry.name:32}{entry.steps:8,} steps {format_percent(entry.error_pct):>7} {file.stat().st_size:9,} bytes"
        )
    found = list(left_out(all_entries()))
    print("\n| system | from | error |\n|---|---|---|")
    for system, source, error in found:
        print(f"| {system.name} | {source.name} | {format_percent(100 * error)} |")
    draw(found)


if __name__ == "__main__":
    main()
