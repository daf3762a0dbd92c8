"""AMX on a real CPU: both libraries run it where the CPU has it, and a cap turns it off."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import latfit
from latfit.cli.app import run
from latfit.profiling.host.isa import FLAGS_FOR, cpu_flags

LIBRARIES = {"openvino": "openvino", "torch-cpu": "torch"}


def on_cpu_with(isa: str) -> pytest.MarkDecorator:
    missing = [flag for flag in FLAGS_FOR[isa] if flag not in cpu_flags()]
    return pytest.mark.skipif(bool(missing), reason=f"lscpu does not show {', '.join(missing)}")


@pytest.mark.amx
@pytest.mark.parametrize(
    ("asked", "ran", "path"),
    [
        pytest.param("auto", "amx", "amx", marks=on_cpu_with("amx")),
        pytest.param("avx512_bf16", "avx512_bf16", "cpu", marks=on_cpu_with("avx512_bf16")),
    ],
)
@pytest.mark.parametrize("device", LIBRARIES)
def test_the_evidence_names_the_kernels_that_ran(device: str, asked: str, ran: str, path: str, in_tmp: Path) -> None:
    if find_spec(LIBRARIES[device]) is None:
        pytest.skip(f"{LIBRARIES[device]} is not installed")
    options = (
        f"--device {device} --dtype bf16 --isa {asked} --budget 60s --precision 0.9 --processes 1 --grid B=1,8;S=8,64"
    )
    assert run(["profile", *options.split(), "--quiet"]) == 0
    trace = latfit.read("trace.parquet").trace
    assert set(trace["path"]) == {path}
    evidence = trace.provenance["paths"][path]["device"]["evidence"]
    assert evidence["isa"] == ran
    kernels = [*evidence["products"], *evidence.get("execution_types", [])]
    assert [("amx" in kernel) == (ran == "amx") for kernel in kernels] == [True] * len(kernels)
