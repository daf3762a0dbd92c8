"""The journal: an interrupted run goes on where it was, whatever became of the last line."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latfit.cli.app import run
from latfit.errors import BadInput, TargetNotWritable, WrongUsage
from latfit.profiling.grid import ProfileRequest
from latfit.profiling.journal import Journal, journal_of
from latfit.profiling.run import measure
from tests.unit.profiling.fake_device import FakeFaults
from tests.unit.profiling.planted import fake

PLANTED = ("link", "dangling", "hard link", "pipe", "device", "folder")


def plant(kind: str, place: Path, victim: Path) -> None:
    """Put there what no file of latfit is."""
    makers: dict[str, Callable[[], object]] = {
        "link": lambda: place.symlink_to(os.path.relpath(victim, place.parent)),
        "dangling": lambda: place.symlink_to("nowhere"),
        "hard link": lambda: place.hardlink_to(victim),
        "pipe": lambda: os.mkfifo(place),
        "device": lambda: place.symlink_to("/dev/zero"),
        "folder": place.mkdir,
    }
    makers[kind]()


REQUEST = ProfileRequest(grid="B=1,2,4;S=1,4,32,64")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return journal_of(tmp_path / "trace.parquet")


def interrupted(file: Path, request: ProfileRequest = REQUEST, **faults: Any) -> int:
    """Run until Ctrl-C; the number of samples."""
    journal = Journal(file, request, resume=False)
    device = fake(faults=FakeFaults(**(faults or {"interrupt_after": 60})))
    trace, _ = measure(request, device=device, journal=journal)
    journal.close(finished=False)
    return len(trace)


def test_a_finished_run_leaves_none(file: Path) -> None:
    journal = Journal(file, REQUEST, resume=False)
    measure(REQUEST, device=fake(), journal=journal)
    assert file.exists()
    journal.close(finished=True)
    assert not file.exists()


def test_the_run_goes_on_with_what_it_had(file: Path) -> None:
    before = interrupted(file)
    journal = Journal(file, REQUEST, resume=True)
    started = journal.started
    earlier = list(journal.paths[0].samples)
    assert sum(not sample.warmup for sample in earlier) == before
    trace, (outcome,) = measure(REQUEST, device=fake(seed=1), journal=journal)
    result = outcome.result
    assert result.samples[: len(earlier)] == tuple(earlier)
    assert result.stop == "precise"
    assert trace.provenance["started"] == started
    assert {sample.process for sample in result.samples} == {0, 1}
    assert len(set(trace["run"])) == 2
    assert result.elapsed_s > earlier[-1].t_s
    assert [s.t_s for s in result.samples] == sorted(s.t_s for s in result.samples)


def test_the_time_used_counts(file: Path) -> None:
    request = ProfileRequest(grid=REQUEST.grid, precision=1e-9, budget_ms=2000.0)
    interrupted(file, request, interrupt_after=150)
    journal = Journal(file, request, resume=True)
    _, (outcome,) = measure(request, device=fake(), journal=journal)
    assert outcome.result.stop == "budget"
    assert outcome.result.elapsed_s == pytest.approx(2.0, rel=0.05)


def test_a_torn_last_line_is_passed_over(file: Path) -> None:
    interrupted(file)
    whole = file.read_text().removesuffix('{"stored":true}\n')
    lines = whole.splitlines(keepends=True)
    last = len(json.loads(lines[-1])["samples"])
    samples = sum(len(json.loads(line).get("samples", [])) for line in lines)
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 1):
        file.write_text("".join(lines[:-1]) + lines[-1][:cut])
        journal = Journal(file, REQUEST, resume=True)
        assert len(journal.paths[0].samples) in (samples - last, samples)
        journal.close(finished=False)
        again = Journal(file, REQUEST, resume=True)
        assert len(again.paths[0].samples) in (samples - last, samples)
        again.close(finished=False)


def test_a_run_that_nothing_else_holds_is_not_overwritten(file: Path) -> None:
    steps = interrupted(file)
    file.write_text(file.read_text().removesuffix('{"stored":true}\n'))
    with pytest.raises(WrongUsage, match=f"has {steps} steps") as caught:
        Journal(file, REQUEST, resume=False)
    assert "--resume" in caught.value.remedy


def test_one_that_the_trace_holds_too_gives_way(file: Path) -> None:
    interrupted(file)
    journal = Journal(file, REQUEST, resume=False)
    assert journal.paths == {}
    journal.close(finished=True)


def test_another_request_is_refused_by_its_option(file: Path) -> None:
    interrupted(file)
    with pytest.raises(WrongUsage, match="has model = 'tiny'"):
        Journal(file, ProfileRequest(grid=REQUEST.grid, model="tiny-moe"), resume=True)
    Journal(file, ProfileRequest(grid=REQUEST.grid, budget_ms=1.0, precision=0.5), resume=True).close(finished=False)


@pytest.mark.parametrize("text", ["", "{}", "[]", "rows", '{"schema": "latfit.trace/1"}', "\x00\xff"])
def test_another_file_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    if not text:
        Journal(file, REQUEST, resume=True).close(finished=True)
        return
    with pytest.raises(BadInput, match="no journal"):
        Journal(file, REQUEST, resume=True)


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_link_is_refused(kind: str, file: Path, tmp_path: Path) -> None:
    """An empty file behind the link stays empty."""
    victim = tmp_path / "important.txt"
    victim.touch()
    plant(kind, file, victim)
    with pytest.raises(TargetNotWritable, match="no file of latfit"):
        Journal(file, REQUEST, resume=False)
    assert victim.read_text() == ""
    assert not (file.parent / "nowhere").exists()


class Full:
    """A file on a disk that is full after so many bytes: it takes a part of a line, then nothing."""

    def __init__(self, stream: Any, room: int) -> None:
        self.stream, self.room = stream, room

    def write(self, line: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = line[: self.room]
        self.room -= len(part)
        taken: int = self.stream.write(part)
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def test_a_full_disk_keeps_all_whole_visits(file: Path) -> None:
    journal = Journal(file, REQUEST, resume=False)
    journal._stream = Full(journal._stream, 3000)  # type: ignore[assignment]
    with pytest.raises(TargetNotWritable, match="no space left"):
        measure(REQUEST, device=fake(), journal=journal)
    kept = journal.steps
    journal.close(finished=False, stored=False)
    assert kept > 0
    assert Journal(file, REQUEST, resume=True).steps == kept


def test_a_trace_that_cannot_be_written_leaves_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["profile", "--layers", "1", "--grid", "B=1,2;S=2,8", "--context", "16", "--budget", "3s", "--precision"]
    command += ["0.9", "--threads", "1", "--device", "numpy", "--processes", "1", "--quiet"]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        assert run(command) == 7
    told = " ".join(capsys.readouterr().err.split())
    assert "repeat the command with --resume" in told
    assert "Then repeat the command with --resume: trace.parquet.journal has" in told
    assert [each.name for each in tmp_path.iterdir()] == ["trace.parquet.journal"]
    assert run([*command, "--resume"]) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["trace.parquet"]


def test_two_runs_never_write_one_journal(file: Path) -> None:
    journal = Journal(file, REQUEST, resume=False)
    for resume in (False, True):
        with pytest.raises(WrongUsage, match="in use by a running"):
            Journal(file, REQUEST, resume=resume)
    journal.close(finished=True)
    assert not file.exists()
