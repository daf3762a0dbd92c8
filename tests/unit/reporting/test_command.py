"""`latfit report` from files to files."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit import api
from latfit.cli.commands import report
from latfit.errors import BadInput, WrongUsage
from latfit.files import write_json
from latfit.hardware.profile import HardwareProfile
from latfit.model import DataFacts
from latfit.trace.parquet import write_trace
from latfit.trace.read import data_facts, ingest
from tests.unit.reporting.conftest import fit_of, machine, planted_rows


@pytest.fixture
def stored(in_tmp: Path) -> Path:
    """hardware.json and the trace its fit was made from, in the working folder."""
    write_trace(in_tmp / "trace.parquet", planted_rows())
    read = ingest(in_tmp / "trace.parquet")
    save(machine(cpu=fit_of(read.trace, data=DataFacts.from_json(data_facts(read, {}, read.trace)))))
    return in_tmp


def save(profile: HardwareProfile) -> None:
    write_json(Path("hardware.json"), profile.to_json())


def test_the_rows_of_the_fit_are_found_again(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(sla="20ms")
    said = capsys.readouterr()
    assert said.out == "Wrote reports/report.html and 2 pictures next to it.\n"
    assert said.err == ""
    assert (stored / "reports" / "measured-vs-predicted.png").exists()
    assert "Within 20" in (stored / "reports" / "report.html").read_text()


def test_json_is_one_object_with_every_file(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(sla="20ms", json=True, out=Path("elsewhere"))
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"html", "figures"}
    assert all(Path(name).exists() for name in (document["html"], *document["figures"]))


def test_an_sla_that_nothing_meets_is_still_a_report(stored: Path) -> None:
    written = api.report("hardware.json", stored / "out", sla="1us")
    assert "SLA missed" in written.html.read_text()


def test_rows_that_are_gone_are_a_note(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("trace.parquet").unlink()
    report()
    said = capsys.readouterr()
    assert "1 picture next to" in said.out
    assert "figures that need rows are left out" in " ".join(said.out.split())
    assert "figures that need rows are left out" in Path("reports/report.html").read_text()


def test_rows_that_changed_are_not_shown_as_the_fits(stored: Path) -> None:
    write_trace(Path("trace.parquet"), planted_rows(seed=9))
    written = api.report("hardware.json", stored / "out")
    assert "changed since the fit" in written.html.read_text()
    assert len(written.figures) == 1


def test_a_named_trace_takes_their_place(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(Path("other.parquet"), planted_rows(seed=9, repeats=3))
    report(trace=[Path("other.parquet")])
    said = capsys.readouterr()
    assert "2 pictures" in said.out
    assert "rows of other.parquet" in said.out


class TestSeveralPaths:
    @pytest.fixture
    def both(self, in_tmp: Path) -> Path:
        """A profile of cpu and gpu, and a trace that holds both."""
        rows = planted_rows(repeats=2)
        save(machine(cpu=fit_of(rows), gpu=fit_of(rows)))
        path = np.where(np.arange(len(rows)) % 2 == 0, "cpu", "gpu").astype(object)
        write_trace(Path("both.parquet"), rows.with_columns(path=path))
        return in_tmp

    def test_each_takes_its_rows(self, both: Path) -> None:
        written = api.report("hardware.json", both, trace="both.parquet")
        names = {figure.name for figure in written.figures}
        assert {"cpu-measured-vs-predicted.png", "gpu-measured-vs-predicted.png", "paths.png"} <= names

    def test_traces_that_do_not_fit_are_refused(self, both: Path) -> None:
        rows = planted_rows()
        write_trace(Path("plain.parquet"), rows)
        write_trace(Path("npu.parquet"), rows.with_columns(path=np.full(len(rows), "npu", dtype=object)))
        wrong: dict[str, str | list[str]] = {
            "does not say which path": "plain.parquet",
            "'npu' is not one": "npu.parquet",
            "two systems or files": ["both.parquet"] * 2,
        }
        for words, trace in wrong.items():
            with pytest.raises(WrongUsage, match=words):
                api.report("hardware.json", both, trace=trace)


class TestBadInput:
    def test_no_profile(self, in_tmp: Path) -> None:
        with pytest.raises(BadInput, match="no such hardware profile"):
            report()
        assert list(in_tmp.iterdir()) == []

    def test_no_such_trace(self, stored: Path) -> None:
        with pytest.raises(BadInput, match="no such file"):
            report(trace=[Path("nope.parquet")])

    @pytest.mark.parametrize("sla", ["20", "0ms", "-1ms", "soon"])
    def test_an_sla_that_is_none(self, stored: Path, sla: str) -> None:
        with pytest.raises(WrongUsage):
            report(sla=sla)
        assert not (stored / "reports").exists()
