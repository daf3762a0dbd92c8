"""The page stands alone, escapes everything, and copes with whatever is missing."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec import structs

from latfit.errors import TargetNotWritable
from latfit.messages import Message as LatfitWarning
from latfit.model.fit_parts import CrossValidation, DataFacts
from latfit.model.fit_result import FitResult, FitStatus
from latfit.planning.plan import make_plan
from latfit.reporting import layout
from latfit.reporting.layout import Making, write_page
from latfit.reporting.page import PAGE_NAME, ReportInput, render
from latfit.reporting.table import prose
from latfit.trace.table import Trace
from tests.unit.reporting.conftest import fit_of, held_out, machine, two_paths

HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Outline(HTMLParser):
    """Tags with their attributes, text, and whether every tag was closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data.replace("\u00a0", " ")

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.tags if name in attributes]

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


@pytest.fixture(scope="module")
def html(one_path: ReportInput) -> str:
    return render(one_path).html


def test_the_page_stands_alone(html: str) -> None:
    """Nothing is fetched, every picture is inside, every link has its place, every tag is closed."""
    outline = Outline(html)
    assert outline.open == []
    for source in outline.attributes("src"):
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG\r\n")
    assert len(outline.attributes("src")) == 2
    places = outline.attributes("id")
    assert set(outline.attributes("href")) <= {f"#{place}" for place in places}
    assert len(set(places)) == len(places)
    assert "@import" not in html
    assert "url(" not in html
    assert outline.count("link") == outline.count("iframe") == 0
    assert outline.count("script") == 1


class TestAnswerFirst:
    def test_the_answer_is_the_first_heading_after_the_title(self, one_path: ReportInput, html: str) -> None:
        assert one_path.plan is not None
        first = re.search(r"<h2[^>]*>(.*?)</h2>", html)
        assert first is not None
        assert first.group(1).replace("\u00a0", " ") == one_path.plan.answer

    def test_warnings_come_with_their_remedy(self, html: str) -> None:
        text = Outline(html).text
        assert "tau_S is not determined by these data. → Measure S up to 16384." in text

    def test_the_settings_can_be_copied(self) -> None:
        report = two_paths()
        found = re.search(r'<pre class="command"[^>]*><code>(.*?)</code>', render(report).html)
        assert found is not None
        assert report.plan is not None
        assert report.plan.settings is not None
        assert f"--max-num-seqs {report.plan.settings.max_num_seqs}" in re.sub("<.*?>", "", found[1])

    def test_details_are_closed_and_links_reach_into_them(self, html: str) -> None:
        parts = re.findall(r'<details class="part">\n<summary><h2>.*?</h2></summary>\n<div id="([^"]*)">', html)
        assert parts == ["trust", "limits", "path-cpu"]

    def test_a_hopeless_sla_says_so(self, fit: FitResult, rows: Trace) -> None:
        profile = machine(cpu=fit)
        text = Outline(render(ReportInput(profile, {"cpu": rows}, make_plan(profile, 1.0))).html).text
        assert "SLA missed" in text
        assert "No step meets" in text

    def test_without_an_sla_a_hint(self, fit: FitResult) -> None:
        html = render(ReportInput(machine(cpu=fit))).html
        assert "latfit report --sla 20ms" in Outline(html).text
        assert 'id="limits"' not in html


class TestHostile:
    def test_labels_are_text(self, rows: Trace) -> None:
        fit = fit_of(
            rows,
            provenance={HOSTILE: {HOSTILE: HOSTILE}},
            warnings=[LatfitWarning(HOSTILE, HOSTILE, HOSTILE)],
            data=DataFacts(HOSTILE, dropped={HOSTILE: 3}),
            cross_validation=CrossValidation(HOSTILE, held_out(4.0, 3.0)),
        )
        profile = machine(**{HOSTILE: fit, "gpu": fit})
        plan = make_plan(profile, 20.0)
        report = ReportInput(profile, {HOSTILE: rows}, plan, made=Making(HOSTILE, HOSTILE), notes=[HOSTILE])
        outline = Outline(render(report).html)
        assert outline.count("script") == 1
        assert all(not name.startswith("on") for _, attributes in outline.tags for name in attributes)
        assert all(source.startswith("data:image/png") for source in outline.attributes("src"))
        assert HOSTILE in outline.text

    def test_commands_become_code_without_opening_a_door(self) -> None:
        assert prose("run `latfit fit <x>` in 20 ms") == "run <code>latfit fit &lt;x&gt;</code> in 20\u00a0ms"
        assert prose("one ` only <b>") == "one ` only &lt;b&gt;"

    def test_files_stay_in_the_folder(self, rows: Trace, tmp_path: Path) -> None:
        fit = fit_of(rows)
        profile = machine(**{"../../up": fit, "..-..-up": fit, "a/b": fit})
        _, *figures = write_page(tmp_path / "out", render(ReportInput(profile)), PAGE_NAME)
        assert len({figure.resolve() for figure in figures}) == len(figures) == 4
        assert {path.parent for path in figures} == {tmp_path / "out"}
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


