"""Which devices a request means on which machine; machines are planted, the rules are real."""

from typing import Any

import pytest

from latfit.errors import HardwareMissing, WrongUsage
from latfit.profiling.devices import select
from latfit.profiling.grid import ProfileRequest
from latfit.profiling.shapes import PRESETS

TINY = PRESETS["tiny"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine that has these devices, on which probes find what the cap allows."""

    def plant(*kinds: str, flags: tuple[str, ...] = ("avx2", "fma", "avx512_bf16"), ran: str | None = None) -> None:
        away = {"openvino": "openvino is not installed", "torch-cpu": "torch is not installed"}
        monkeypatch.setattr(
            select, "reason_missing", lambda kind: None if kind in (*kinds, "numpy") else away.get(kind, "no driver")
        )
        monkeypatch.setattr(select, "cpu_flags", lambda: flags)
        monkeypatch.setattr(select, "environment_for", lambda isa, device: {} if isa == "auto" else {"CAP": isa})
        monkeypatch.setattr(select, "_idle_threads", lambda kind: None)
        select.prove_isa.cache_clear()
        monkeypatch.setattr(select, "probe", lambda kind, precision, isa: {"isa": ran or "avx512_bf16"})

    return plant


def kinds(**request: Any) -> list[str]:
    return [spec.kind for spec in select.choose_paths(ProfileRequest(**request), TINY)]


class TestAuto:
    def test_is_everything_that_is_there(self, machine: Any) -> None:
        machine("openvino", "torch-cpu", "torch-cuda")
        assert kinds() == ["openvino", "torch-cuda"]
        machine("torch-cpu")
        assert kinds() == ["torch-cpu"]

    def test_numpy_stands_in_where_nothing_else_is(self, machine: Any) -> None:
        machine()
        assert kinds() == ["numpy"]
        machine("torch-cuda")
        assert kinds() == ["numpy", "torch-cuda"]

    def test_a_cap_on_the_cpu_leaves_the_gpu_out(self, machine: Any) -> None:
        machine("openvino", "torch-cuda")
        (spec,) = select.choose_paths(ProfileRequest(isa="avx512_bf16"), TINY)
        assert (spec.kind, dict(spec.environment)) == ("openvino", {"CAP": "avx512_bf16"})

    def test_half_precision_is_the_gpus(self, machine: Any) -> None:
        machine("openvino", "torch-cuda")
        assert kinds(dtype="fp16") == ["torch-cuda"]
        machine("openvino")
        with pytest.raises(HardwareMissing, match="no driver"):
            kinds(dtype="fp16")


class TestMissing:
    @pytest.mark.parametrize(
        ("device", "remedy"),
        [("openvino", r"latfit\[amx\]"), ("torch-cpu", r"latfit\[torch\]"), ("torch-cuda", "Measure the CPU")],
    )
    def test_the_reason_comes_with_a_remedy(self, machine: Any, device: str, remedy: str) -> None:
        machine()
        with pytest.raises(HardwareMissing, match=remedy) as caught:
            kinds(device=device)
        assert caught.value.exit_code == 6


class TestPrecision:
    def test_auto_is_bf16_where_the_cpu_has_it(self, machine: Any) -> None:
        machine("openvino")
        assert select.precision_of("openvino", "auto") == "bf16"
        assert select.precision_of("numpy", "auto") == "fp32"
        machine("openvino", flags=("avx2", "fma"))
        assert select.precision_of("openvino", "auto") == "fp32"
        assert select.precision_of("torch-cuda", "auto") == "bf16"

    def test_what_a_device_lacks_is_named(self, machine: Any) -> None:
        machine("torch-cuda")
        with pytest.raises(HardwareMissing, match="torch-cuda does not compute in int8"):
            kinds(device="torch-cuda", dtype="int8")


class TestProcesses:
    def count(self, free: int | None, monkeypatch: pytest.MonkeyPatch, **request: Any) -> int:
        monkeypatch.setattr(select, "free_memory_bytes", lambda: free)
        asked = ProfileRequest(device="numpy", **request)
        (spec,) = select.choose_paths(asked, TINY)
        return select.process_count(spec)

    def test_three_where_memory_and_budget_allow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.count(None, monkeypatch) == 3
        assert self.count(2**40, monkeypatch, budget_ms=5000.0) == 1
        assert self.count(8 * TINY.weight_bytes, monkeypatch) == 1
        assert self.count(8 * TINY.weight_bytes, monkeypatch, processes=4) == 4


def test_cpus_to_stay_on_are_checked() -> None:
    with pytest.raises(WrongUsage, match="may not run on CPU 4095"):
        kinds(pin=(4095,))
