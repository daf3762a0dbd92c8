"""The page's title: what the fit and its rows say of model and machine, and nothing else."""

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import ExecutionPath, nominal_path
from latfit.model.fit_result import FitResult
from latfit.reporting.fit_tables import describe_path, what_is_known
from tests.unit.reporting.conftest import planted_rows

PROFILED = {
    "machine": {"cpu": "AMD EPYC"},
    "model": {"name": "tiny", "layers": 4},
    "device": {"device": "numpy", "dtype": "float32", "threads": 2},
}


def path(fit: FitResult, **trace: Any) -> ExecutionPath:
    return ExecutionPath("cpu", structs.replace(fit, provenance={"trace": trace}))


def test_of_a_profile(fit: FitResult) -> None:
    nominal = nominal_path("gpu", parse_nominal("launch=12ms,slope=0.05ms"))
    assert what_is_known([path(fit, **PROFILED), nominal]) == "tiny on AMD EPYC"
    steps = f"fit of {fit.metrics.n:,} steps"
    assert describe_path(path(fit, **PROFILED), None) == f"AMD EPYC, tiny, numpy float32 on 2 threads, {steps}"
    assert describe_path(nominal, None) == "nominal numbers, not measured: launch=12ms,slope=0.05ms"


def test_columns_of_the_rows(fit: FitResult) -> None:
    rows = planted_rows()
    columns = {"hardware": "H100", "model": "llama"}
    named = rows.with_columns(**{name: np.full(len(rows), each, dtype=object) for name, each in columns.items()})
    assert what_is_known([path(fit)], {"cpu": named}) == "llama on H100"


@pytest.mark.parametrize(
    "trace",
    [
        {},
        {"machine": "x", "model": None, "device": 3, "parts": {"a": 1}},
        {"parts": {"a": {"machine": {"cpu": "one"}}, "b": {"machine": {"cpu": "two"}}}},
    ],
)
def test_nothing_is_invented(fit: FitResult, trace: dict[str, Any]) -> None:
    assert what_is_known([path(fit, **trace)], {"cpu": planted_rows()}) == ""
