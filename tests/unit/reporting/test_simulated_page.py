"""The page of a simulation: stands alone, says who is fastest and by the numbers of the runs, from the command line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from latfit.api.simulations import PolicySimulation
from latfit.cli.app import run
from latfit.errors import TargetNotWritable
from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import add_path, nominal_path
from latfit.reporting.brief import policies_verdict
from latfit.reporting.layout import Making
from latfit.simulation.policies.result import ClassTimes, SimResult
from latfit.simulation.policies.service import System, linear_path, table_path
from latfit.units import format_ms
from tests.conftest import ROOT
from tests.unit.reporting.test_page import HOSTILE, Outline
from tests.unit.simulation.made import made_result

PATHS = ["--path", "gpu:launch=8ms,slope=0.05ms", "--path", "amx=exp:2ms"]
SMALL = ["--requests", "3000", "--replications", "2"]
SYSTEM = System(linear_path("gpu", 8, 0.05, 256), table_path("amx", [2.0], exponential=True, nominal=True))


def page(runs: list[SimResult], sla_ms: float = math.inf, **made: Any) -> Outline:
    return Outline(PolicySimulation(runs, SYSTEM, sla_ms).page(Making(**made)).html)


@pytest.fixture
def sample(in_tmp: Path) -> Path:
    """What a newcomer has after two commands: the sample CPU, and a GPU that somebody quoted."""
    trace = str(ROOT / "sample_traces" / "cpu_numpy_tiny.parquet")
    assert run(["fit", trace, "--path", "cpu", "--model", "linear", "--out", "cpu.fit.json", "--quiet"]) == 0
    add_path(Path("hardware.json"), nominal_path("gpu", parse_nominal("launch=8ms,slope=0.05ms")))
    return in_tmp


class TestAnswer:
    def test_the_fastest_comes_first_in_the_words_of_the_command(self) -> None:
        runs = [made_result("fixed", 40.0), made_result("three-stage", 12.0)]
        outline = page(runs)
        assert policies_verdict(runs).text in outline.text
        assert outline.text.index("three-stage is best: p99 12 ms") < outline.text.index("11 ms to 13 ms (95 %)")

    @pytest.mark.parametrize(
        ("sla_ms", "looks"),
        [
            (20.0, "card answer good"),
            (12.5, "card answer doubt"),
            (10.0, "card answer bad"),
            (math.inf, "card answer good"),
        ],
    )
    def test_a_verdict_has_three_states(self, sla_ms: float, looks: str) -> None:
        """A p99 of 12 ms, 95 % between 11 and 13 ms."""
        outline = page([made_result("fixed", 12.0)], sla_ms=sla_ms)
        assert looks in outline.attributes("class")

    def test_what_nothing_carries(self) -> None:
        outline = page([made_result("fixed", 40.0, stable=False, notes=["The queue grows."])], sla_ms=20.0)
        assert "Unstable: no policy carries" in outline.text
        assert "The queue grows." in outline.text
        assert "card answer bad" in outline.attributes("class")

    def test_classes_have_a_row_each(self) -> None:
        times = {"mean": 3.0, "p50": 2.0, "p90": 8.0, "p99": 9.5}
        found = made_result("fixed", 9.0, by_class=[ClassTimes("chat", times), ClassTimes("batch", times)])
        text = page([found]).text
        assert "By class" in text
        assert "fixed, 500 req/schat2 ms9.5 ms" in text
        assert "By class" not in page([made_result("fixed", 9.0)]).text


def test_stands_alone_and_escapes() -> None:
    outline = page([made_result(HOSTILE, 9.0, notes=[HOSTILE], nominal=[HOSTILE])], command=HOSTILE)
    assert outline.open == []
    assert outline.count("link") == 0
    assert outline.count("script") == 1
    assert all(source.startswith("data:image/png;base64,") for source in outline.attributes("src"))
    assert {target[1:] for target in outline.attributes("href")} <= set(outline.attributes("id"))
    assert outline.count("img") == 1
    assert outline.count("caption") == outline.count("table") == 2


class TestCommand:
    def test_a_newcomers_line(self, sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
        asked = ["simulate", "policies", "--policy", "three-stage", "--policy", "fixed", "--rate", "500/s", *SMALL]
        assert run([*asked, "--report", "out", "--json"]) == 0
        found = capsys.readouterr()
        assert found.err == ""
        runs = json.loads(found.out)["runs"]
        outline = Outline((sample / "out" / "simulation.html").read_text())
        for each in runs:
            assert format_ms(each["latency_ms"]["p99"]) in outline.text
            assert all(name in outline.text for name in ("B1", "T_cut") if name in each["settings"])
        assert (sample / "out" / "simulation.png").read_bytes().startswith(b"\x89PNG")

    def test_an_engine(self, sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
        engine = ["--engine", "chunked-prefill", "--engine", "static", "--fit", "cpu.fit.json", "--kv-blocks", "2588"]
        load = ["--rate", "2/s", "--lengths", "64:32", "--requests", "200", "--replications", "2"]
        assert run(["simulate", "engine", *engine, *load, "--report", "out", "--json"]) == 0
        runs = json.loads(capsys.readouterr().out)["runs"]
        outline = Outline((sample / "out" / "simulation.html").read_text())
        assert outline.open == []
        best = min(runs, key=lambda each: float(each["latency_ms"]["p99"]))
        assert f"{best['engine']} has the lowest p99 latency" in outline.text
        assert f"p99 TTFT {format_ms(best['ttft_ms']['p99'])}" in outline.text

    def test_a_study_has_its_findings(self, in_tmp: Path) -> None:
        small = ["--requests", "2000", "--replications", "2", "--report", "out", "-q"]
        assert run(["simulate", "study", "--path", "gpu=8ms+0.05ms*16", *PATHS[2:], *small]) == 0
        assert "lowers p99 2.5x" in Outline(Path("out/simulation.html").read_text()).text

    def test_a_folder_that_cannot_be_made_is_told_before_the_run(self, in_tmp: Path) -> None:
        Path("taken").write_text("mine")
        many = ["--requests", "1000000000"]
        assert (
            run(["simulate", "policies", "--rate", "5/s", *PATHS, *many, "--report", "taken"])
            == TargetNotWritable.exit_code
        )
        assert Path("taken").read_text() == "mine"
