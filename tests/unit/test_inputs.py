"""Files that users bring: pipes are read, nothing hangs, and nothing is read without an end."""

import os
import threading
from io import BytesIO
from pathlib import Path

import pytest

from latfit import inputs
from latfit.errors import BadInput
from latfit.inputs import decode_json, read_json, regular_file, spooled


def test_a_file_is_itself(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert regular_file(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert regular_file(tmp_path / "link") == tmp_path / "link"


@pytest.mark.parametrize(
    ("name", "found"),
    [("none", "no such file"), ("folder", "is a folder"), ("/dev/zero", "is a device"), ("a\0b", "cannot be read")],
)
def test_what_is_no_file(name: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match=found) as caught:
        regular_file(tmp_path / name)
    assert caught.value.remedy


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """As from `<(zcat log.gz)`; a writer that starts late is waited for."""
    os.mkfifo(tmp_path / "pipe")
    content = bytes(range(256)) * 5000
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,))
    writer.start()
    found = regular_file(tmp_path / "pipe")
    writer.join()
    assert found.read_bytes() == content


def test_a_stream_has_an_end() -> None:
    assert spooled(BytesIO(b"abc"), "standard input").read_bytes() == b"abc"
    with pytest.raises(BadInput, match="is empty"):
        spooled(BytesIO(), "standard input")
    with Path("/dev/zero").open("rb") as zeros, pytest.raises(BadInput, match="is a device"):
        spooled(zeros, "standard input")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"{", "not a fit"),
        (b"[" * 100 + b"]" * 100, "nested too deep"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": "\\ud800"}', "not a fit"),
        (b'{"a": "\xff"}', "not a fit"),
        (b"", "the file is empty"),
        (b'{"a": -1e400}', "not a fit"),
        (b'{"a": 1e31}', "too large"),
        (b'{"a": [18446744073709551616]}', "not a fit .18446744073709551616 is too large"),
        (b'{"a": ' + b"9" * 400 + b"}", "not a fit"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not a fit"),
        (b'{"a": NaN}', "not a fit"),
        (b'{"a": -Infinity}', "not a fit"),
        (b'"' + b"x" * 20_000 + b'"', "it has more than"),
    ],
)
def test_documents_that_are_none(content: bytes, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_JSON_BYTES", max(10_000, len(content) if content[:1] == b"[" else 0))
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(BadInput, match=found) as caught:
        read_json(tmp_path / "a.json", what="fit", made_by="latfit fit TRACE")
    assert caught.value.where == str(tmp_path / "a.json")
    assert "latfit fit TRACE" in caught.value.remedy


def test_a_document_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a device"):
        read_json(Path("/dev/zero"), what="fit", made_by="latfit fit TRACE")
    with pytest.raises(BadInput, match="no such fit"):
        read_json(tmp_path / "none", what="fit", made_by="latfit fit TRACE")


def test_what_is_no_surrogate_may_look_like_one() -> None:
    assert decode_json(b'["\\\\ud800", "\\ud83d\\ude00"]') == ["\\ud800", "\N{GRINNING FACE}"]
