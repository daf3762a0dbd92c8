"""The record of a fit survives its file, and a file that is no record is refused in plain words."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from latfit.errors import BadInput
from latfit.fitting.fit import fit_trace
from latfit.model.fit_parts import Errors
from latfit.model.fit_result import FitResult, FitStatus
from latfit.model.registry import FAMILY
from tests.conftest import planted_trace


@pytest.fixture(scope="module")
def fit() -> FitResult:
    return fit_trace(planted_trace(0.03, repeats=3), data={"source": "x"}, provenance={"seed": 1})


def test_reading_gives_back_what_was_written(fit: FitResult, tmp_path: Path) -> None:
    fit.write(tmp_path / "a.fit.json")
    again = FitResult.read(tmp_path / "a.fit.json")
    assert again.to_json() == json.loads((tmp_path / "a.fit.json").read_text())
    assert again.theta == pytest.approx(fit.theta)
    assert again.status is fit.status


def test_the_contract_of_the_json(fit: FitResult) -> None:
    document = fit.to_json()
    assert document["schema"] == "latfit.fit/1"
    assert set(document) == {
        "schema", "model", "status", "parameters", "metrics", "cross_validation", "baselines", "identifiability",
        "diagnostics", "intervals", "domain", "data", "provenance", "warnings",
        "bootstrap", "draws", "typical", "correction", "support",
    }  # fmt: skip
    assert set(document["parameters"]) == {"tau_0", "w_0", "w_1", "P_max", "k_B", "k_S", "tau_B", "tau_S"}
    assert {"value", "std_error", "low", "high", "unit", "identified"} <= set(document["parameters"]["P_max"])
    assert document["parameters"]["w_1"] | {"value": 1.0, "fixed": True} == document["parameters"]["w_1"]
    assert set(document["metrics"]) == {
        "n", "r2", "rmse_ms", "mae_ms", "mape_pct", "median_ape_pct", "p90_ape_pct",
    }  # fmt: skip
    assert {"scheme", "folds", "mape_pct", "median_ape_pct", "rmse_ms"} <= set(document["cross_validation"])
    assert set(document["baselines"]) == {"constant", "linear"}
    assert {"mape_pct", "cv"} <= set(document["baselines"]["linear"])
    assert set(document["diagnostics"]) >= {"regimes", "lack_of_fit", "drift"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '"text"',
        "{}",
        '{"schema": "latfit.fit/2"}',
        '{"schema": "latfit.fit/1", "model": "saturation"}',
        '{"schema": "latfit.fit/1", "model": "nonsense"}',
        '{"schema": "latfit.fit/1", "model": "constant", "parameters": {}, "status": {"code": "converged"}}',
        '{"schema": "latfit.fit/1", "model": "constant", "parameters": {"tau_0": {"value": null}},'
        ' "status": {"code": "converged"}}',
    ],
)
def test_broken_files_are_bad_input(content: str, tmp_path: Path) -> None:
    (tmp_path / "b.fit.json").write_text(content)
    with pytest.raises(BadInput) as caught:
        FitResult.read(tmp_path / "b.fit.json")
    assert "b.fit.json" in str(caught.value)
    assert "latfit fit" in caught.value.remedy


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("parameters", "tau_B", "value"), -1.0),
        (("parameters", "P_max", "value"), 0.0),
        (("parameters", "tau_S", "value"), 1e59),
        (("domain", "S"), [-5, 9]),
        (("domain",), {"B": [1, 9]}),
        (("domain",), None),
        (("typical", "context_tokens"), 1e300),
        (("intervals", "ratio_quantiles", "0.95"), 1e300),
        (("intervals", "ratios", "values", -1), 1e300),
        (("intervals", "by_batch"), [{"low": 1, "high": 4}]),
    ],
)
def test_a_fit_of_impossible_numbers_is_refused(
    fit: FitResult, tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    fit.write(tmp_path / "a.fit.json")
    document = json.loads((tmp_path / "a.fit.json").read_text())
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "b.fit.json").write_text(json.dumps(document))
    with pytest.raises(BadInput, match=r"not a (latfit )?fit"):
        FitResult.read(tmp_path / "b.fit.json")


def test_numbers_that_are_not_finite_become_null(fit: FitResult, tmp_path: Path) -> None:
    broken = FitResult("constant", FitStatus.TOO_FEW_ROWS, {}, Errors(r2=math.nan, rmse_ms=math.inf))
    broken.write(tmp_path / "c.fit.json")
    assert json.loads((tmp_path / "c.fit.json").read_text())["metrics"] == {"r2": None, "rmse_ms": None}


def test_rooflines_of_earlier_versions_keep_the_square_of_the_requests(fit: FitResult) -> None:
    """16 decoding requests, 3,000 of 5,000 cached tokens beyond K_0: 16 * 3,000 tau_X, not 4 * 3,000 tau_X."""
    values = {p.name: 1.0 if p.positive else 0.0 for p in FAMILY["roofline"].parameters}
    values |= {"tau_0": 5.0, "tau_X": 1e-3, "K_0": 2000.0}
    document = {**fit.to_json(), "model": "roofline", "draws": {}, "domain": {"B": [1, 32], "S": [1, 512]}}
    steps = {"prefill_requests": 1.0, "prefill_tokens": 100.0, "context_tokens": 5000.0, "prefill_context_tokens": 0.0}
    took = []
    for e_X in ({}, {"e_X": {"value": 0.5}}):
        parameters = {name: {"value": value} for name, value in values.items() if name != "e_X"} | e_X
        read = FitResult.from_json({**document, "parameters": parameters})
        columns = {name: np.array([value]) for name, value in steps.items()}
        took.append(read.latency_ms(np.array([17.0]), np.array([116.0]), **columns)[0])
    assert took == pytest.approx([5 + 16 * 3000e-3, 5 + 4 * 3000e-3])
