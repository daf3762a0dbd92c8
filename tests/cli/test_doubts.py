"""`latfit fit` with its ways to make intervals; `latfit predict` with sensitivities, context and decode-only fits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.trace.parquet import write_trace
from latfit.trace.table import Trace
from tests.conftest import planted_trace

Captured = pytest.CaptureFixture[str]


def latfit(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


def answer(capsys: Captured, *arguments: object) -> dict[str, Any]:
    assert latfit(*arguments, "--json") == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.fixture
def trace(in_tmp: Path) -> Path:
    write_trace(in_tmp / "trace.parquet", planted_trace(0.03, repeats=6))
    return in_tmp / "trace.parquet"


class TestFit:
    def test_a_bootstrap_is_printed_and_stored(self, trace: Path, capsys: Captured) -> None:
        assert latfit("fit", trace, "--model", "saturation", "--bootstrap", 60, "--path", "cpu") == 0
        printed = capsys.readouterr()
        assert "60 resampled fits kept" in printed.out
        assert "Warning" not in printed.err
        stored = json.loads(Path("trace.fit.json").read_text())
        assert stored["bootstrap"]["resamples"] == 60
        assert stored["draws"]["source"] == "bootstrap, rows"

    def test_a_prior_reaches_the_interval(self, trace: Path, capsys: Captured) -> None:
        plain, told = (
            answer(capsys, "fit", trace, "--model", "saturation", *more)["parameters"]
            for more in ((), ("--set", "prior=P_max=60:0.05"))
        )
        assert told["P_max"]["std_error"] < 0.06 < plain["P_max"]["std_error"]

    @pytest.mark.parametrize(
        "mistake",
        [
            ("--set", "intervals=magic"),
            ("--bootstrap", 3),
            ("--set", "prior=P_max=60"),
            ("--set", "prior=P_max=60:0"),
            ("--fix", "P_max=fast"),
        ],
    )
    def test_mistakes_are_wrong_usage(self, mistake: tuple[object, ...], trace: Path, capsys: Captured) -> None:
        assert latfit("fit", trace, "--model", "saturation", *mistake) == 2
        err = capsys.readouterr().err
        assert str(mistake[0]) in err
        assert "Traceback" not in err
        assert not Path("trace.fit.json").exists()


class TestSensitivity:
    def test_without_sizes_a_grid_over_what_was_measured(self, trace: Path, capsys: Captured) -> None:
        assert latfit("fit", trace, "--model", "saturation", "--path", "cpu", "-q") == 0
        assert latfit("predict", "trace.fit.json", "--sensitivity") == 0
        out = capsys.readouterr().out
        assert "Which term is the largest" in out
        assert "work" in out
        assert latfit("predict", "trace.fit.json", "--sensitivity", "-S", 10**7) == 3
        assert latfit("predict", "trace.fit.json", "--sensitivity", "--data", "x.csv") == 2


class TestDecodeOnly:
    @pytest.fixture
    def fitted(self, in_tmp: Path, capsys: Captured) -> Path:
        B = np.repeat(np.arange(1.0, 65.0), 8)
        T = (8 + 0.05 * B) * np.exp(np.random.default_rng(0).normal(0, 0.02, len(B)))
        write_trace(in_tmp / "decode.parquet", Trace({"B": B, "S": B, "T_ms": T}))
        assert latfit("fit", "decode.parquet", "--model", "linear", "-v") == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "tau_B + tau_S = 0.0" in printed
        assert "decode steps only" in printed
        return in_tmp / "decode.fit.json"

    def test_prefill_is_flagged_and_refused_when_strict(self, fitted: Path, capsys: Captured) -> None:
        decode, prefill = answer(capsys, "predict", fitted, "-B", 8, "-S", 8, "-S", 512)["rows"]
        assert (decode["outside_domain"], decode["why_outside"]) == (False, "")
        assert prefill["outside_domain"]
        assert "prefill not identified" in prefill["why_outside"]
        assert (prefill["low"], prefill["high"]) == (None, None)
        assert latfit("predict", fitted, "-B", 8, "-S", 512, "--strict") == 3
        assert "decode steps only" in capsys.readouterr().err
        assert latfit("predict", fitted, "-B", 8, "--strict") == 0

    def test_its_slopes_are_along_decode(self, fitted: Path, capsys: Captured) -> None:
        found = answer(capsys, "predict", fitted, "--sensitivity", "-B", 16)["sensitivity"]
        assert found["dT_dB"][0][0] == pytest.approx(0.05, rel=0.05)
        assert found["dT_dS"] == [[None]]


def test_the_cached_context_is_typical_unless_it_is_named(in_tmp: Path, capsys: Captured) -> None:
    B = np.repeat(np.arange(1.0, 33.0), 6)
    S = B + np.tile([0.0, 0.0, 0.0, 100.0, 300.0, 900.0], 32)
    context = B * np.tile([100.0, 200.0, 400.0], 64)
    T = (5 + 0.02 * B + 0.01 * S + 2e-4 * context) * np.exp(np.random.default_rng(0).normal(0, 0.01, len(B)))
    write_trace(in_tmp / "trace.parquet", Trace({"B": B, "S": S, "T_ms": T, "context_tokens": context}))
    assert latfit("fit", "trace.parquet", "--model", "context", "-q") == 0
    capsys.readouterr()
    typical = answer(capsys, "predict", "trace.fit.json", "-B", 16)
    assert "median context" in typical["notes"][0]
    named = answer(capsys, "predict", "trace.fit.json", "-B", 16, "--context", 400)
    assert named["notes"] == []
    # 16 requests of 200 cached tokens more, at 2e-4 ms each
    assert named["rows"][0]["T_ms"] - typical["rows"][0]["T_ms"] == pytest.approx(0.64, rel=0.1)
    assert latfit("predict", "trace.fit.json", "-B", 16, "--context", 400, "--context-tokens", 400) == 2
    assert latfit("predict", "trace.fit.json", "-B", 16, "--context", -1) == 2
    capsys.readouterr()
    assert latfit("predict", "trace.fit.json", "-B", 16, "--sensitivity") == 0
    assert "median context" in capsys.readouterr().out
