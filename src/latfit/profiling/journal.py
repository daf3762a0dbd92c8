"""The journal of a run: its samples on disk after every visit, so that `--resume` can go on.

JSON lines next to the trace: the request, the cells of each path, the samples of every visit. A torn line is skipped.
It is locked while the run lives, and removed by a finished run.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from latfit.errors import BadInput, TargetNotWritable, WrongUsage
from latfit.files import file_system_errors, lock, open_own, sync_folder
from latfit.inputs import decode_json, unreadable
from latfit.profiling.grid import ProfileRequest
from latfit.profiling.result import PathRecord, Sample
from latfit.provenance import utc_now

SCHEMA = "latfit.journal/1"
_MAY_CHANGE = ("budget_ms", "precision", "processes")


class _Visit(msgspec.Struct):
    path: int
    samples: list[Sample]
    too_large: list[tuple[int, str]]
    elapsed_s: float


def journal_of(trace: Path) -> Path:
    """Return the journal of a run that writes `trace`."""
    return trace.with_name(f"{trace.name}.journal")


class Journal:
    """An open journal, new or continued. `started` and `process` name the run that began it.

    Raises BadInput, TargetNotWritable, and WrongUsage if it is of another request or the only copy of steps.
    """

    def __init__(self, file: Path, request: ProfileRequest, *, resume: bool) -> None:
        self.file = file
        self.paths: dict[int, PathRecord] = {}
        self.started, self.process = utc_now(), os.getpid()
        self._stored = False
        with file_system_errors(file):
            self._stream = os.fdopen(open_own(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)
        try:
            self._begin(request, resume=resume)
        except BaseException:
            self._stream.close()
            raise

    def _begin(self, request: ProfileRequest, *, resume: bool) -> None:
        if lock(self._stream.fileno()) is False:
            remedy = "Wait until it ends, or write another trace with --out."
            raise WrongUsage("is in use by a running latfit profile", where=str(self.file), remedy=remedy)
        fields = msgspec.json.decode(msgspec.json.encode(request))  # lists for tuples, as in the file
        asked = {key: value for key, value in fields.items() if key not in _MAY_CHANGE}
        self._read(asked if resume else None)
        if resume and self.paths:
            self._write({})  # ends a torn line
            return
        if not resume and not self._stored and self.steps:
            found = f"has {self.steps} steps of a run that was cut off"
            remedy = "Continue that run with --resume, or delete the file."
            raise WrongUsage(found, where=str(self.file), remedy=remedy)
        self.paths = {}
        self._stream.truncate(0)
        self._write({"schema": SCHEMA, "asked": asked, "started": self.started, "process": self.process})

    @property
    def steps(self) -> int:
        return sum(not sample.warmup for record in self.paths.values() for sample in record.samples)

    def plan(self, path: int, record: PathRecord) -> None:
        """Write the cells of a path, before its first step."""
        self.paths[path] = record
        self._write({"path": path, "cells": record.cells, "grid": record.grid})

    def keep(self, path: int, samples: Sequence[Sample], too_large: Mapping[int, str], elapsed_s: float) -> None:
        """Write a visit, which the sampler then adds to the record of the path."""
        visit = {"samples": samples, "too_large": list(too_large.items()), "elapsed_s": elapsed_s}
        self._write({"path": path, **visit})

    def close(self, *, finished: bool, stored: bool = True) -> None:
        """Remove the journal of a finished run, else leave it. stored: the trace has the same steps."""
        if stored and not finished:
            with suppress(TargetNotWritable):  # without that line the journal counts as the only copy
                self._write({"stored": True})
        if finished:
            sync_folder(self.file.parent)  # the trace is on disk
            self.file.unlink(missing_ok=True)
        self._stream.close()

    def _write(self, document: dict[str, Any]) -> None:
        line = (msgspec.json.encode(document) if document else b"") + b"\n"
        with file_system_errors(self.file):
            while line:
                line = line[self._stream.write(line) or 0 :]

    def _read(self, asked: dict[str, Any] | None) -> None:
        try:
            text = self.file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise unreadable(self.file, error) from None
        for number, line in enumerate(text.splitlines()):
            try:
                document = decode_json(line.encode(), infinite=True) if line.strip() else {}
                if number == 0:
                    self._check_first(document, asked)
                elif document:
                    self._take(document)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                if number == 0:
                    found = "is no journal of latfit profile"
                    raise BadInput(found, where=str(self.file), remedy="Move it away or delete it.") from None

    def _check_first(self, document: dict[str, Any], asked: dict[str, Any] | None) -> None:
        if document.get("schema") != SCHEMA:
            raise ValueError("another schema")
        self.started, self.process = str(document["started"]), int(document["process"])
        before = document["asked"]
        changed = [key for key, value in (asked or {}).items() if value != before.get(key)]
        if changed:
            found = f"the run in {self.file} has {changed[0]} = {before.get(changed[0])!r}"
            remedy = "Repeat its options (--budget, --precision and --processes may change), or delete the file."
            raise WrongUsage(found, where="--resume", remedy=remedy)

    def _take(self, document: dict[str, Any]) -> None:
        self._stored = bool(document.get("stored"))
        if "cells" in document:
            self.paths[document["path"]] = msgspec.convert(document, PathRecord)
        elif "samples" in document:
            visit = msgspec.convert(document, _Visit)
            record = self.paths[visit.path]
            if any(not 0 <= sample.cell < len(record.cells) for sample in visit.samples):
                raise ValueError("a sample of no cell")
            record.samples += visit.samples
            record.too_large |= visit.too_large
            record.elapsed_s = max(record.elapsed_s, visit.elapsed_s)
