"""`latfit fit` with its ways to make intervals; `latfit predict` with sensitivities, context and decode-only fits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.trace.parquet import write_trace
from latfit.trace.table import Trace

Captured = pytest.CaptureFixture[str]


def latfit(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


def answer(capsys: Captured, *arguments: object) -> dict[str, Any]:
    assert latfit(*arguments, "--json") == 0
    return dict(json.loads(capsys.readouterr().out))


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
