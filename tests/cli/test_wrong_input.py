"""What users get wrong, on the command line: an exit code, what was found, where, and what to do; never a traceback."""

from pathlib import Path

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.trace.parquet import write_trace
from tests.conftest import planted_trace

PATHS = "--path gpu=8ms+0.05ms*256 --path amx=exp:2ms"
ENGINE = "simulate engine --rate 5/s --engine static --fit trace.fit.json"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("fit trace.parquet --seed -1", 2, "--seed"),
        ("profile --device numpy --pin 5-2", 2, "--pin"),
        ("plan --sla 20ms --tokens-per-request 0", 2, "--tokens-per-request"),
        (f"simulate policies --set load_curve=curve.csv --policy gpu-only {PATHS}", 3, "curve.csv"),
        (f"simulate policies --rate 5/s --law gamma:0 {PATHS}", 2, "gamma:0"),
        ("simulate engine --rate 5/s --policy fixed", 2, "--policy"),
        (f"{ENGINE} --lengths 8:8 --kv-blocks 1", 2, "Give 2 or more"),
        (f"{ENGINE} --transfer 1ms", 2, "--prefill-on"),
        ("predict trace.fit.json --data impossible.csv", 3, "impossible.csv: row 2"),
        ("predict trace.fit.json -B 8 --prefill-requests 9", 2, "--prefill-requests"),
        ("predict trace.fit.json -B 8 --context-tokens nan", 2, "--context-tokens"),
        ("predict trace.fit.json -B 8 -S 9999999999", 2, "2^31"),
        ("plan --sla 20ms --arrivals garbage.csv", 3, "garbage.csv: not a table"),
        ("compare trace.fit.json trace.fit.json --tolerance nan", 2, "--tolerance"),
        (f"simulate study --nominal gpu:p50=2ms --replications {'9' * 32}", 2, "Give 1 to 100,000"),
        ("fit trace.parquet --fix P_max=60 --fix P_max=70", 2, "P_max is given twice"),
        ("fit trace.parquet --set prior=P_max=60", 2, "mean and standard deviation"),
        ("ingest trace.parquet --out clean.csv", 2, "clean.parquet"),
        ("report --out page.html", 2, "would be a folder"),
        ("evaluate trace.fit.json two.parquet", 3, "2 systems"),
    ],
)
def test_is_told(command: str, code: int, words: str, fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("curve.csv").write_text("t_s,rate_per_s\n0,100\n10,-400\n")
    Path("impossible.csv").write_text("B,S\n1,5\n8,4\n")
    Path("garbage.csv").write_bytes(np.random.default_rng(0).bytes(2000))
    other = planted_trace(0.02, repeats=2)
    labels = np.array(["a", "b"], dtype=object)[np.arange(len(other)) % 2]
    write_trace(Path("two.parquet"), other.with_columns(hardware=labels))
    capsys.readouterr()
    assert run(command.split()) == code
    said = capsys.readouterr()
    assert words in said.err
    assert "Traceback" not in said.err
    assert not Path("clean.csv").exists()
