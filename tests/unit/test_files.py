"""Files appear whole or not at all, keep what they were beside their content, and lose no writer's change."""

import errno
import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from latfit.errors import TargetNotWritable
from latfit.files import check_writable, rewrite, write_text, write_whole

root = pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to the superuser")


def others(file: Path) -> list[str]:
    """What lies beside a file."""
    return [each.name for each in file.parent.iterdir() if each != file]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "results" / "hardware.json"


@pytest.fixture(autouse=True)
def folder(file: Path) -> None:
    file.parent.mkdir()


class TestWriteWhole:
    def test_a_dash_is_no_file(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where it is read, it is standard input."""
        monkeypatch.chdir(file.parent)
        with pytest.raises(TargetNotWritable, match="no file"):
            write_text(Path("-"), "new")
        assert others(file) == []

    def test_a_new_file_has_the_usual_mode(self, file: Path) -> None:
        write_text(file, "new")
        file.with_name("plain").touch()
        assert file.stat().st_mode == file.with_name("plain").stat().st_mode

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
    def test_the_mode_of_a_file_stays(self, file: Path, mode: int) -> None:
        file.write_text("old")
        file.chmod(mode)
        write_text(file, "new")
        assert stat.S_IMODE(file.stat().st_mode) == mode
        assert file.read_text() == "new"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away")
    def test_the_owner_and_the_group_stay(self, file: Path) -> None:
        file.write_text("old")
        os.chown(file, 1234, 4321)
        write_text(file, "new")
        assert (file.stat().st_uid, file.stat().st_gid) == (1234, 4321)

    def test_a_link_stays_and_its_target_is_replaced(self, file: Path, tmp_path: Path) -> None:
        file.write_text("old")
        link = tmp_path / "link.json"
        link.symlink_to(os.path.relpath(file, tmp_path))
        write_text(link, "new")
        assert link.is_symlink()
        assert file.read_text() == "new"

    def test_a_link_to_nothing_yet_makes_its_target(self, file: Path, tmp_path: Path) -> None:
        link = tmp_path / "link.json"
        link.symlink_to(file)
        write_text(link, "new")
        assert link.is_symlink()
        assert file.read_text() == "new"

    def test_links_in_a_circle_are_refused(self, file: Path) -> None:
        file.symlink_to(file)
        with pytest.raises(TargetNotWritable):
            check_writable(file)

    @root
    def test_a_read_only_file_is_not_replaced(self, file: Path) -> None:
        file.write_text("old")
        file.chmod(0o444)
        with pytest.raises(TargetNotWritable, match="read-only"):
            write_text(file, "new")

    def test_a_name_that_is_too_long(self, file: Path) -> None:
        with pytest.raises(TargetNotWritable, match="too long"):
            check_writable(file.with_name(f"{'x' * 300}.json"))

    def test_a_name_as_long_as_the_system_allows(self, file: Path) -> None:
        longest = file.with_name("x" * 255)
        write_text(longest, "new")
        rewrite(longest, lambda: longest.read_text() + "er")
        assert longest.read_text() == "newer"

    def test_devices_are_written_to_and_stay(self) -> None:
        write_text(Path("/dev/null"), "new")
        assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)

    def test_a_pipe_gets_the_content(self, file: Path) -> None:
        os.mkfifo(file)
        reader = subprocess.Popen(["cat", str(file)], stdout=subprocess.PIPE)
        write_text(file, "new")
        assert reader.communicate(timeout=30)[0] == b"new"
        assert others(file) == []

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk_leaves_the_old_content(self, file: Path, code: int) -> None:
        file.write_text("old")

        def write(stream: BinaryIO) -> None:
            stream.write(b"half")
            raise OSError(code, os.strerror(code))

        with pytest.raises(TargetNotWritable, match="no space left"):
            write_whole(file, write)
        assert file.read_text() == "old"
        assert others(file) == []


def add_lines(file: Path, name: str, n: int) -> None:
    """A writer in a process of its own."""
    for i in range(n):
        rewrite(file, lambda: (file.read_text() if file.exists() else "") + f"{name}{i}\n")  # noqa: B023


class TestRewrite:
    def test_writers_at_once_lose_nothing(self, file: Path) -> None:
        context = multiprocessing.get_context("spawn")
        writers = [context.Process(target=add_lines, args=(file, name, 30)) for name in "abc"]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        expected = {f"{name}{i}" for name in "abc" for i in range(30)}
        assert set(file.read_text().split()) == expected
        assert others(file) == []

    def test_an_error_ends_the_turn(self, file: Path) -> None:
        def content() -> str:
            raise ValueError("not a profile")

        with pytest.raises(ValueError, match="not a profile"):
            rewrite(file, content)
        rewrite(file, lambda: "new")
        assert file.read_text() == "new"

    def test_a_killed_writer_holds_up_nobody(self, file: Path) -> None:
        code = f"""
import os, signal
from collections.abc import Callable
from pathlib import Path
from latfit.files import rewrite
rewrite(Path({str(file)!r}), lambda: os.kill(os.getpid(), signal.SIGKILL))
"""
        subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
        rewrite(file, lambda: "new")
        assert file.read_text() == "new"

    def test_by_any_name_of_the_file(self, file: Path, tmp_path: Path) -> None:
        link = tmp_path / "link.json"
        link.symlink_to(file)
        rewrite(link, lambda: "new")
        assert link.is_symlink()
        assert file.read_text() == "new"
