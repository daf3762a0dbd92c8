"""`latfit.fit` and what a fit does: as the commands, number for number; DataFrames in and out."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import latfit
from latfit.errors import BadInput, LatfitError, WrongUsage
from latfit.trace import concatenated
from tests.conftest import REFERENCE, planted_trace


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    found: pd.DataFrame = planted_trace(0.05, repeats=6).to_pandas()
    return found


@pytest.fixture(scope="module")
def fitted(frame: pd.DataFrame) -> latfit.Fit:
    return latfit.fit(frame, model="saturation")


class TestFit:
    def test_parameters_are_a_frame_with_units(self, fitted: latfit.Fit) -> None:
        table = fitted.parameters
        assert list(table.columns) == [
            "value", "std_error", "low", "high", "unit", "identified", "fixed", "meaning",
        ]  # fmt: skip
        assert table.loc["P_max", "low"] < REFERENCE[3] < table.loc["P_max", "high"]
        assert table.loc["P_max", "unit"] == "tokens/ms"

    @pytest.mark.parametrize(
        ("options", "kind", "words"),
        [
            ({"model": "magic"}, WrongUsage, "magic"),
            ({"loss": "magic"}, WrongUsage, "magic"),
            ({"fix": {"nonsense": 1.0}}, WrongUsage, "nonsense"),
            ({"bounds": {"k_B": (1.0, 0.5)}}, WrongUsage, "no range"),
            ({"prior": {"P_max": (60.0, 0.0)}}, WrongUsage, "standard deviation"),
            ({"bootstrap": 3}, WrongUsage, "bootstrap"),
        ],
    )
    def test_what_cannot_be_fitted_is_said(
        self, options: Any, kind: type[LatfitError], words: str, frame: pd.DataFrame
    ) -> None:
        with pytest.raises(kind) as caught:
            latfit.fit(frame, **options)
        assert words in str(caught.value)
        assert "--" not in caught.value.found

    def test_a_fit_far_off_is_kept_out_of_a_profile(self, frame: pd.DataFrame, fitted: latfit.Fit) -> None:
        line = latfit.fit(frame, model="linear")
        found = line.kept_out("10%")
        assert found is not None
        assert "above the allowed 10 %" in found.message
        assert "--model auto" in found.remedy
        assert fitted.kept_out(10) is None
        chosen = latfit.fit(frame).kept_out("0.01%")
        assert chosen is not None
        assert "auto" not in chosen.remedy

    def test_several_systems_are_fitted_each(self) -> None:
        parts = [planted_trace(0.05, seed=i).with_columns(tp=np.full(43, tp)) for i, tp in enumerate((1, 2))]
        both = concatenated(parts, ["a", "b"])
        with pytest.raises(BadInput, match="2 systems"):
            latfit.fit(both)
        fits = latfit.fit_each(both, model="linear", path="cpu")
        assert list(fits) == ["1", "2"]
        assert [found.path for found in fits.values()] == ["cpu", "cpu"]


class TestPredict:
    @pytest.mark.parametrize(
        ("steps", "options", "kind"),
        [
            ((8, 4), {}, WrongUsage),
            (([1, 2], [1, 2, 3]), {}, WrongUsage),
            ((None,), {}, WrongUsage),
            ((8, 512), {"level": 0.42}, WrongUsage),
            ((8, 512), {"context": -1}, WrongUsage),
            ((8, float("nan")), {}, WrongUsage),
            ((8, 10**6), {"strict": True}, BadInput),
            (({"B": [8, 0], "S": [512, 1]},), {}, BadInput),
            (({"B": [8]},), {}, BadInput),
            (("none.csv",), {}, BadInput),
            ((pd.DataFrame({"B": [8], "S": [9]}), 3), {}, WrongUsage),
        ],
    )
    def test_what_is_no_step_is_said(
        self, steps: Any, options: Any, kind: type[LatfitError], fitted: latfit.Fit
    ) -> None:
        with pytest.raises(kind):
            fitted.predict(*steps, **options)


class TestOtherSteps:
    def test_an_evaluation_names_another_machine(self, fitted: latfit.Fit) -> None:
        other = planted_trace(0.05, repeats=4, seed=9)
        found = fitted.evaluate(other.to_pandas())
        assert found.state == "good"
        assert found.table.loc["all", "n"] == 172
        slow = other.with_columns(T_ms=np.asarray(other["T_ms"] * 1.3))
        worse = fitted.evaluate(slow)
        assert worse.state == "bad"
        assert worse.foreign
        # of exp(0.05 z) around a fit that is 1.3 times too fast: |1/1.3 - 1| = 23 %
        assert worse.scores["metrics"]["median_ape_pct"] == pytest.approx(23.1, abs=1.5)
        assert "held-out error of the fit" in repr(worse)

    def test_a_sensitivity_is_a_slope_of_predictions(self, fitted: latfit.Fit) -> None:
        found = fitted.sensitivity(B=8, S=[256, 512])
        near, far = fitted.predict([7, 9], 512)["T_ms"]
        assert found.frame["dT_dB_ms"][1] == pytest.approx((far - near) / 2, rel=0.02)
        with pytest.raises(BadInput, match="inside what was measured"):
            fitted.sensitivity(S=10**7)
