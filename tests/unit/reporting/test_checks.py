"""Tables of what was checked of a fit: shares that add up, what to measure."""

from dataclasses import replace

import pytest

from latfit.model.fit_parts import Combination, CrossValidation, Diagnostics, Identifiability, Measurement
from latfit.model.fit_result import FitResult
from latfit.reporting.fit import checks
from latfit.reporting.fit.page import ReportInput, render
from tests.unit.reporting.conftest import held_out, machine
from tests.unit.reporting.test_page import Outline

TESTED = Diagnostics(
    error_parts={"rms_pct": 14.5, "parameter_uncertainty": 0.01, "measurement_noise": 0.05, "model_structure": 0.94},
    lack_of_fit={"floor_mape_pct": 4.5},
    influence={
        "cells": [{"B": 1.0, "S": 1.0, "rows": 20.0, "T_ms": 1.35, "expected_ms": 2.47, "change_without": 0.09}]
    },
)


@pytest.fixture
def tested(fit: FitResult) -> FitResult:
    return replace(
        fit,
        diagnostics=TESTED,
        cross_validation=CrossValidation("cells", held_out(4.4, 3.1), by_region=held_out(53.0, 5.0)),
        identifiability=Identifiability(
            1e9,
            [["tau_B", "tau_S"]],
            combinations=[Combination("tau_B + tau_S", 0.22, 0.2, 0.24, "ms/token")],
            measure=[Measurement(("tau_S",), (1.0, 1.0), (512.0, 2048.0), 0.8, 0.1, "")],
        ),
    )


def test_the_squared_error_is_taken_apart(tested: FitResult) -> None:
    table = checks.error_parts(tested)
    assert [list(row[:2]) for row in table.rows] == [
        ["lack of fit (model misspecification)", "94 %"],
        ["noise of the measurement", "5 %"],
        ["uncertainty of the parameters", "1 %"],
    ]
    assert "RMS 14 %" in table.caption
    assert "4.5 %" in table.note


def test_harder_held_out_rows_and_parameters_together(tested: FitResult) -> None:
    assert [row[2] for row in checks.held_out(tested).rows] == ["4.4 %", "53 %"]
    assert list(checks.together(tested).rows[0]) == ["tau_B + tau_S", "0.22", "0.2 to 0.24", "ms/token"]
    assert "tau_B, tau_S" in checks.together(tested).note
    assert list(checks.to_measure(tested).rows[0])[1:] == ["1", "512 to 2,048", "80 %", "10 %"]
    assert list(checks.influential(tested).rows[0]) == ["B=1,\u00a0S=1", "20", "1.35 ms", "2.47 ms", "9 %"]


def test_the_page_has_them_all(tested: FitResult) -> None:
    text = Outline(render(ReportInput(machine(cpu=tested))).html).text
    for table in checks.check_tables(tested):
        assert table.caption in text
    assert len(list(checks.check_tables(tested))) == 5


def test_a_fit_that_nobody_checked_has_none(fit: FitResult) -> None:
    bare = FitResult("saturation", fit.status, fit.parameters)
    assert list(checks.check_tables(bare)) == []
