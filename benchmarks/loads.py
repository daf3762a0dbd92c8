"""Whether a fit made on one load serves another: the matrix of loads against loads.

`python -m benchmarks.loads [FOLDER] [--smoke]`. The loads: users of the IBM logs, rates of a recorded vLLM, phases and
batch ranges of the RTX 4090 table. Every load is cut in half (a log into ten parts in time, every other one), one half
trains and the other is asked. A cell is the error of a fit of one load, asked for steps of another, divided by the
error of the fit of that load itself on the same steps; the steps that lie outside the measured range of the fit are
refused, their share stands behind the ratio, and where fewer than 30 are left the cell is `refused`. Aim: no ratio
above 1.5.
"""

import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.checking.crossval import parts_in_time
from latfit.fitting.data import fit_data
from latfit.fitting.fit import fit_trace
from latfit.model import SOURCES, FitResult
from latfit.stats import FloatArray
from latfit.trace.read import ingest
from latfit.trace.table import Trace

DEFAULT = Path(os.environ.get("LATFIT_DATA", "measured"))
AIM = 1.5
MOST_ROWS = 2000
ASKED = 30
PARTS = 10
PAUSE_S = 4.0


def loads(folder: Path) -> Iterator[tuple[str, Mapping[str, Trace]]]:
    """(system, its rows by load)."""
    for source in sorted((folder / "steps").glob("ibm*.parquet")):
        rows = ingest(source).trace
        runs = sorted(set(rows["run"].tolist()), key=lambda name: int(str(name).rpartition("=")[2]))
        yield f"{source.stem}, users", {str(name): rows.select(rows["run"] == name) for name in runs}
    for source in sorted((folder / "steps").glob("*rtx4090*8b.parquet")):
        rows = ingest(source).trace
        phase, B = fit_data(rows).phase, rows.floats("B")
        yield f"{source.stem}, phases", {str(name): rows.select(phase == name) for name in np.unique(phase)}
        edges = [0.0, *np.quantile(B, [0.25, 0.5, 0.75]).tolist(), float(B.max())]
        ranges = {f"B {low + 1:g}..{high:g}": (low < B) & (high >= B) for low, high in itertools.pairwise(edges)}
        yield f"{source.stem}, batch", {name: rows.select(inside) for name, inside in ranges.items() if inside.any()}
    recorded = folder / "vllm_cpu"
    if recorded.is_dir():
        rows = ingest(recorded / "trace-*.parquet").trace
        yield "vllm_cpu, requests/s", dict(_rates(rows))


def _rates(rows: Trace) -> Iterator[tuple[str, Trace]]:
    """The steps of each run of a load generator, with pauses between them."""
    rows = rows.select(np.argsort(rows.floats("t_s"), kind="stable"))
    t = rows.floats("t_s")
    for part in np.split(np.arange(len(t)), np.flatnonzero(np.diff(t) > PAUSE_S) + 1):
        begun, seconds = rows.floats("prefill_requests")[part].sum(), t[part[-1]] - t[part[0]]
        yield f"{begun / max(seconds, 1.0):.1f}/s", rows.select(part)


@dataclass(frozen=True)
class Load:
    """What trains and what is asked."""

    train: Trace
    asked: Trace


def halves(rows: Trace, most: int) -> Load:
    """Every other part in time of a log, every other row of a table drawn at random."""
    data = fit_data(rows)
    part = parts_in_time(data, PARTS) if data.in_time else np.random.default_rng(0).permutation(len(rows))
    return Load(*(_fewer(rows.select(part % 2 == side), most) for side in (0, 1)))


def _fewer(rows: Trace, most: int) -> Trace:
    if len(rows) <= most:
        return rows
    return rows.select(np.sort(np.random.default_rng(0).choice(len(rows), most, replace=False)))


def asked(fit: FitResult, rows: Trace) -> tuple[FloatArray, NDArray[np.bool_]]:
    """(absolute error in percent, whether the fit claims to know the step), each (n,)."""
    columns = {name: rows.floats(name) for name in SOURCES if name in rows}
    error = 100 * np.abs(fit.latency_ms(**columns) / rows.floats("T_ms") - 1)
    return error, ~fit.outside_domain(**columns)


@dataclass(frozen=True)
class Fitted:
    """A load's fit, the steps that are asked, and the fit's error in percent on each of them (n,)."""

    fit: FitResult
    asked: Trace
    own: FloatArray


def cell(fit: FitResult, load: Fitted) -> tuple[float | None, str]:
    """(ratio of the errors of a fit and of the load's own, the same as text); None where it is refused."""
    if not fit.status.ok:
        return None, "refused"
    error, inside = asked(fit, load.asked)
    if inside.sum() < ASKED:
        return None, "refused"
    ratio = float(error[inside].mean() / load.own[inside].mean())
    away = 100 * float(np.mean(~inside))
    return ratio, f"{ratio:.2f}" + (f" (-{away:.0f} %)" if away >= 1 else "")


def print_matrix(label: str, by_load: Mapping[str, Trace], most: int) -> None:
    """The loads with their own errors as they are fitted, then a row for each that trained."""
    print(f"\n{label}")
    known = {}
    for name, rows in by_load.items():
        if len(rows) < 3 * ASKED:
            continue
        load = halves(rows, most)
        fit = fit_trace(load.train)
        known[name] = Fitted(fit, load.asked, asked(fit, load.asked)[0])
        print(
            f"  {name}: {len(load.train):,} rows trained, {fit.model}, own error {known[name].own.mean():.1f} %",
            flush=True,
        )
    ratios: list[float] = []

    def print_row(name: str, fit: FitResult) -> None:
        cells = [
            cell(fit, other) if each != name else (None, f"{other.own.mean():.1f} %") for each, other in known.items()
        ]
        ratios.extend(ratio for ratio, _ in cells if ratio is not None)
        print(f"{name:16}" + "".join(f"{text:>15}" for _, text in cells), flush=True)

    print(f"{'trained on':16}" + "".join(f"{name:>15}" for name in known))
    for name, found in known.items():
        print_row(name, found.fit)
    above = sum(ratio > AIM for ratio in ratios)
    worst = max(ratios, default=float("nan"))
    print(f"{above} of {len(ratios)} cells above {AIM:g}, worst {worst:.2f}", flush=True)


def main(smoke: bool = False, folder: Path = DEFAULT) -> None:
    """Print a matrix a system: rows trained, columns asked."""
    if not folder.is_dir():
        print(f"loads: skipped, no measured steps at {folder}; set LATFIT_DATA")
        return
    for label, by_load in loads(folder):
        print_matrix(label, dict(list(by_load.items())[:2]) if smoke else by_load, 150 if smoke else MOST_ROWS)
        if smoke:
            break


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    main("--smoke" in sys.argv[1:], Path(given[0]) if given else DEFAULT)
