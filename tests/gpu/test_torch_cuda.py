"""The `torch-cuda` device: its decisions on a stand-in for the GPU, and the GPU itself where there is one.

`OnCpu` gives the CPU as the place of tensors and keeps a ledger of what the device asked of the GPU; the tests marked
`gpu` run what only a GPU can do.
"""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.errors import WrongUsage
from latfit.profiling.devices.device import DeviceOutOfMemory, DeviceSettings
from latfit.profiling.devices.numpy_device import random_weights
from latfit.profiling.devices.select import cuda_missing
from latfit.profiling.devices.torch_device import CudaDevice, TorchStep, linear, random_cache
from latfit.profiling.grid import ProfileRequest
from latfit.profiling.host.machine import cpu_model
from latfit.profiling.run import measure
from latfit.profiling.sampler import run_profile
from latfit.profiling.shapes import GIB, ModelShape, StepShape, step_bytes
from latfit.trace.parquet import write_trace
from tests.unit.profiling.decoder_reference import convert

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed (latfit[torch])")

SMALL = ModelShape("small", 64, 2, 4, 2, 16, 96, 128)
CELLS = (StepShape(2, 16), StepShape(prefill=(8, 8), history=(4, 4)), StepShape(2, 16, (4,)))


class NoRoom(RuntimeError):
    """What this stand-in raises where CUDA would be out of memory."""


class OnCpu(CudaDevice):
    """A GPU with `room` bytes whose clock is a counter: every timed run takes 1, 2, 3, ... ms."""

    place = "cpu"

    def __init__(
        self, shape: ModelShape, settings: DeviceSettings, room: int = GIB, largest: int | None = None
    ) -> None:
        self.room, self.largest = room, largest
        self.timed = self.recorded = self.released = 0
        super().__init__(shape, settings)

    def gpu_facts(self) -> dict[str, Any]:
        return {"gpu": "stand-in", "l2_bytes": 4096}

    def free_bytes(self) -> int:
        return self.room

    def time_ms(self, run: Callable[[], object]) -> float:
        run()
        self.timed += 1
        return float(self.timed)

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        if self.largest is not None:
            raise NoRoom("CUDA out of memory. Tried to allocate\nmore")
        self.recorded += 1
        run()

        def replay() -> None:
            run()

        return replay

    def release(self) -> None:
        self.released += 1


def device(shape: ModelShape = SMALL, *, room: int = GIB, largest: int | None = None, **settings: Any) -> OnCpu:
    return OnCpu(shape, DeviceSettings(**{"precision": "fp32", **settings}), room, largest)


