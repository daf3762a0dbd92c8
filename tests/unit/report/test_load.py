"""The part of the page that a load decides: the same numbers as the plan, its pictures, the simulation of it."""

import json
from pathlib import Path

import pytest

from latfit.cli.app import run
from latfit.errors import WrongUsage
from latfit.files import write_json
from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import HardwareProfile, nominal_path
from latfit.planning.plan import make_plan
from latfit.planning.request import Wishes
from latfit.planning.result import Cutoff
from latfit.report.fit.page import ReportInput, render
from latfit.units import format_ms
from tests.unit.report.test_page import Outline

NOMINAL = HardwareProfile(
    {
        "amx": nominal_path("amx", parse_nominal("p50=1.3862944ms,max_batch=64")),
        "gpu": nominal_path("gpu", parse_nominal("launch=12ms,slope=0.05ms,max_batch=64")),
    }
)
WISHES = Wishes(rate=0.1)


@pytest.fixture(scope="module")
def text() -> str:
    plan = make_plan(NOMINAL, 20.0, wishes=WISHES)
    return Outline(render(ReportInput(NOMINAL, plans=[plan], wishes=WISHES)).html).text


def test_the_page_says_what_the_plan_says(text: str) -> None:
    """M/M/1 with mu 0.5 keeps 20 ms up to 0.26974 per ms; T_cut of 7.94 ms is published for this machine."""
    assert "p99 of responses at 100 req/s" in text
    assert "269.7 req/s" in text
    plan = make_plan(NOMINAL, 20.0, wishes=WISHES)
    assert isinstance(plan.T_cut, Cutoff)
    assert plan.T_cut.value is not None
    for said in (
        "Strategies for 100 req/s",
        "proved bound",
        "Capacity",
        "1 replica needed",
        format_ms(plan.T_cut.value),
    ):
        assert said in text


def test_the_simulation_is_shown(text: str) -> None:
    assert "The decision in the event simulation" in text
    assert "amx (nominal), one at a time" in text


def test_quoted_paths_claim_no_accuracy(text: str) -> None:
    assert "Nominal numbers, not measured: p50=1.3862944ms" in text
    assert "n = 0" not in text


def test_pictures_are_the_plans() -> None:
    plan = make_plan(NOMINAL, 20.0, wishes=WISHES)
    pictures = render(ReportInput(NOMINAL, plans=[plan], wishes=WISHES)).pictures
    assert {"plan-cutoff", "plan-rate", "paths"} <= {picture.stem for picture in pictures}
    assert all(len(picture.alt) > 40 for picture in pictures)
    without = render(ReportInput(NOMINAL, plans=[make_plan(NOMINAL, 20.0)])).pictures
    assert not any(picture.stem.startswith("plan-") for picture in without)


def test_a_load_that_cannot_be_served_says_what_would() -> None:
    wishes = Wishes(rate=0.9)
    outline = Outline(render(ReportInput(NOMINAL, plans=[make_plan(NOMINAL, 20.0, wishes=wishes)], wishes=wishes)).html)
    assert "SLA not met" in outline.text
    assert "--replicas 2" in outline.text


def test_from_the_command_line(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(Path("hardware.json"), NOMINAL.to_json())
    assert run(["report", "--sla", "20ms", "--rate", "100/s", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "reports/plan-rate.png" in document["figures"]
    assert "the event simulation agrees (11." in Outline(Path(document["html"]).read_text()).text


@pytest.mark.parametrize("arguments", [["--rate", "5/s"], ["--sla", "20ms", "--rate", "5"]])
def test_refused(arguments: list[str], in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(Path("hardware.json"), NOMINAL.to_json())
    assert run(["report", *arguments]) == WrongUsage.exit_code
    assert not Path("reports").exists()
