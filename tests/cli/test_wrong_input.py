"""What users get wrong, on the command line: an exit code, what was found, where, and what to do; never a traceback."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.trace.parquet import read_parquet, write_trace
from latfit.trace.table import Trace
from tests.conftest import planted_trace

Captured = pytest.CaptureFixture[str]

PATHS = ["--path", "gpu=8ms+0.05ms*256", "--path", "amx=exp:2ms"]
FEW = ["--requests", "1000", "--replications", "2"]


ENGINE = ["simulate", "engine", "--rate", "5/s", "--lengths", "60:5", "--kv-blocks", "99", "--fit", "trace.fit.json"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["fit", "trace.parquet", "--seed", "-1"], 2, "--seed"),
        (["plan", "--sla", "20ms", "--tokens-per-request", "0"], 2, "--tokens-per-request"),
        (["simulate", "policies", "--set", "load_curve=curve.csv", "--policy", "gpu-only", *PATHS], 3, "curve.csv"),
        (["simulate", "policies", "--rate", "5/s", "--law", "gamma:0", *PATHS], 2, "gamma:0"),
        (["simulate", "engine", "--rate", "5/s", "--policy", "fixed"], 2, "--policy"),
        (
            [
                "simulate",
                "engine",
                "--rate",
                "5/s",
                "--engine",
                "static",
                "--fit",
                "trace.fit.json",
                "--lengths",
                "8:8",
                "--kv-blocks",
                "1",
            ],
            2,
            "Give 2 or more",
        ),
        (["predict", "trace.fit.json", "--data", "impossible.csv"], 3, "impossible.csv: row 2"),
        (["predict", "trace.fit.json", "-B", "8", "--prefill-requests", "9"], 2, "--prefill-requests"),
        (["predict", "trace.fit.json", "-B", "8", "--context-tokens", "-1"], 2, "--context-tokens"),
        (["predict", "trace.fit.json", "-B", "8", "--context-tokens", "nan"], 2, "--context-tokens"),
        (["predict", "trace.fit.json", "-B", "8", "-S", "9999999999"], 2, "2^31"),
        (["plan", "--sla", "20ms", "--arrivals", "garbage.csv"], 3, "garbage.csv: not a table"),
        (["compare", "trace.fit.json", "trace.fit.json", "--tolerance", "nan"], 2, "--tolerance"),
        (["simulate", "study", "--nominal", "gpu:p50=2ms", "--replications", "9" * 32], 2, "Give 1 to 100,000"),
        (
            ["simulate", "policies", "--nominal", "gpu:p50=2ms", "--rate", "9/s", "--requests", "9" * 32],
            2,
            "--requests",
        ),
        (["fit", "trace.parquet", "--fix", "P_max=60", "--fix", "P_max=70"], 2, "P_max is given twice"),
        (["fit", "trace.parquet", "--set", "prior=P_max=60"], 2, "mean and standard deviation"),
        (["ingest", "trace.parquet", "--out", "clean.csv"], 2, "clean.parquet"),
        (
            [
                "simulate",
                "engine",
                "--rate",
                "5/s",
                "--engine",
                "static",
                "--fit",
                "trace.fit.json",
                "--transfer",
                "1ms",
            ],
            2,
            "--prefill-on",
        ),
        (["report", "--out", "page.html"], 2, "would be a folder"),
        (["evaluate", "trace.fit.json", "two.parquet"], 3, "2 systems"),
    ],
)
def test_is_told(arguments: list[str], code: int, words: str, fitted: Path, capsys: Captured) -> None:
    Path("curve.csv").write_text("t_s,rate_per_s\n0,100\n10,-400\n")
    Path("impossible.csv").write_text("B,S\n1,5\n8,4\n")
    Path("garbage.csv").write_bytes(np.random.default_rng(0).bytes(2000))
    other = planted_trace(0.02, repeats=2)
    labels = np.array(["a", "b"], dtype=object)[np.arange(len(other)) % 2]
    write_trace(Path("two.parquet"), other.with_columns(hardware=labels))
    capsys.readouterr()
    assert run(arguments) == code
    said = capsys.readouterr()
    assert words in said.err
    assert "Traceback" not in said.err
    assert not Path("clean.csv").exists()


def test_counts_beyond_any_step_are_dropped(in_tmp: Path, capsys: Captured) -> None:
    rows = "".join(f"{b},{b + 5},{b}.5\n" for b in range(1, 9))
    Path("huge.csv").write_text(f"B,S,T_ms\n99999999999,99999999999999999999,1\n{rows}")
    assert run(["ingest", "huge.csv", "--out", "huge.parquet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == {"bad_value": 1}
    assert read_parquet(Path("huge.parquet"))["S"].tolist() == list(range(6, 14))


def test_a_load_of_next_to_nothing_still_keeps_littles_law(in_tmp: Path, capsys: Captured) -> None:
    """A request in a day: moments of 1e11 ms leave 1e-5 ms of a response to rounding."""
    arguments = ["simulate", "policies", "--policy", "gpu-only", "--rate", "1e-5/s", *PATHS, *FEW, "--json"]
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["latency_ms"]["mean"] == pytest.approx(8.05, abs=1e-3)


def test_a_load_that_no_clock_can_tell(in_tmp: Path, capsys: Captured) -> None:
    """At 1e-14/s a thousand requests end at 1e20 ms, where the next number is 16,384 ms further."""
    assert run(["simulate", "policies", "--policy", "gpu-only", "--rate", "1e-14/s", *PATHS, *FEW]) == 2
    assert "below rounding" in capsys.readouterr().err


def test_a_plan_for_next_to_nothing(in_tmp: Path, capsys: Captured) -> None:
    for name, quote in (("amx", "p50=1.5ms"), ("gpu", "launch=8ms,slope=0.05ms")):
        assert run(["hardware", "add", name, "--quoted", quote]) == 0
    assert run(["plan", "--sla", "40ms", "--rate", "1e-300/s", "--json"]) == 0


def test_rates_of_a_sweep_are_load_enough(in_tmp: Path, capsys: Captured) -> None:
    assert (
        run(
            [
                "simulate",
                "policies",
                "--policy",
                "cutoff",
                "--sweep",
                "rate=50/s,90/s; t-cut=2ms",
                *PATHS,
                *FEW,
                "--json",
            ]
        )
        == 0
    )
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [each["rate_per_s"] for each in runs] == [50, 90]


def test_what_an_engine_is_not_known_by_is_said(in_tmp: Path, capsys: Captured) -> None:
    """Quoted steps, and a fit that has seen decode steps alone."""
    B = np.tile(np.arange(1.0, 33.0), 4)
    write_trace(Path("decode.parquet"), Trace({"B": B, "S": B, "T_ms": 4 + 0.2 * B + 0.01 * np.arange(len(B)) % 0.1}))
    assert run(["fit", "decode.parquet", "--model", "linear", "--quiet"]) == 0
    assert run(["hardware", "add", "gpu", "--quoted", "launch=8ms,slope=0.05ms", "--hardware", "q.json"]) == 0
    load = ["--rate", "2/s", "--lengths", "64:8", "--kv-blocks", "500", "--requests", "100", "--replications", "1"]
    for source, words in ((["--fit", "decode.fit.json"], "lower bound"), (["--set", "hardware=q.json"], "nominal")):
        capsys.readouterr()
        assert run(["simulate", "engine", "--engine", "static", *load, *source, "--json"]) == 0
        assert any(words in note for note in json.loads(capsys.readouterr().out)["runs"][0]["notes"])


def test_random_times_are_called_so(in_tmp: Path, capsys: Captured) -> None:
    rng = np.random.default_rng(1)
    B = rng.integers(1, 65, 300).astype(float)
    S = B + rng.integers(0, 2048, 300)
    write_trace(Path("noise.parquet"), Trace({"B": B, "S": S, "T_ms": rng.lognormal(2, 1, 300)}))
    assert run(["fit", "noise.parquet", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "no_better_than_constant" in [each["code"] for each in document["warnings"]]


@pytest.mark.parametrize("moments", [[0.0], [5.0] * 4])
def test_requests_that_have_no_rate(moments: list[float], fitted: Path, capsys: Captured) -> None:
    """One alone, or all at once: they are served, and only what goes by a rate asks for one."""
    Path("at_once.csv").write_text("t_s,prompt_tokens,output_tokens\n" + "".join(f"{t},10,5\n" for t in moments))
    given = ["--arrivals", "at_once.csv"]
    engine = ["simulate", "engine", "--batching", "static", "--kv-blocks", "400", "--fit", "trace.fit.json"]
    assert run([*engine, *given]) == 0
    assert capsys.readouterr().out.startswith("Stable: p99")
    policies = ["simulate", "policies", *PATHS, "--replications", "2", *given]
    assert run([*policies, "--policy", "cutoff"]) == 2
    assert "the requests have no rate" in capsys.readouterr().err
    assert run([*policies, "--policy", "cutoff", "--t-cut", "3ms"]) == 0
