"""The page's title: what the fit and its rows say of model and machine, and nothing else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import ExecutionPath, nominal_path
from latfit.model.fit_parts import DataFacts
from latfit.model.fit_result import FitResult
from latfit.reporting.fit.subject import subject_of, title_of, what_is_known
from latfit.trace.table import Trace
from tests.unit.reporting.conftest import planted_rows

PROFILED = {
    "machine": {"cpu": "AMD EPYC"},
    "model": {"name": "tiny", "layers": 4},
    "device": {"device": "numpy", "dtype": "float32", "threads": 2},
}


def path(fit: FitResult, **trace: Any) -> ExecutionPath:
    return ExecutionPath("cpu", replace(fit, provenance={"trace": trace}))


def test_of_a_profile(fit: FitResult) -> None:
    found = subject_of(path(fit, **PROFILED), None)
    assert title_of([found]) == "Inference latency of tiny on AMD EPYC"
    assert found.line == f"AMD EPYC, tiny, numpy float32 on 2 threads, fit of {fit.metrics.n:,} steps"


def test_what_belongs_to_the_path_comes_first(fit: FitResult) -> None:
    own = {"cpu": {"device": {"device": "openvino", "dtype": "bfloat16", "threads": 1}}}
    assert "openvino bfloat16 on 1 thread" in subject_of(path(fit, **PROFILED, paths=own), None).line


def test_columns_of_the_rows_and_the_system_of_the_fit(fit: FitResult) -> None:
    rows = planted_rows()
    named = rows.with_columns(
        hardware=np.full(len(rows), "H100", dtype=object), model=np.full(len(rows), "llama", dtype=object)
    )
    assert title_of([subject_of(path(fit), named)]) == "Inference latency of llama on H100"
    system = replace(fit, provenance={}, data=DataFacts(more={"system": {"hardware": "A40"}}))
    assert title_of([subject_of(ExecutionPath("gpu", system), None)]) == "Latency on A40"


@pytest.mark.parametrize(
    "trace",
    [
        {},
        {"machine": "x", "model": None, "device": 3, "parts": {"a": 1}},
        {"parts": {"a": {"machine": {"cpu": "one"}}, "b": {"machine": {"cpu": "two"}}}},
    ],
)
def test_nothing_is_invented(fit: FitResult, trace: dict[str, Any]) -> None:
    assert title_of([subject_of(path(fit, **trace), planted_rows())]) == "Step latency on cpu"


def test_several_paths(fit: FitResult, rows: Trace) -> None:
    nominal = nominal_path("gpu", parse_nominal("launch=12ms,slope=0.05ms"))
    found = [subject_of(path(fit, **PROFILED), rows), subject_of(nominal, None)]
    assert title_of(found) == "Inference latency of tiny on AMD EPYC"
    assert what_is_known([path(fit, **PROFILED), nominal]) == "tiny on AMD EPYC"
    assert what_is_known([nominal]) == ""
    assert found[1].line == "nominal numbers, not measured: launch=12ms,slope=0.05ms"