class TestMissing:
    def test_without_rows_a_sentence_in_their_place(self, fit: FitResult, rows: Trace) -> None:
        outline = Outline(render(ReportInput(machine(cpu=fit))).html)
        assert outline.count("img") == 1
        assert "add the steps with --trace" in outline.text
        nothing = rows.select(rows["B"] < 0)
        assert Outline(render(ReportInput(machine(cpu=fit), {"cpu": nothing})).html).count("img") == 1

    def test_fits_that_cannot_be_drawn_say_why(self, fit: FitResult, rows: Trace) -> None:
        bare = FitResult("saturation", FitStatus.CONVERGED, fit.parameters)
        failed = structs.replace(fit, status=FitStatus.TOO_FEW_ROWS)
        for found, reason in ((bare, "No figures"), (failed, FitStatus.TOO_FEW_ROWS.sentence)):
            outline = Outline(render(ReportInput(machine(cpu=found), {"cpu": rows})).html)
            assert outline.count("img") == 0
            assert reason in outline.text
        assert Outline(render(ReportInput(machine())).html).open == []


def test_two_paths_have_a_section_each_and_one_comparison(html: str) -> None:
    rendered = render(two_paths())
    assert {"path-amx", "path-gpu", "limits"} <= set(Outline(rendered.html).attributes("id"))
    stems = [picture.stem for picture in rendered.pictures]
    assert stems[:2] == ["amx-latency-map", "amx-measured-vs-predicted"]
    assert len(stems) == len(set(stems)) == 5
    assert "Not identified by these steps: tau_S." in html


class TestAccessible:
    def test_pictures_have_words_and_tables_have_headers(self, html: str) -> None:
        outline = Outline(html)
        images = [attributes for tag, attributes in outline.tags if tag == "img"]
        assert all(len(image["alt"] or "") > 40 for image in images)
        assert outline.count("caption") == outline.count("table")
        assert all("scope" in attributes for tag, attributes in outline.tags if tag == "th")
        assert ("html", {"lang": "en"}) in outline.tags
        assert outline.count("h1") == 1

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("colour", ["ink", "quiet", "link", "good", "bad", "warn"])
    @pytest.mark.parametrize("ground", ["ground", "panel", "stripe", "warn-ground"])
    def test_contrast(self, scheme: str, colour: str, ground: str) -> None:
        """WCAG 2.2, 1.4.3: 4.5 to 1 for text."""
        css = (Path(layout.__file__).parent / "templates" / "report.css").read_text()
        variables = [
            dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{([^}]*)\}", css)
        ]
        chosen = variables[["light", "dark"].index(scheme)]
        light, dark = sorted((luminance(chosen[colour]), luminance(chosen[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, as WCAG 2.2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])


class TestWriting:
    def test_files_are_what_was_rendered(self, one_path: ReportInput, html: str, tmp_path: Path) -> None:
        page, *figures = write_page(tmp_path / "new" / "folder", render(one_path), PAGE_NAME)
        assert page.read_text(encoding="utf-8") == html
        assert [figure.name for figure in figures] == ["latency-map.png", "measured-vs-predicted.png"]
        assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in figures)

    def test_a_file_in_the_way_of_the_folder(self, one_path: ReportInput, tmp_path: Path) -> None:
        (tmp_path / "taken").write_text("mine")
        with pytest.raises(TargetNotWritable):
            write_page(tmp_path / "taken", render(one_path), PAGE_NAME)
        assert (tmp_path / "taken").read_text() == "mine"
