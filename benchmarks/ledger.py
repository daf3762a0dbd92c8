"""What plans promise of measured serving runs, and what was measured: the ledger of every run at hand.

vLLM on two CPU cores, from the folder in LATFIT_DATA. Each run is planned from the recorded steps of one server start,
with the engine settings of the run, its rate and its lengths. The limits lie a quarter above the planned p90s, so a
kept promise means less than that much error. Runs of another start of the server show how much starts differ.
`python -m benchmarks.ledger [FOLDER]`: also writes the ledger and its page there.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import latfit
from latfit import reporting
from latfit.api import add_to_ledger, ledger as read
from latfit.errors import LatfitError
from latfit.provenance import utc_now

DATA = Path(os.environ.get("LATFIT_DATA", "measured"))
HEADROOM = 1.25
"""Limits over planned percentiles."""
LOOSE: dict[str, Any] = {"ttft": "p90:10min", "tpot": "p90:1min", "e2e": "p90:1h"}


class Runs(NamedTuple):
    """Measured runs with the steps from which they are planned."""

    traces: str
    where: str | None
    runs: str
    rates_per_s: tuple[float, ...]
    names: tuple[str, ...]
    max_num_seqs: int


MEASURED = (
    Runs("vllm_cpu/trace-*.parquet", None, "vllm_cpu/bench_{}.json.gz", (2, 5, 8), ("t2", "t5", "t8"), 128),
    Runs("vllm_amx/traces/rec-trace-*.parquet", "step < 6525", "vllm_amx/bench/{}.json.gz", (1.5, 3, 5, 4),
         ("r1.5", "r3", "r5", "r4"), 128),
    Runs("vllm_amx/traces/rec-trace-*.parquet", "step < 6525", "vllm_amx/bench/{}.json.gz", (3,), ("lim8_r3",), 8),
    Runs("vllm_amx/traces/rec-trace-*.parquet", "step < 6525", "vllm_amx/bench/{}.json.gz", (3,) * 4,
         ("lim4_r3", "lim4b_r3", "lim4c_r3", "lim4d_r3"), 4),
)  # fmt: skip


def promise(fit: latfit.Fit, run: Path, rate_per_s: float, max_num_seqs: int, plan: Path) -> None:
    """Plan a run with limits a quarter above its planned percentiles."""
    load: dict[str, Any] = {"rate": f"{rate_per_s}/s", "lengths": run, "replicas": 1}
    engine: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2048}
    loose = latfit.plan_engine(fit, **load, **engine, **LOOSE)
    limits = {each.metric: HEADROOM * each.value for each in loose.result.targets}
    limits["e2e"] = limits.pop("latency")
    slos: dict[str, Any] = {name: f"p90:{limit}ms" for name, limit in limits.items()}
    latfit.plan_engine(fit, **load, **engine, **slos).save(plan)


def main(smoke: bool = False, folder: Path | None = None) -> None:
    """Print the ledger; folder: where it is written."""
    found = [each for each in MEASURED if list(DATA.glob(each.traces))]
    if smoke or not found:
        print(f"ledger: {'skipped, it is no small run' if smoke else f'skipped, no measured runs in {DATA}'}")
        return
    with contextlib.ExitStack() as stack:
        out = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        out.mkdir(parents=True, exist_ok=True)
        ledger = out / "ledger.json"
        for runs in found:
            traces = sorted(map(str, DATA.glob(runs.traces)))
            fit = latfit.fit(traces, where=runs.where)
            for name, rate_per_s in zip(runs.names, runs.rates_per_s, strict=True):
                run = DATA / runs.runs.format(name)
                plan = out / f"{name}.plan.json"
                try:
                    promise(fit, run, rate_per_s, runs.max_num_seqs, plan)
                    add_to_ledger(plan, run, ledger=ledger)
                except LatfitError as error:
                    print(f"{name}: not counted, {error}")
        answer = read(ledger)
        print(answer.verdict, *answer.lines, sep="\n")
        for table in answer.tables():
            print(reporting.table.table_text(table))
        if folder is not None:
            reporting.layout.write_page(folder, answer.page(reporting.layout.Making(made_at=utc_now())))


if __name__ == "__main__":
    main(folder=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
