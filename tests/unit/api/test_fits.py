"""`latfit.fit` and what a fit does: as the commands, number for number; DataFrames in and out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import latfit
from latfit.cli.app import run
from latfit.errors import BadInput, LatfitError, WrongUsage
from latfit.trace import Trace, concatenated, write_trace
from tests.conftest import REFERENCE, planted_trace

Captured = pytest.CaptureFixture[str]


def printed(capsys: Captured, *command: object) -> Any:
    capsys.readouterr()
    code = run([*map(str, command), "--json"])
    return code, json.loads(capsys.readouterr().out)


def without_provenance(document: dict[str, Any]) -> Any:
    return json.loads(json.dumps({name: part for name, part in document.items() if name != "provenance"}))


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    found: pd.DataFrame = planted_trace(0.05, repeats=6).to_pandas()
    return found


@pytest.fixture(scope="module")
def fitted(frame: pd.DataFrame) -> latfit.Fit:
    return latfit.fit(frame, model="saturation")


class TestFit:
    def test_it_is_the_commands_fit(self, in_tmp: Path, capsys: Captured) -> None:
        write_trace(in_tmp / "trace.parquet", planted_trace(0.05, repeats=6))
        options: dict[str, Any] = {"model": "saturation", "fix": {"tau_S": 0.002}, "bounds": {"k_B": (0.01, 1)}}
        found = latfit.fit("trace.parquet", **options, seed=3)
        command = ("--model", "saturation", "--fix", "tau_S=0.002", "--set", "bounds=k_B=0.01:1", "--seed", 3)
        code, document = printed(capsys, "fit", "trace.parquet", *command)
        assert code == 0
        assert without_provenance(found.to_json()) == without_provenance(document)
        assert found.parameters.loc["tau_S", "fixed"]

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

    def test_several_systems_are_fitted_each(self, in_tmp: Path, capsys: Captured) -> None:
        parts = [planted_trace(0.05, seed=i).with_columns(tp=np.full(43, tp)) for i, tp in enumerate((1, 2))]
        both = concatenated(parts, ["a", "b"])
        with pytest.raises(BadInput, match="2 systems"):
            latfit.fit(both)
        fits = latfit.fit_each(both, model="linear", path="cpu")
        assert list(fits) == ["1", "2"]
        assert [found.path for found in fits.values()] == ["cpu", "cpu"]
        write_trace(in_tmp / "both.parquet", both)
        code, document = printed(
            capsys, "fit", "both.parquet", "--each", "--model", "linear", "--path", "cpu", "--force"
        )
        assert code == 0
        for label, found in fits.items():
            assert document["fits"][label]["parameters"] == without_provenance(found.to_json())["parameters"]


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

    def test_a_context_is_named_once(self) -> None:
        B = np.repeat(np.arange(1.0, 33.0), 6)
        context = B * np.tile([100.0, 200.0, 400.0], 64)
        T = (5 + 0.02 * B + 2e-4 * context) * np.exp(np.random.default_rng(0).normal(0, 0.01, len(B)))
        found = latfit.fit(Trace({"B": B, "S": B, "T_ms": T, "context_tokens": context}), model="context")
        near, far = (found.predict(16, context=each)["T_ms"][0] for each in (200, 400))
        assert far - near == pytest.approx(16 * 200 * 2e-4, rel=0.1)
        assert found.predict(16, context_tokens=16 * 400)["T_ms"][0] == pytest.approx(far)
        with pytest.raises(WrongUsage, match="twice"):
            found.predict(16, context=400, context_tokens=400)


class TestOtherSteps:
    def test_an_evaluation_is_the_commands(self, fitted: latfit.Fit, in_tmp: Path, capsys: Captured) -> None:
        other = planted_trace(0.05, repeats=4, seed=9)
        found = fitted.evaluate(other.to_pandas())
        write_trace(in_tmp / "new.parquet", other)
        fitted.save("a.fit.json")
        code, document = printed(capsys, "evaluate", "a.fit.json", "new.parquet")
        assert code == 0
        assert json.loads(json.dumps(found.to_json())) == document
        assert found.state == "good"
        assert found.table.loc["all", "n"] == 172
        slow = other.with_columns(T_ms=np.asarray(other["T_ms"] * 1.3))
        worse = fitted.evaluate(slow)
        assert worse.state == "bad"
        assert worse.foreign
        # of exp(0.05 z) around a fit that is 1.3 times too fast: |1/1.3 - 1| = 23 %
        assert worse.scores["metrics"]["median_ape_pct"] == pytest.approx(23.1, abs=1.5)
        assert "held-out error of the fit" in repr(worse)

    def test_a_sensitivity_is_the_commands(self, fitted: latfit.Fit, in_tmp: Path, capsys: Captured) -> None:
        found = fitted.sensitivity(B=8, S=[256, 512])
        fitted.save("a.fit.json")
        _, document = printed(capsys, "predict", "a.fit.json", "--sensitivity", "-B", 8, "-S", 256, "-S", 512)
        assert json.loads(json.dumps(found.to_json())) == document["sensitivity"]
        near, far = fitted.predict([7, 9], 512)["T_ms"]
        assert found.frame["dT_dB_ms"][1] == pytest.approx((far - near) / 2, rel=0.02)
        with pytest.raises(BadInput, match="inside what was measured"):
            fitted.sensitivity(S=10**7)


class TestCompare:
    def test_it_is_the_commands(self, fitted: latfit.Fit, in_tmp: Path, capsys: Captured) -> None:
        trace = planted_trace(0.05, repeats=6, seed=4)
        write_trace(in_tmp / "slow.parquet", trace.with_columns(T_ms=np.asarray(trace["T_ms"] * 1.3)))
        fitted.save("a.fit.json")
        found = latfit.compare("a.fit.json", "slow.parquet", tolerance="20%")
        code, document = printed(capsys, "compare", "a.fit.json", "slow.parquet", "--tolerance", "20%")
        assert code == 8
        assert json.loads(json.dumps(found.to_json())) == document
        assert document["baseline"] == "a.fit.json"
        assert (found.slower, found.verdicts, found.states) == (["slow.parquet"], ["slower"], ["bad"])
        assert found.table["change_pct"].iloc[0] == pytest.approx(30, abs=3)
        assert "slow.parquet is slower than a.fit.json in " in repr(found)