def test_a_cell_is_recorded_once_and_timed_by_the_gpus_clock() -> None:
    under_test = device()
    for cell in CELLS:
        under_test.prepare(cell)
    assert under_test.recorded == len(CELLS)
    assert [under_test.step_ms() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert under_test.facts()["cuda_graphs"] is True


@pytest.mark.parametrize("change", [{"graphs": False}, {"experts": 4}])
def test_eager_where_graphs_are_off_or_cannot_be(change: dict[str, Any]) -> None:
    shape = ModelShape("moe", 64, 2, 4, 2, 16, 96, 128, experts=4, active_experts=2) if "experts" in change else SMALL
    under_test = device(shape, graphs=change.get("graphs", True))
    under_test.prepare(CELLS[0])
    assert under_test.step_ms() == 1.0
    assert under_test.recorded == 0
    assert under_test.facts()["cuda_graphs"] is False


def test_input_tokens_rotate() -> None:
    """The recorded step reads its tokens from one place, into which each step copies the next set."""
    under_test = device()
    under_test.prepare(CELLS[0])
    seen = set()
    for _ in range(4):
        under_test.step_ms()
        assert under_test._current is not None
        seen.add(tuple(under_test._current.tokens.tolist()))
    assert len(seen) > 1


def test_recorded_cells_are_kept_while_memory_lasts() -> None:
    """A cell visited again is not recorded again, unless the recordings had to make room."""
    under_test = device()
    for cell in (*CELLS, *CELLS):
        under_test.prepare(cell)
    assert under_test.recorded == len(CELLS)
    under_test.room = 2 * step_bytes(SMALL, StepShape(5, 16)) - 1
    under_test.prepare(StepShape(5, 16))
    assert under_test.released == 1
    under_test.prepare(CELLS[0])
    assert under_test.recorded == len(CELLS) + 2


def test_out_of_memory_is_a_limit_and_memory_is_given_back() -> None:
    under_test = device(largest=0)
    result = run_profile(under_test, CELLS, budget_s=5.0)
    assert {limit.cell for limit in result.limits} == set(CELLS)
    assert {limit.message for limit in result.limits} == {"CUDA out of memory. Tried to allocate"}
    assert under_test.released == len(CELLS)


def test_a_cell_too_large_is_not_tried() -> None:
    with pytest.raises(DeviceOutOfMemory, match="GiB"):
        device(room=2**20).prepare(StepShape(512, 4096))


def test_weights_too_large_are_wrong_usage() -> None:
    with pytest.raises(WrongUsage, match="weights take"):
        device(room=2**10)


def test_a_trace_of_both_sides_keeps_them_apart(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> None:
    """CPU and GPU in one run: one trace, a path each; `latfit fit` enters both into the machine's profile."""
    from latfit.profiling.devices import select

    monkeypatch.setattr(select, "reason_missing", lambda kind: None if kind in ("numpy", "torch-cuda") else "away")
    monkeypatch.setattr("latfit.profiling.devices.torch_device.CudaDevice", OnCpu)
    grid = "B=1,2,4,8;S=1,2,4,8,16"
    request = ProfileRequest(layers=1, grid=grid, contexts=(8,), budget_ms=12000.0, threads=1, processes=1)
    trace, outcomes = measure(request)
    assert [outcome.path for outcome in outcomes] == ["cpu", "gpu"]
    assert set(trace["path"]) == {"cpu", "gpu"}
    assert set(trace["hardware"]) == {f"{cpu_model()} + stand-in"}
    assert not set(trace["run"][trace["path"] == "cpu"]) & set(trace["run"][trace["path"] == "gpu"])
    assert trace.provenance["paths"]["cpu"]["device"]["device"] == "numpy"
    write_trace(in_tmp / "trace.parquet", trace)
    assert run(["fit", "trace.parquet", "--quiet"]) == 0
    assert set(json.loads(Path("hardware.json").read_text())["paths"]) == {"cpu", "gpu"}


@pytest.mark.gpu
@pytest.mark.skipif(cuda_missing() is not None, reason=str(cuda_missing()))
class TestGpu:
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("graphs", [True, False])
    def test_steps_run_and_agree_with_the_cpu(self, precision: str, graphs: bool) -> None:
        import torch

        under_test = CudaDevice(SMALL, DeviceSettings(precision, graphs=graphs))
        for cell in CELLS:
            under_test.prepare(cell)
            assert 0 < under_test.step_ms() < 1000
        weights, cell = random_weights(SMALL, 0), StepShape(prefill=(16,))
        logits = []
        for place in ("cpu", "cuda:0"):

            def tensor(array: Any, place: str = place) -> Any:
                return torch.from_numpy(array.copy()).to(place)

            with torch.inference_mode():
                loaded = convert(weights, tensor, lambda array: linear(tensor(array), "fp32"))
                step = TorchStep(loaded, cell, random_cache(loaded, cell))
                logits.append(step.run(torch.arange(16, device=place)).cpu().numpy())
        np.testing.assert_allclose(logits[1], logits[0], rtol=0.02, atol=0.02)

    @pytest.mark.parametrize("graphs", [True, False])
    def test_cells_prepared_again_run(self, graphs: bool) -> None:
        under_test = CudaDevice(SMALL, DeviceSettings("fp32", graphs=graphs))
        for cell in (*CELLS, *reversed(CELLS)):
            under_test.prepare(cell)
            assert 0 < under_test.step_ms() < 1000
        under_test._give_back()  # as where memory ends: recording begins anew
        under_test.prepare(CELLS[0])
        assert 0 < under_test.step_ms() < 1000

    def test_a_recorded_cell_writes_into_no_other_cells_cache(self) -> None:
        import torch

        under_test = CudaDevice(SMALL, DeviceSettings("fp32"))
        for cell in CELLS:
            under_test.prepare(cell)
        caches = [half for cell in CELLS[1:] for pair in under_test._recorded[cell].step.cache for half in pair]
        before = [half.clone() for half in caches]
        under_test.prepare(CELLS[0])
        for _ in range(3):
            under_test.step_ms()
        assert all(torch.equal(half, old) for half, old in zip(caches, before, strict=True))
        written = under_test._recorded[CELLS[0]].step.cache[0][0][:, :, :, CELLS[0].context]
        assert torch.isfinite(written).all()
