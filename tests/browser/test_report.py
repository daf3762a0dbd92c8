"""The report in a real browser: pictures load, nothing runs off the side, sliders and the map show the numbers."""

import html as escaping
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

import latfit
from latfit.api import serving
from latfit.api.simulations import PolicySimulation
from latfit.planning.plan import make_plan
from latfit.planning.request import PlanOptions
from latfit.reporting.fit_figures import draw_map
from latfit.reporting.layout import Making
from latfit.reporting.page import LOAD_SLA_FACTORS, RATE_FACTORS, SLA_FACTORS, ReportInput, render
from latfit.reporting.plot_data import FitView
from latfit.reporting.style import new_figure, png
from latfit.units import format_ms, format_rate
from tests.unit.reporting.conftest import fit_of, machine, planted_ms, planted_rows, two_paths
from tests.unit.reporting.test_load import NOMINAL
from tests.unit.reporting.test_simulated_page import SYSTEM
from tests.unit.simulation.made import made_result

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--virtual-time-budget=5000",
]

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")

FRAME = """<!doctype html><title>waiting</title><body style="margin:0">
<script>addEventListener("message", event => {{ document.title = event.data; }});</script>
<iframe src="page.html" style="border:0;width:{width}px;height:2000px"></iframe>
"""
REPORT = """<script>
addEventListener("load", () => parent.postMessage(JSON.stringify((() => {{ {script} }})()), "*"));
</script>"""
MEASURE = """
document.querySelectorAll("details").forEach(each => { each.open = true; });
const images = [...document.images];
return {
  images: images.length,
  loaded: images.filter(image => image.complete && image.naturalWidth > 0).length,
  width: document.documentElement.clientWidth,
  content: document.documentElement.scrollWidth,
  cut: [...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth).length,
  answerTop: document.querySelector("h2").getBoundingClientRect().top,
  narrowestImage: Math.min(...images.map(image => image.getBoundingClientRect().width)),
};
"""
MOVE = """
const sliders = [...document.querySelectorAll(".slider")];
const slider = sliders.find(each => each.querySelector("span").textContent === "{label}").querySelector("input");
slider.value = {at};
slider.dispatchEvent(new Event("input"));
const visible = [...document.querySelectorAll(".deck .answer")].filter(card => card.checkVisibility());
return [slider.closest(".slider").querySelector("output").textContent, ...visible.map(card => card.innerText)];
"""
POINT = """
const figure = document.querySelector("[data-readings]"), image = figure.querySelector("img");
const {{ left, top, width, height }} = image.getBoundingClientRect();
const at = {{ clientX: left + {x} * width, clientY: top + {y} * height }};
image.dispatchEvent(new PointerEvent("pointermove", at));
return figure.querySelector("figcaption").textContent;
"""

Chromium = Callable[..., str]


