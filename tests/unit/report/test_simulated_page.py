"""The page of a simulation: stands alone, says who is fastest and by the numbers of the runs, from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from latfit.cli.app import run
from latfit.errors import TargetNotWritable
from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import add_path, nominal_path
from latfit.report.simulation.page import Making, policies_page
from latfit.simulation.policies.result import SimResult
from latfit.simulation.policies.service import System, linear_path, table_path
from latfit.units import format_ms
from tests.conftest import ROOT
from tests.unit.report.test_page import HOSTILE, Outline
from tests.unit.simulation.made import made_result

PATHS = ["--path", "gpu:launch=8ms,slope=0.05ms", "--path", "amx=exp:2ms"]
SMALL = ["--requests", "3000", "--replications", "2"]
SYSTEM = System(linear_path("gpu", 8, 0.05, 256), table_path("amx", [2.0], exponential=True, quoted=True))


def page(runs: list[SimResult], **made: Any) -> Outline:
    return Outline(policies_page(runs, SYSTEM, Making(**made)).html)


@pytest.fixture
def sample(in_tmp: Path) -> Path:
    """What a newcomer has after two commands: the sample CPU, and a GPU that somebody quoted."""
    trace = str(ROOT / "sample_traces" / "cpu_numpy_tiny.parquet")
    assert run(["fit", trace, "--path", "cpu", "--model", "linear", "--out", "cpu.fit.json", "--quiet"]) == 0
    add_path(Path("hardware.json"), nominal_path("gpu", parse_nominal("launch=8ms,slope=0.05ms")))
    return in_tmp


class TestAnswer:
    def test_the_fastest_comes_first(self) -> None:
        text = page([made_result("fixed", 40.0), made_result("three-stage", 12.0)]).text
        assert "three-stage: 99 % of responses within 12 ms, fixed 40 ms." in text
        assert "11 ms to 13 ms (95 %)" in text

    def test_over_rates_the_highest_that_is_carried_within_the_sla(self) -> None:
        runs = [
            made_result("fixed", p99, rate_per_s=rate) for rate, p99 in ((100.0, 12.0), (200.0, 18.0), (300.0, 25.0))
        ]
        assert (
            "At 200/s, the highest rate here that anything carries with 99 % within 20 ms"
            in page(runs, sla_ms=20.0).text
        )
        assert "At 300/s, the highest rate here that anything carries, the fastest is fixed" in page(runs).text
        late = page(runs, sla_ms=10.0)
        assert "too slow for the SLA" in late.text
        assert ("div", {"class": "card answer unmet"}) in late.tags

    def test_what_nothing_carries(self) -> None:
        text = page([made_result("fixed", 40.0, stable=False, notes=["The queue grows."])]).text
        assert "No policy carries this load; requests wait longer and longer." in text
        assert "The queue grows." in text

    def test_quoted_paths_are_marked(self) -> None:
        assert "amx: its times are quoted, not measured." in page([made_result("fixed", 9.0, quoted=["amx"])]).text

    def test_what_was_simulated(self) -> None:
        """T(1) = 8.05 and T(256) = 8 + 0.05 256 = 20.8 ms."""
        text = page([made_result("fixed", 9.0)]).text
        assert "8.05 ms" in text
        assert "20.8 ms" in text


def test_stands_alone_and_escapes() -> None:
    outline = page([made_result(HOSTILE, 9.0, notes=[HOSTILE], quoted=[HOSTILE])], command=HOSTILE)
    assert outline.open == []
    assert outline.count("script") == outline.count("link") == 0
    assert all(source.startswith("data:image/png;base64,") for source in outline.attributes("src"))
    assert {target[1:] for target in outline.attributes("href")} <= set(outline.attributes("id"))
    assert outline.count("img") == 1
    assert outline.count("caption") == outline.count("table") == 3


class TestCommand:
    def test_a_newcomers_line(self, sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
        asked = ["simulate", "--policy", "three-stage", "--policy", "fixed", "--rate", "500/s", *SMALL]
        assert run([*asked, "--report", "out", "--json"]) == 0
        found = capsys.readouterr()
        assert found.err == ""
        runs = json.loads(found.out)["runs"]
        outline = Outline((sample / "out" / "simulation.html").read_text())
        for each in runs:
            assert format_ms(each["latency_ms"]["p99"]) in outline.text
            assert all(name in outline.text for name in ("B1", "T_cut") if name in each["settings"])
        assert "as its measured steps" in outline.text
        assert (sample / "out" / "simulation.png").read_bytes().startswith(b"\x89PNG")

    def test_no_column_is_lost_where_the_window_is_narrow(
        self, in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        rates = ["--rate", "100/s", "--rate", "500/s", "--sla", "20ms"]
        assert run(["simulate", "--policy", "three-stage", "--policy", "fixed", *rates, *PATHS, *SMALL]) == 0
        header = capsys.readouterr().out.splitlines()[1].split()
        assert header == ["policy", "settings", "rate", "mean", "p50", "p99", "on", "amx", "batch", "in", "SLA"]

    def test_an_engine(self, sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
        engine = ["--engine", "chunked-prefill", "--engine", "static", "--fit", "cpu.fit.json", "--kv-blocks", "2588"]
        load = ["--rate", "2/s", "--lengths", "64:32", "--requests", "200", "--replications", "2"]
        assert run(["simulate", *engine, *load, "--report", "out", "--json"]) == 0
        runs = json.loads(capsys.readouterr().out)["runs"]
        outline = Outline((sample / "out" / "simulation.html").read_text())
        assert outline.open == []
        best = min(runs, key=lambda each: float(each["latency_ms"]["p99"]))
        assert (
            f"{best['engine']}, fcfs: 99 % of first tokens within {format_ms(best['ttft_ms']['p99'])}" in outline.text
        )
        assert "2,588" in outline.text

    def test_a_study_has_its_findings(self, in_tmp: Path) -> None:
        small = ["--requests", "2000", "--replications", "2", "--report", "out", "-q"]
        assert run(["simulate", "--study", "policies", "--path", "gpu=8ms+0.05ms*16", *PATHS[2:], *small]) == 0
        assert "45 to 18 ms" in Outline(Path("out/simulation.html").read_text()).text

    def test_a_folder_that_cannot_be_made_is_told_before_the_run(self, in_tmp: Path) -> None:
        Path("taken").write_text("mine")
        many = ["--requests", "1000000000"]
        assert run(["simulate", "--rate", "5/s", *PATHS, *many, "--report", "taken"]) == TargetNotWritable.exit_code
        assert Path("taken").read_text() == "mine"
