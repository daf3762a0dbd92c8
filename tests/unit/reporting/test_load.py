"""The part of the page that a load decides: the same numbers as the plan, its pictures, the simulation of it."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from msgspec import structs

from latfit.cli.app import run
from latfit.errors import WrongUsage
from latfit.files import write_json
from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import HardwareProfile, nominal_path
from latfit.planning.plan import make_plan
from latfit.planning.request import PlanOptions
from latfit.planning.result import Cutoff, Plan
from latfit.reporting import page
from latfit.reporting.layout import Rendered
from latfit.reporting.page import ReportInput, render
from latfit.units import format_ms, format_rate
from tests.unit.reporting.test_page import Outline

NOMINAL = HardwareProfile(
    {
        "amx": nominal_path("amx", parse_nominal("p50=1.3862944ms,max_batch=64")),
        "gpu": nominal_path("gpu", parse_nominal("launch=12ms,slope=0.05ms,max_batch=64")),
    }
)
WISHES = PlanOptions(rate=0.1)


@cache
def planned(*, laws_only: bool = False) -> Plan:
    """A plan takes seconds, and no test changes it."""
    return make_plan(NOMINAL, 20.0, request=replace(WISHES, laws_only=laws_only))


@pytest.fixture(autouse=True, scope="module")
def few_places() -> Iterator[None]:
    """Sliders with two places: every place is a plan of seconds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(page, "RATE_FACTORS", (1.0, 2.0))
        patched.setattr(page, "LOAD_SLA_FACTORS", (1.0,))
        yield


@cache
def rendered() -> Rendered:
    return render(ReportInput(NOMINAL, plan=planned(), request=WISHES))


def test_every_number_is_that_of_the_plans_json() -> None:
    """The page and `plan --json` answer the same question with the same numbers, B1 among them."""
    plan, text = planned(), Outline(rendered().html).text
    told = json.loads(json.dumps(plan.to_json()))
    assert told["answer"] in text
    assert "p99 of responses at 100 req/s" in text
    assert "Strategies for 100 req/s" in text
    assert "1 replica needed" in text
    assert "amx (nominal), one at a time" in text
    assert "Nominal numbers, not measured: p50=1.3862944ms" in text
    assert {"meets": "SLA met", "likely": "SLA likely met", "misses": "SLA missed"}[told["promise"]] in text
    chosen = next(row for row in told["strategies"] if row["chosen"])
    assert f"p99 response{format_ms(chosen['percentile_ms'])}{chosen['name']}" in "".join(text.split("\n"))
    assert format_rate(told["capacity"]["sustainable_per_s"], down=True) in text
    for row in told["strategies"]:
        assert row["percentile_ms"] is None or format_ms(row["percentile_ms"]) in text
    assert isinstance(plan.T_cut, Cutoff)
    assert f"T_cut{format_ms(told['T_cut_ms']['value'])}" in "".join(text.split("\n"))
    # B1 is the one with the wait at the rate, wherever it stands without another word beside it.
    at_rate = told["B1_at_rate"]["value"] or told["B1"]["value"]
    assert set(re.findall(r">B1</(?:th|dt)>\s*<[^>]*>([\d,]+)", rendered().html)) >= {f"{at_rate}"}
    B1 = {row["change"]: row["B1"] for row in told["sensitivity"]}
    assert B1["unchanged"] == told["B1_at_rate"]["value"]
    assert B1["gpu (nominal) 10 % faster"] < B1["unchanged"] < B1["amx (nominal) 10 % faster"]


@pytest.mark.nightly
@pytest.mark.parametrize(("interval_ms", "only_unchanged"), [(None, False), ((0.0, 1e9), True)])
def test_changes_within_the_interval_are_no_bars(interval_ms: tuple[float, float] | None, only_unchanged: bool) -> None:
    plan = structs.replace(planned(laws_only=True), interval_ms=interval_ms)
    bars = re.search('<dl class="bars">(.*?)</dl>', render(ReportInput(NOMINAL, plan=plan)).html, flags=re.DOTALL)
    assert bars is not None
    assert (bars[1].count("<dt>") == 1) == only_unchanged


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("promise", "says", "looks"),
    [
        ("meets", "SLA met", "card answer good"),
        ("likely", "SLA likely met", "card answer doubt"),
        ("misses", "SLA missed", "card answer bad"),
    ],
)
def test_a_verdict_has_three_states(promise: str, says: str, looks: str) -> None:
    doubts = ["A tail was not seen."] if promise == "likely" else []
    plan = structs.replace(planned(laws_only=True), promise=promise, feasible=promise != "misses", why_in_doubt=doubts)
    outline = Outline(render(ReportInput(NOMINAL, plan=plan, request=WISHES)).html)
    assert f"p99 of responses at 100 req/s: {says}\n" in outline.text
    assert looks in outline.attributes("class")
    assert ("A tail was not seen" in outline.text) == (promise == "likely")


@pytest.mark.nightly
def test_from_the_command_line(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(Path("hardware.json"), NOMINAL.to_json())
    assert run(["report", "--sla", "20ms", "--rate", "100/s", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "reports/plan-rate.png" in document["figures"]
    assert re.search(r"p99 response\s+1[12]\.?\d* ms", Outline(Path(document["html"]).read_text()).text)


@pytest.mark.parametrize("arguments", [["--rate", "5/s"], ["--sla", "20ms", "--rate", "5"]])
def test_refused(arguments: list[str], in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(Path("hardware.json"), NOMINAL.to_json())
    assert run(["report", *arguments]) == WrongUsage.exit_code
    assert not Path("reports").exists()
