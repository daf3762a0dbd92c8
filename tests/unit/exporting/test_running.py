"""Exported programs run: scripts under a shell, with a stand-in for the engine; the router before models that sleep."""

import asyncio
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import latfit
from tests.unit.exporting.parsers import options
from tests.unit.exporting.plans import of_batches, of_requests
from tests.unit.exporting.test_targets import NAMES


def words_given(script: str, program: str, folder: Path, *more: str, **env: str) -> list[str]:
    """What a program of that name is started with."""
    stand_in = folder / program
    stand_in.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    stand_in.chmod(0o755)
    (folder / "script.sh").write_text(script)
    done = subprocess.run(
        ["bash", "script.sh", *more], cwd=folder, capture_output=True, check=False, timeout=60,
        env={"PATH": f"{folder}:{os.environ['PATH']}", **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_shell_hands_over_the_name_as_it_is(name: str, tmp_path: Path) -> None:
    script = latfit.export(of_requests(), "vllm", model=name).files["vllm.sh"]
    words = words_given(script, "vllm", tmp_path, "--port", "8001")
    assert words == ["serve", name, *options(script), "--port", "8001"]
    assert not (tmp_path / "owned").exists()


def test_a_script_asks_for_the_model(tmp_path: Path) -> None:
    script = latfit.export(of_requests(), "sglang").files["sglang.sh"]
    words = words_given(script, "python3", tmp_path, MODEL="a model")
    assert words[:4] == ["-m", "sglang.launch_server", "--model-path", "a model"]
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=False, timeout=60)
    assert done.returncode != 0
    assert b"Set MODEL" in done.stderr


class Triton:
    """Two models that take so many seconds a batch, the GPU's one at a time; fails on a row of -1."""

    def __init__(self, gpu_s: float, cpu_s: float) -> None:
        self.took = {"gpu": gpu_s, "amx": cpu_s}
        self.batches: list[tuple[str, list[float]]] = []
        self.running = 0

    async def infer(self, model: str, inputs: list[Any]) -> Any:
        rows = inputs[0].array
        self.batches.append((model, rows[:, 0].tolist()))
        self.running += model == "gpu"
        assert self.running <= 1
        await asyncio.sleep(self.took[model])
        self.running -= model == "gpu"
        if (rows == -1).any():
            raise RuntimeError("a broken row")
        output = types.SimpleNamespace(name="OUTPUT")
        return types.SimpleNamespace(
            as_numpy=lambda name: 10 * rows, get_response=lambda: types.SimpleNamespace(outputs=[output])
        )


class InferInput:
    def __init__(self, name: str, shape: list[int], kind: str) -> None:
        self.shape = shape

    def set_data_from_numpy(self, array: np.ndarray) -> None:
        assert list(array.shape) == self.shape
        self.array = array


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exported router: T_cut 7.79 ms, batches up to 160."""
    parts: dict[str, dict[str, Any]] = {
        "tritonclient": {},
        "tritonclient.grpc": {"InferInput": InferInput},
        "tritonclient.utils": {"np_to_triton_dtype": lambda kind: "FP32"},
    }
    for name, values in parts.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    found = types.ModuleType("router")
    exec(compile(latfit.export(of_batches(), "triton").files["router.py"], "router.py", "exec"), vars(found))
    return found


async def sent(router: Any, triton: Triton, values: list[float], gap_s: float = 0.0) -> list[Any]:
    front = router.Router(triton)
    tasks = []
    for value in values:
        tasks.append(asyncio.ensure_future(front.infer({"INPUT": np.full((1, 1), value)})))
        await asyncio.sleep(gap_s)
    return await asyncio.gather(*tasks, return_exceptions=True)


class TestRouter:
    def test_an_idle_gpu_takes_all_that_wait(self, router: Any) -> None:
        router.T_CUT_S = 60.0
        triton = Triton(gpu_s=0.05, cpu_s=0.0)
        answers = asyncio.run(sent(router, triton, [1.0, 2.0, 3.0, 4.0]))
        assert triton.batches == [("gpu", [1.0]), ("gpu", [2.0, 3.0, 4.0])]
        assert [each["OUTPUT"].tolist() for each in answers] == [[[10.0]], [[20.0]], [[30.0]], [[40.0]]]

    def test_who_has_waited_goes_to_the_cpu(self, router: Any) -> None:
        assert pytest.approx(0.0078, abs=1e-4) == router.T_CUT_S
        triton = Triton(gpu_s=0.5, cpu_s=0.0)
        answers = asyncio.run(sent(router, triton, [1.0, 2.0, 3.0]))
        assert triton.batches[0] == ("gpu", [1.0])
        assert sorted(triton.batches[1:]) == [("amx", [2.0]), ("amx", [3.0])]
        assert [each["OUTPUT"].item() for each in answers] == [10.0, 20.0, 30.0]
