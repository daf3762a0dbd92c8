"""How much memory is free."""

from pathlib import Path

import pytest

from latfit import memory
from latfit.errors import BadInput


def planted(monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    lines = {name.replace("_", "."): text.splitlines() for name, text in files.items()}
    monkeypatch.setattr(memory, "_lines", lambda path: lines.get(Path(path).name, []))


def test_the_least_of_machine_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, meminfo="MemTotal: 9 kB\nMemAvailable: 8 kB")
    assert memory.free_memory_bytes() == 8192
    planted(monkeypatch, meminfo="MemAvailable: 8 kB", memory_max="5000", memory_current="2000")
    assert memory.free_memory_bytes() == 3000
    planted(monkeypatch, meminfo="MemAvailable: 8 kB", memory_max="max", memory_current="2000")
    assert memory.free_memory_bytes() == 8192
    planted(monkeypatch)
    assert memory.free_memory_bytes() is None


def test_what_has_no_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, meminfo="MemAvailable: 2097152 kB")
    memory.check_memory(1 << 31, "a file", "Read less.")
    with pytest.raises(BadInput, match="takes about 3 GiB of memory to read; 2 GiB are free"):
        memory.check_memory(3 << 30, "a file", "Read less.")
    planted(monkeypatch)
    memory.check_memory(1 << 50, "a file", "Read less.")