@pytest.fixture
def chromium(tmp_path: Path) -> Chromium:
    """Runs the browser with a profile of its own and gives what it printed."""

    def run(*arguments: str) -> str:
        assert BROWSER is not None
        command = [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    return run


def run_in_page(chromium: Chromium, html: str, folder: Path, script: str, width: int = 1200) -> Any:
    """What a script returns inside the page, in a frame: a window cannot be made as narrow as a telephone."""
    # The page forbids other scripts, so the copy under test goes without that line.
    copy, lines = re.subn(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", html)
    assert lines == 1
    page = copy.replace("</body>", REPORT.format(script=script) + "</body>")
    (folder / "page.html").write_text(page, encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    dom = chromium("--window-size=1300,2000", "--dump-dom", (folder / "frame.html").as_uri())
    title = re.search(r"<title>(.*?)</title>", dom, flags=re.DOTALL)
    assert title is not None
    return json.loads(escaping.unescape(title.group(1)))


@pytest.fixture(scope="module")
def page_html() -> str:
    return render(two_paths()).html


@pytest.fixture(scope="module")
def load_html() -> str:
    """The page of a plan for 100 requests a second within 20 ms."""
    request = PlanOptions(rate=0.1)
    return render(ReportInput(NOMINAL, plan=make_plan(NOMINAL, 20.0, request=request), request=request)).html


@pytest.fixture(scope="module")
def requests_plan() -> serving.EnginePlan:
    """A plan for requests on a machine with T = 9 + 0.2 B + 0.03 S."""
    B, S = (axis.ravel() for axis in np.meshgrid(2.0 ** np.arange(7), 2.0 ** np.arange(12)))
    B, S = B[S >= B].repeat(4), S[S >= B].repeat(4)
    T = (9 + 0.2 * B + 0.03 * S) * np.exp(np.random.default_rng(0).normal(0, 0.01, len(B)))
    fit = latfit.fit(pd.DataFrame({"B": B, "S": S, "T_ms": T}), model="linear")
    return latfit.plan_engine(fit, "12/s", "300:40", ttft="600ms", tpot="40ms", kv_blocks=4000)


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("kind", ["report", "simulation"])
def test_pictures_load_and_nothing_runs_off_the_side(
    chromium: Chromium, page_html: str, tmp_path: Path, width: int, kind: str
) -> None:
    runs = [made_result("three-stage", 12.0, settings={"B1": 29, "t_cut_ms": 8.25}), made_result("fixed", 40.0)]
    html = page_html if kind == "report" else PolicySimulation(runs, SYSTEM).page(Making()).html
    found = run_in_page(chromium, html, tmp_path, MEASURE, width)
    assert found["width"] == width
    assert found["images"] == found["loaded"] == {"report": 5, "simulation": 1}[kind]
    assert found["content"] <= width
    assert found["cut"] == 0
    assert found["answerTop"] < 300
    assert found["narrowestImage"] > 300


@pytest.mark.parametrize(("scheme", "bright"), [(1, True), (0, False)])
def test_figures_follow_the_colour_scheme(
    chromium: Chromium, page_html: str, tmp_path: Path, scheme: int, bright: bool
) -> None:
    """Where the page is dark nothing is left white, the figures neither; where it is light most of it is."""
    report, shot = tmp_path / "report.html", tmp_path / "shot.png"
    report.write_text(page_html, encoding="utf-8")
    dark = f"--blink-settings=preferredColorScheme={scheme}"
    chromium(dark, "--window-size=1200,3000", f"--screenshot={shot}", report.as_uri())
    lightness = imread(shot)[:, :, :3].mean(axis=2)
    share = float((lightness > 0.9).mean())
    assert share > 0.7 if bright else share < 0.03


def moved(chromium: Chromium, html: str, folder: Path, label: str, at: int) -> tuple[str, str]:
    """Where the slider stands after it is moved there, and the one card that is visible then."""
    place, card = run_in_page(chromium, html, folder, MOVE.format(label=label, at=at))
    return place, card.replace("\u00a0", " ")


@pytest.mark.parametrize("factor", [0.6, 1.0, 2.0])
def test_the_sla_slider_moves_the_answer_to_that_of_a_plan_at_its_sla(
    chromium: Chromium, page_html: str, tmp_path: Path, factor: float
) -> None:
    """What is visible then is what `latfit plan --json` says at that SLA, and nothing of another."""
    at, text = moved(chromium, page_html, tmp_path, "SLA", SLA_FACTORS.index(factor))
    sla_ms = factor * 20.0
    plan = make_plan(two_paths().profile, sla_ms).to_json()
    assert at == f"{sla_ms:g} ms"
    assert plan["answer"] in text
    largest = max(row["S_max"] for row in plan["inverse"]["S_at_B"])
    assert re.search(rf"Prefill\s+{largest:,}\b", text)
    assert re.search(rf"Decode\s+{plan['engines']['tensorrt']['max_batch']:,}\b", text)
    if plan["settings"] is not None and plan["settings"]["chunk_tokens"]:
        mixed = f"{plan['settings']['max_num_seqs']:,} + {plan['settings']['chunk_tokens']:,}"
        assert re.search(rf"Mixed\s+{re.escape(mixed)}\b", text)
    for threshold in ("B1", "B2"):
        assert re.search(rf"{threshold}\s+{plan[threshold]['value']:,}\b", text)


@pytest.mark.nightly
@pytest.mark.parametrize(("slider", "factor"), [("rate", 1.5), ("rate", 0.5), ("SLA", 0.6)])
def test_sliders_of_a_load_move_the_answer_to_that_of_a_plan_there(
    chromium: Chromium, load_html: str, tmp_path: Path, slider: str, factor: float
) -> None:
    """Response, capacity and replicas of `latfit plan --json` at that rate, or that SLA."""
    factors = RATE_FACTORS if slider == "rate" else LOAD_SLA_FACTORS
    at, text = moved(chromium, load_html, tmp_path, slider, factors.index(factor))
    rate, sla_ms = (0.1 * factor, 20.0) if slider == "rate" else (0.1, 20.0 * factor)
    plan = make_plan(NOMINAL, float(f"{sla_ms:.3g}"), request=PlanOptions(rate=float(f"{rate:.3g}"))).to_json()
    assert at == (format_rate(1e3 * rate) if slider == "rate" else f"{sla_ms:g} ms")
    assert plan["answer"] in text
    chosen = next(row for row in plan["strategies"] if row["chosen"])
    assert re.search(rf"p99 response\s+{re.escape(format_ms(chosen['percentile_ms']))}", text)
    assert format_rate(plan["capacity"]["sustainable_per_s"], down=True) in text
    assert f"{plan['capacity']['replicas']} replica" in text


@pytest.mark.nightly
@pytest.mark.parametrize(("slider", "factor"), [("rate", 2.0), ("TPOT", 0.6)])
def test_sliders_of_a_plan_for_requests_move_replicas_and_settings(
    chromium: Chromium, requests_plan: serving.EnginePlan, tmp_path: Path, slider: str, factor: float
) -> None:
    """Replicas, capacity and settings of `latfit plan --json` at that rate, or with that limit."""
    html = requests_plan.page(Making()).html
    factors = serving.RATE_FACTORS if slider == "rate" else serving.LIMIT_FACTORS
    at, text = moved(chromium, html, tmp_path, slider, factors.index(factor))
    assert at == ("24 req/s" if slider == "rate" else "24 ms")
    changes: dict[str, Any] = {"rate": "24/s"} if slider == "rate" else {"tpot": "24ms"}
    assert requests_plan.request is not None
    plan = latfit.plan_engine.of(replace(requests_plan.request, **changes)).to_json()
    assert plan["feasible"]
    assert re.search(rf"Replicas\s+{plan['replicas']['value']}\b", text)
    assert f"--max-num-seqs {plan['engine']['max_num_seqs']}" in text
    assert format_rate(plan["capacity_per_s"], down=True, digits=3) in text


def test_the_page_runs_its_own_script_and_no_other(chromium: Chromium, page_html: str, tmp_path: Path) -> None:
    """The security line names the script's hash: the slider and the button that copies are there, in a copy with
    another script that does not run."""
    report = tmp_path / "report.html"
    copy = page_html.replace("</body>", "<script>document.title = 'ran'</script></body>")
    report.write_text(copy, encoding="utf-8")
    dom = chromium("--dump-dom", report.as_uri())
    assert '<p class="slider">' in dom
    assert "Copy</button>" in dom
    assert "<title>ran</title>" not in dom
    assert len(page_html) < 1_500_000


def test_the_map_is_read_under_the_pointer(chromium: Chromium, tmp_path: Path) -> None:
    """At the pixel where Matplotlib draws a measured cell: its median, the planted latency, and an interval."""
    rows = planted_rows()
    ratio = rows.floats("T_ms") / planted_ms(rows.floats("B"), rows.floats("S"))
    low, high = (float(np.quantile(ratio, share)) for share in (0.05, 0.95))
    intervals = {"method": "empirical", "ratio_quantiles": {"0.95": high}, "lower_quantiles": {"0.95": low}}
    fit = fit_of(rows, intervals=intervals)
    drawn = new_figure()
    draw_map(drawn.subplots(), FitView(fit, rows))
    png(drawn)
    x, y = drawn.axes[0].transData.transform((8.0, 256.0)) / (drawn.bbox.width, drawn.bbox.height)
    html = render(ReportInput(machine(cpu=fit), {"cpu": rows})).html
    caption = run_in_page(chromium, html, tmp_path, POINT.format(x=x, y=1 - y))
    words = r"B = 8, S = 256: predicted (.*) ms, 90 % of steps (.*) to (.*) ms, measured (.*) ms \(8 steps\)"
    found = re.fullmatch(words, caption)
    assert found is not None
    predicted, from_ms, to_ms, measured_ms = map(float, found.groups())
    here = (rows.floats("B") == 8) & (rows.floats("S") == 256)
    assert predicted == pytest.approx(planted_ms(8, 256), rel=1e-3)
    assert measured_ms == pytest.approx(np.median(rows.floats("T_ms")[here]), rel=1e-3)
    assert (from_ms, to_ms) == pytest.approx((low * predicted, high * predicted), rel=1e-3)


@pytest.mark.nightly
def test_printed_on_five_pages(chromium: Chromium, page_html: str, tmp_path: Path) -> None:
    """Two measured paths with every table and figure, what is folded on the screen included."""
    report, printed = tmp_path / "report.html", tmp_path / "report.pdf"
    report.write_text(page_html, encoding="utf-8")
    chromium("--no-pdf-header-footer", f"--print-to-pdf={printed}", report.as_uri())
    assert max(int(n) for n in re.findall(rb"/Count (\d+)", printed.read_bytes())) <= 5
