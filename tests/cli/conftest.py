"""A fit of the reference model in a folder, made once by the commands and copied for each test."""

import shutil
from pathlib import Path

import pytest

from latfit.cli.app import run
from latfit.trace import write_trace
from tests.conftest import planted_trace


@pytest.fixture(scope="session")
def fitted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """trace.parquet with 430 steps, trace.fit.json, and hardware.json with the fit as path cpu."""
    folder = tmp_path_factory.mktemp("fitted")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_trace(Path("trace.parquet"), planted_trace(0.05, repeats=10))
        assert run(["fit", "trace.parquet", "--path", "cpu", "--quiet"]) == 0
    return folder


@pytest.fixture
def fitted(fitted_folder: Path, in_tmp: Path) -> Path:
    """trace.fit.json in a working folder of the test's own."""
    shutil.copytree(fitted_folder, in_tmp, dirs_exist_ok=True)
    return in_tmp / "trace.fit.json"
