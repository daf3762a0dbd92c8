"""Fits with planted parameters and rows around them, for everything that shows results."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from latfit.hardware.profile import ExecutionPath, HardwareProfile
from latfit.messages import Message as LatfitWarning
from latfit.model.fit_parts import (
    Baseline,
    CrossValidation,
    DataFacts,
    Diagnostics,
    Errors,
    Estimate,
    HeldOutErrors,
    Identifiability,
)
from latfit.model.fit_result import FitResult, FitStatus
from latfit.model.registry import FAMILY
from latfit.planning.plan import make_plan
from latfit.reporting.page import ReportInput
from latfit.stats import error_metrics
from latfit.trace.table import Trace

PLANTED: Mapping[str, float] = {
    "tau_0": 4.0,
    "w_0": 30.0,
    "w_1": 1.0,
    "P_max": 60.0,
    "k_B": 0.15,
    "k_S": 0.01,
    "tau_B": 0.02,
    "tau_S": 0.002,
}
CPU_LIKE: Mapping[str, float] = {
    **PLANTED,
    "tau_0": 1.0,
    "w_0": 0.0,
    "P_max": 30.0,
    "k_B": 3.0,
    "k_S": 3.0,
    "tau_B": 0.5,
}
GPU_LIKE: Mapping[str, float] = {**PLANTED, "tau_0": 9.0, "w_0": 10.0, "P_max": 400.0, "k_B": 1.5, "k_S": 0.3}


def planted_ms(B: Any, S: Any, planted: Mapping[str, float] = PLANTED) -> Any:
    """The saturation formula written out once more, so that tests don't ask the code what it should say."""
    rate = planted["P_max"] * (1 - np.exp(-planted["k_B"] * B)) * (1 - np.exp(-planted["k_S"] * S))
    work = planted["w_0"] + planted["w_1"] * S
    return planted["tau_0"] + work / rate + planted["tau_B"] * B + planted["tau_S"] * S


def planted_rows(
    *, repeats: int = 8, noise: float = 0.04, seed: int = 0, planted: Mapping[str, float] = PLANTED
) -> Trace:
    """A grid of cells, B up to 64 and S up to 2048, each measured `repeats` times."""
    cells = [(B, S) for B in (1, 2, 4, 8, 16, 32, 64) for S in (B, 1, 4, 16, 64, 256, 1024, 2048) if S >= B]
    B, S = (np.repeat([float(cell[i]) for cell in dict.fromkeys(cells)], repeats) for i in (0, 1))
    T = planted_ms(B, S, planted) * np.exp(np.random.default_rng(seed).normal(0, noise, len(B)))
    phase = np.where(S == B, "decode", np.where(S >= 64 * B, "prefill", "mixed")).astype(object)
    return Trace({"B": B, "S": S, "T_ms": T, "phase": phase})


def held_out(mape_pct: float, median_ape_pct: float) -> HeldOutErrors:
    """Errors of five folds, all alike."""
    return HeldOutErrors(5, mape_pct, median_ape_pct, 3 * median_ape_pct, 1.2, [mape_pct] * 5, mape_pct, 0.0)


def fit_of(rows: Trace, planted: Mapping[str, float] = PLANTED, **changes: Any) -> FitResult:
    """The fit that finds exactly the planted parameters, with everything a real one carries."""
    structure = FAMILY["saturation"].parameters
    found = {
        p.name: Estimate(
            planted[p.name],
            planted[p.name] * 0.05,
            planted[p.name] * 0.9,
            planted[p.name] * 1.1,
            p.unit,
            identified=p.name != "tau_S",
            fixed=p.name == "w_1",
        )
        for p in structure
    }
    measured = rows.floats("T_ms")
    predicted = planted_ms(rows.floats("B"), rows.floats("S"), planted)
    metrics = Errors.from_json(error_metrics(measured, predicted))
    baselines = {
        name: Baseline(**{**structs.asdict(metrics), "mape_pct": seen}, cv=CrossValidation("cells", unseen))
        for name, seen, unseen in (("linear", 11.0, held_out(12.0, 10.0)), ("constant", 79.0, held_out(80.0, 76.0)))
    }
    quantiles = {f"{level:g}": float(np.quantile(measured / predicted, level)) for level in (0.5, 0.9, 0.95, 0.99)}
    whole = FitResult(
        model="saturation",
        status=FitStatus.PARTLY_IDENTIFIED,
        parameters=found,
        metrics=metrics,
        cross_validation=CrossValidation("cells", held_out(4.4, 3.1)),
        baselines=baselines,
        identifiability=Identifiability(111.7, [["tau_S"]]),
        diagnostics=Diagnostics(regimes={"decode": Errors(56, mape_pct=3.3, median_ape_pct=2.9)}),
        intervals={"method": "empirical", "ratio_quantiles": quantiles},
        domain={name: [float(rows.floats(name).min()), float(rows.floats(name).max())] for name in ("B", "S", "T_ms")},
        data=DataFacts(
            "trace.parquet",
            sha256="ab" * 32,
            rows_read=len(rows) + 12,
            rows_used=len(rows),
            dropped={"cold_start": 10, "zero_time": 2},
        ),
        provenance={
            "trace": {"cpu": "Intel Xeon", "flags": ["avx2", "amx_bf16"]},
            "command": "latfit fit trace.parquet",
        },
        warnings=[LatfitWarning("not_identified", "tau_S is not determined by these data.", "Measure S up to 16384.")],
    )
    return structs.replace(whole, **changes)


def machine(**fits: FitResult) -> HardwareProfile:
    """A profile of the fits by path."""
    return HardwareProfile({name: ExecutionPath(name, fit) for name, fit in fits.items()})


def two_paths() -> ReportInput:
    """A CPU that is faster for small batches and a GPU that is faster for large ones, with the rows of both."""
    amx, gpu = planted_rows(seed=1, planted=CPU_LIKE), planted_rows(seed=2, planted=GPU_LIKE)
    profile = machine(amx=fit_of(amx, CPU_LIKE), gpu=fit_of(gpu, GPU_LIKE))
    return ReportInput(profile, {"amx": amx, "gpu": gpu}, make_plan(profile, 20.0))


@pytest.fixture(scope="session")
def rows() -> Trace:
    return planted_rows()


@pytest.fixture(scope="session")
def fit(rows: Trace) -> FitResult:
    return fit_of(rows)


@pytest.fixture(scope="session")
def one_path(rows: Trace, fit: FitResult) -> ReportInput:
    """What `latfit report --sla 20ms` has on a machine with one path."""
    profile = machine(cpu=fit)
    return ReportInput(profile, {"cpu": rows}, make_plan(profile, 20.0))
