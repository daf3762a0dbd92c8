"""From a request to a trace: on the fake device for what must be in it, on the real one end to end."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit.errors import HardwareMissing, WrongUsage
from latfit.profiling.devices.device import DeviceFailed, DeviceOutOfMemory
from latfit.profiling.devices.numpy_device import NumpyDevice
from latfit.profiling.grid import ProfileRequest
from latfit.profiling.run import measure
from latfit.profiling.shapes import ModelShape, StepShape
from latfit.trace.parquet import read_parquet, write_trace
from tests.unit.profiling.fake_device import FakeFaults
from tests.unit.profiling.planted import fake

GRID = "B=1,2,4;S=1,4,32"
SMALL = ModelShape("small", 64, 2, 4, 2, 16, 96, 128)


class TestTrace:
    def test_every_sample_is_in_it_and_no_warm_up(self) -> None:
        device = fake()
        trace, _ = measure(ProfileRequest(grid=GRID), device=device)
        pilot_steps = 6
        (facts,) = trace.provenance["paths"].values()
        assert len(trace) + facts["warmup_steps"] == device.steps - pilot_steps
        assert facts["warmup_steps"] > 0

    def test_provenance_can_be_stored_and_repeats_the_run(self, tmp_path: Path) -> None:
        request = ProfileRequest(grid=GRID, seed=7)
        trace, _ = measure(request, device=fake())
        write_trace(tmp_path / "trace.parquet", trace)
        stored = read_parquet(tmp_path / "trace.parquet")
        known = json.loads(json.dumps(stored.provenance))
        assert {"latfit", "command", "started", "seed", "machine", "device", "model", "grid"} <= set(known)
        assert known["seed"] == 7
        assert known["model"]["name"] == "tiny"
        np.testing.assert_array_equal(stored["T_ms"], trace["T_ms"])

    def test_limits_and_warnings_travel_with_it(self) -> None:
        device = fake(noise=0.2, faults=FakeFaults(memory_tokens=70))
        trace, (outcome,) = measure(ProfileRequest(grid="B=1;S=1,64,128", budget_ms=2000), device=device)
        assert [limit.cell.S for limit in outcome.result.limits] == [128]
        assert [limit["S"] for limit in trace.provenance["limits"]] == [128]
        assert {w["code"] for w in trace.provenance["warnings"]} == {
            warning.code for warning in outcome.result.warnings
        }


class TestRequest:
    def test_the_budget_holds_the_pilot_too(self) -> None:
        device = fake()
        _, (outcome,) = measure(ProfileRequest(budget_ms=3000, precision=1e-6), device=device)
        assert device.now_s() <= 3.0 + max(sample.T_ms for sample in outcome.result.samples[-5:]) / 1e3

    @pytest.mark.parametrize(
        ("request_", "error"),
        [
            (ProfileRequest(device="tpu"), WrongUsage),
            (ProfileRequest(device="torch-cuda"), HardwareMissing),
            (ProfileRequest(device="numpy", dtype="bf16"), HardwareMissing),
            (ProfileRequest(dtype="int4"), WrongUsage),
            (ProfileRequest(processes=0), WrongUsage),
            (ProfileRequest(pin=(4096,)), WrongUsage),
            (ProfileRequest(precision=0.0), WrongUsage),
            (ProfileRequest(grid="nonsense"), WrongUsage),
            (ProfileRequest(threads=0), WrongUsage),
        ],
    )
    def test_what_cannot_be_is_refused(self, request_: ProfileRequest, error: type[Exception]) -> None:
        with pytest.raises(error):
            measure(request_)

    def test_no_memory_at_all_is_wrong_usage(self) -> None:
        with pytest.raises(WrongUsage, match="smallest step"):
            measure(ProfileRequest(), device=fake(faults=FakeFaults(memory_tokens=0)))


class TestBrokenRuns:
    def test_ctrl_c_gives_the_trace_so_far(self) -> None:
        trace, (outcome,) = measure(ProfileRequest(), device=fake(faults=FakeFaults(interrupt_after=80)))
        assert outcome.result.interrupted
        assert 0 < len(trace) == outcome.result.steps
        assert trace.provenance["stop"] == "interrupted"

    def test_a_device_that_breaks_midway_gives_the_trace_so_far(self) -> None:
        trace, (outcome,) = measure(ProfileRequest(), device=fake(faults=FakeFaults(fail_after=80)))
        assert outcome.result.stop == "device_failed"
        assert len(trace) > 0
        assert outcome.result.warnings[0].code == "device_failed"

    def test_a_device_that_breaks_at_once_is_an_error(self) -> None:
        with pytest.raises(DeviceFailed, match="planted"):
            measure(ProfileRequest(), device=fake(faults=FakeFaults(fail_after=7)))


class TestNumpyDevice:
    def test_a_cell_beyond_memory_is_a_limit(self) -> None:
        device = NumpyDevice(SMALL)
        with pytest.raises(DeviceOutOfMemory, match="GiB"):
            device.prepare(StepShape(2**20, 2**20))
        device.prepare(StepShape(1, 4))
        assert device.step_ms() > 0
        device.close()

    def test_end_to_end(self, tmp_path: Path) -> None:
        """A moment on a real CPU: every cell of a small grid is measured, stored, and read back."""
        request = ProfileRequest(
            device="numpy", layers=1, grid=GRID, contexts=(16,), threads=1, budget_ms=10_000, precision=0.9
        )
        trace, (outcome,) = measure(request)
        write_trace(tmp_path / "trace.parquet", trace)
        stored = read_parquet(tmp_path / "trace.parquet")
        assert all(outcome.result.measured)
        assert len(stored) == len(trace)
        assert set(stored["path"]) == {"cpu"}
        assert set(stored["model"]) == {"tiny-1layers"}
        assert np.all(stored["T_ms"] > 0)
        assert stored.provenance["device"]["dtype"] == "float32"
