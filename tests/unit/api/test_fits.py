"""`latfit.fit` and what a fit does: as the commands, number for number; DataFrames in and out."""

import json
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd
import pytest

import latfit
from latfit.cli.app import run
from latfit.errors import BadInput, FitNotUsable, LatfitError, WrongUsage
from latfit.model.saturation import Saturation
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

    def test_a_frame_gives_the_same_numbers_as_its_file(
        self, frame: pd.DataFrame, fitted: latfit.Fit, in_tmp: Path
    ) -> None:
        frame.to_csv("trace.csv", index=False)
        again = latfit.fit("trace.csv", model="saturation")
        assert again.result.theta == pytest.approx(fitted.result.theta, rel=1e-9)
        assert fitted.source == "a table in memory"

    def test_parameters_are_a_frame_with_units(self, fitted: latfit.Fit) -> None:
        table = fitted.parameters
        assert list(table.columns) == [
            "value", "std_error", "low", "high", "unit", "identified", "fixed", "meaning",
        ]  # fmt: skip
        assert table.loc["P_max", "low"] < REFERENCE[3] < table.loc["P_max", "high"]
        assert table.loc["P_max", "unit"] == "tokens/ms"

    def test_it_says_itself_in_a_line(self, fitted: latfit.Fit) -> None:
        assert repr(fitted).startswith("Fit (saturation): Held-out error ")
        assert len(repr(fitted)) < 200
        assert len(repr(fitted.result)) < 200
        assert fitted.summary().splitlines()[-2:] == [
            "Read 258 rows, used 258.",
            "Model saturation, measured for B 1 to 256, S 1 to 4,096.",
        ]
        assert fitted.state == "good"

    def test_html_is_escaped(self, fitted: latfit.Fit) -> None:
        hostile = latfit.Fit(fitted.result, path="<b>gpu</b>")
        card = hostile._repr_html_()
        assert "<b>gpu" not in card
        assert "P_max" in card
        assert card.count('src="data:image/png;base64,') == 1

    def test_stored_and_loaded(self, fitted: latfit.Fit, in_tmp: Path) -> None:
        fitted.save("a.fit.json")
        for again in (latfit.Fit.load("a.fit.json"), latfit.Fit.from_json(json.loads(json.dumps(fitted.to_json())))):
            assert again.predict(8, 512)["T_ms"][0] == fitted.predict(8, 512)["T_ms"][0]

    def test_it_draws_itself_with_and_without_its_rows(self, fitted: latfit.Fit) -> None:
        assert isinstance(fitted.plot(), matplotlib.figure.Figure)
        assert len(latfit.Fit(fitted.result).plot().axes) < len(fitted.plot().axes)

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

    def test_a_single_step_carries_no_fit(self) -> None:
        with pytest.raises(FitNotUsable, match="fewer rows"):
            latfit.fit({"B": [1], "S": [1], "T_ms": [5.0]})

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

    def test_a_given_path_replaces_the_one_that_the_steps_name(self, in_tmp: Path) -> None:
        """Two traces that both name their path cpu stand side by side in one profile."""
        named = planted_trace(0.05).with_columns(path=np.full(43, "cpu"))
        assert latfit.fit(named, model="linear").path == "cpu"
        for name in ("openvino", "torch"):
            write_trace(in_tmp / f"{name}.parquet", named)
            assert run(["fit", f"{name}.parquet", "--model", "linear", "--path", name, "--force", "-q"]) == 0
        assert list(json.loads((in_tmp / "hardware.json").read_text())["paths"]) == ["openvino", "torch"]

    def test_one_name_for_steps_of_two_paths_is_refused(self) -> None:
        both = planted_trace(0.05).with_columns(path=np.where(np.arange(43) < 20, "cpu", "gpu"))
        with pytest.raises(WrongUsage, match="several paths: cpu, gpu"):
            latfit.fit_each(both, model="linear", path="mine")

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
    def test_arrays_broadcast(self, fitted: latfit.Fit) -> None:
        found = fitted.predict(B=[8, 32], S=512)
        whys = ["outside_domain", "why_outside", "why_no_interval"]
        assert list(found.columns) == ["B", "S", "T_ms", "low_ms", "high_ms", "level", *whys]
        truth = Saturation().latency_ms(REFERENCE, {"B": np.array([8.0, 32.0]), "S": np.array([512.0, 512.0])})
        assert found["T_ms"].to_numpy() == pytest.approx(truth, rel=0.03)
        assert (found["low_ms"] < found["T_ms"]).all()
        assert found["B"].tolist() == [8, 32]
        assert found["B"].dtype.kind == "i"
        decode = fitted.predict(np.array([[1], [2]]))
        assert decode["S"].tolist() == [1, 2]

    def test_every_combination_when_asked(self, fitted: latfit.Fit, in_tmp: Path, capsys: Captured) -> None:
        found = fitted.predict([8, 32], [16, 10**6], every_combination=True)
        assert list(zip(found["B"], found["S"], strict=True)) == [(8, 16), (8, 10**6), (32, 10**6)]
        fitted.save("a.fit.json")
        _, document = printed(capsys, "predict", "a.fit.json", "-B", 8, "-B", 32, "-S", 16, "-S", 10**6)
        named = found.rename(columns={"low_ms": "low", "high_ms": "high"})
        assert document["rows"] == [{**row, "level": 0.9} for row in named.to_dict("records")]
        assert document["notes"] == found.attrs["notes"]

    def test_a_table_of_steps(self, fitted: latfit.Fit, frame: pd.DataFrame) -> None:
        steps = frame[["B", "S"]].head(5)
        assert fitted.predict(steps)["T_ms"].to_numpy() == pytest.approx(
            fitted.predict(steps["B"].to_numpy(), steps["S"].to_numpy())["T_ms"].to_numpy(), rel=0
        )

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

    def test_the_steps_that_a_fit_was_made_of_are_told_from_others(self, in_tmp: Path) -> None:
        for name, seed in (("own", 1), ("other", 2)):
            write_trace(in_tmp / f"{name}.parquet", planted_trace(0.05, seed=seed))
        fit = latfit.fit("own.parquet", model="linear")
        own, other = (fit.evaluate(f"{name}.parquet").summary() for name in ("own", "other"))
        assert "was made of steps of this file" in own
        assert "was made of steps of this file" not in other

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
        assert latfit.Comparison.from_json(document).summary() == found.summary()
        assert "slow.parquet is slower than a.fit.json in " in repr(found)

    def test_fits_and_tables_are_named(self, fitted: latfit.Fit, frame: pd.DataFrame) -> None:
        found = latfit.compare(fitted, frame, names=["before", "after"])
        assert found.verdicts == ["as fast"]
        assert found.sentences == ["after is as fast as before."]
        assert latfit.compare(fitted, fitted.result).names == ["fit 1", "fit 2"]

    def test_one_step_is_no_run(self, fitted: latfit.Fit) -> None:
        with pytest.raises(BadInput, match="one step cannot be compared"):
            latfit.compare(fitted, {"B": [1], "S": [1], "T_ms": [5.0]})

    @pytest.mark.parametrize("options", [{"tolerance": "-1%"}, {"tolerance": "much"}, {"names": ["one"]}])
    def test_mistakes(self, options: Any, fitted: latfit.Fit) -> None:
        with pytest.raises(WrongUsage):
            latfit.compare(fitted, fitted, **options)
        with pytest.raises(WrongUsage, match="compared with"):
            latfit.compare(fitted)
