"""The record of a fit survives its file, and a file that is no record is refused in plain words."""

import json
import math
from pathlib import Path

import pytest

from latfit.errors import BadInput
from latfit.fitting.fit import fit_trace
from latfit.model.fit_parts import Errors
from latfit.model.fit_result import FitResult, FitStatus
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
