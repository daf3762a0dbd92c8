"""Which path may take the place of which: measured over nominal, the same system over itself, nothing else unforced."""

import multiprocessing
from pathlib import Path

import pytest
from msgspec.structs import replace

from latfit.api import Hardware
from latfit.cli.app import run
from latfit.errors import BadInput, WrongUsage
from latfit.hardware.ceiling import Ceiling
from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import (
    ExecutionPath,
    HardwareProfile,
    add_path,
    nominal_path,
    refusal,
)
from latfit.model import Errors, FitResult
from tests.unit.planning.test_plan import line

H100 = {"hardware": "NVIDIA H100", "model": "llama-3.1-8b", "tp": "1"}


def fitted(slope: float = 0.05, when: str = "2026-11-01T10:00:00+00:00", **identity: str) -> FitResult:
    return line(
        8, slope, metrics=Errors(100, mape_pct=6.0), provenance={"created": when, "identity": {**H100, **identity}}
    )


def measured(slope: float = 0.05, **identity: str) -> ExecutionPath:
    return ExecutionPath("gpu", fitted(slope, **identity))


NOMINAL = nominal_path("gpu", parse_nominal("p50=2ms"))


class TestRefusal:
    def test_nominal_numbers_never_replace_a_measurement(self) -> None:
        found = refusal(measured(), NOMINAL)
        assert found is not None
        assert "the measurement of 2026-11-01 (linear, 6 % error)" in found.message
        assert "--force" in found.remedy

    @pytest.mark.parametrize(
        ("fact", "other"),
        [
            ("hardware", "NVIDIA A100"),
            ("model", "llama-3.1-70b"),
            ("tp", "2"),
            ("dtype", "fp8"),
            ("engine", "sglang"),
            ("device", "openvino"),
        ],
    )
    def test_nor_does_another_system(self, fact: str, other: str) -> None:
        known = {"dtype": "bfloat16", "engine": "vllm", "device": "numpy"}
        found = refusal(measured(0.05, **known), measured(0.05, **{**known, fact: other}))
        assert found is not None
        assert f"{fact} " in found.message
        assert f"not {other}" in found.message

    @pytest.mark.parametrize(
        "changed",
        [{"hardware": "h100"}, {"engine_version": "0.12"}, {"isa": "avx2"}, {"threads": "1"}, {"tp": ""}],
    )
    def test_the_same_system_does(self, changed: dict[str, str]) -> None:
        old = measured(engine_version="0.11", isa="avx512", threads="2")
        assert refusal(old, measured(0.06, **changed)) is None

    def test_what_nobody_says_hinders_nothing(self) -> None:
        unknown = ExecutionPath("gpu", line(8, 0.06))
        assert refusal(measured(), unknown) is None
        assert refusal(unknown, measured()) is None

    def test_everything_replaces_nominal_numbers(self) -> None:
        assert refusal(NOMINAL, measured()) is None
        assert refusal(NOMINAL, nominal_path("gpu", parse_nominal("p50=3ms"))) is None


class TestProfile:
    def test_force_replaces(self) -> None:
        profile = HardwareProfile({"gpu": measured()})
        with pytest.raises(WrongUsage, match="another system"):
            profile.with_path(measured(hardware="A100"))
        assert profile.with_path(measured(hardware="A100"), force=True).paths["gpu"].fit.provenance["identity"][
            "hardware"
        ] == ("A100")

    def test_the_ceiling_and_price_of_another_machine_go(self) -> None:
        known = replace(measured(), ceiling=Ceiling(flops=1e15), price_per_hour=2.0)
        profile = HardwareProfile({"gpu": known})
        same = profile.with_path(measured(0.06)).paths["gpu"]
        other = profile.with_path(measured(hardware="A100"), force=True).paths["gpu"]
        assert (same.ceiling.flops, same.price_per_hour) == (1e15, 2.0)
        assert (other.ceiling.flops, other.price_per_hour) == (None, None)

    def test_of_several_those_that_may_are_entered(self, tmp_path: Path) -> None:
        target = tmp_path / "hardware.json"
        add_path(target, measured())
        entered = add_path(target, measured(model="other"), replace(NOMINAL, name="amx"))
        assert list(entered.refused) == ["gpu"]
        assert list(HardwareProfile.read(target).paths) == ["gpu", "amx"]
        assert HardwareProfile.read(target).paths["gpu"].fit.provenance["identity"]["model"] == "llama-3.1-8b"
        entered = add_path(target, measured(0.07))
        assert entered.replaced == ("Path gpu: replaces the measurement of 2026-11-01 (linear, 6 % error).",)


class TestLibrary:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        target = tmp_path / "hardware.json"
        Hardware({"gpu": fitted()}).save(target)
        return target

    def test_more_known_of_a_path_that_was_measured_again(self, file: Path) -> None:
        mine = Hardware(file).add("gpu", price=2.5)
        Hardware(file).add("gpu", fitted(0.07)).save(file)
        mine.save(file)
        path = HardwareProfile.read(file).paths["gpu"]
        assert path.price_per_hour == 2.5
        assert path.fit.parameters["tau_B"].value == 0.07

    def test_only_force_replaces_a_measurement(self, file: Path) -> None:
        machine = Hardware(file)
        with pytest.raises(WrongUsage, match="nominal numbers do not replace it"):
            machine.add("gpu", nominal="p50=2ms")
        with pytest.raises(WrongUsage, match="another system"):
            machine.add("gpu", fitted(model="other"))
        forced = machine.add("gpu", nominal="p50=2ms", force=True)
        assert forced.replaced == ("Path gpu: replaces the measurement of 2026-11-01 (linear, 6 % error).",)
        forced.save(file)
        assert HardwareProfile.read(file).paths["gpu"].nominal is not None


def by_library(file: Path, n: int) -> None:
    for i in range(n):
        Hardware(file).add(f"library{i}", nominal="p50=2ms").save(file)


def by_command(file: Path, n: int) -> None:
    for i in range(n):
        assert run(["hardware", "add", f"command{i}", "--nominal", "p50=2ms", "--hardware", str(file)]) == 0


def by_fits(file: Path, n: int) -> None:
    for i in range(n):
        add_path(file, replace(measured(), name=f"fit{i}"))


def test_processes_at_once_lose_no_path(tmp_path: Path) -> None:
    file, n = tmp_path / "hardware.json", 8
    Hardware({"first": "p50=2ms"}).save(file)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=each, args=(file, n)) for each in (by_library, by_command, by_fits)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    expected = {"first"} | {f"{name}{i}" for name in ("library", "command", "fit") for i in range(n)}
    assert set(HardwareProfile.read(file).paths) == expected


@pytest.mark.parametrize(
    ("entry", "place", "found"),
    [
        ({"nominal": "p50"}, "path 'gpu', nominal", "cannot be read"),
        ({"nominal": "p50=2ms", "price_per_hour": "two"}, "path 'gpu'", "price_per_hour: Expected"),
        ({"fit": {"schema": "latfit.fit/1", "model": "other"}}, "path 'gpu', fit", "'other' is not known"),
        (7, "", "not a mapping"),
    ],
)
def test_the_error_of_a_damaged_profile_says_where(entry: object, place: str, found: str) -> None:
    with pytest.raises(BadInput, match=found) as error:
        HardwareProfile.from_json({"schema": "latfit.hardware/1", "paths": {"gpu": entry}}, "h.json")
    assert error.value.where == ", ".join(filter(None, ("h.json", place)))


def test_a_fit_file_says_what_it_is_of(tmp_path: Path) -> None:
    fitted().write(tmp_path / "a.fit.json")
    fitted(hardware="A100").write(tmp_path / "b.fit.json")
    known = Hardware({"gpu": tmp_path / "a.fit.json"})
    with pytest.raises(WrongUsage, match="hardware NVIDIA H100, not A100"):
        known.add("gpu", tmp_path / "b.fit.json")


def test_an_engine_runs_on_the_gpu_or_on_the_only_path() -> None:
    amx = nominal_path("amx", parse_nominal("p50=2ms"))
    profile = HardwareProfile().with_path(amx)
    assert profile.engine_path is profile.paths["amx"]
    assert profile.with_path(NOMINAL).engine_path is not profile.paths["amx"]
    assert profile.with_path(nominal_path("cpu", parse_nominal("p50=3ms"))).engine_path is None


def test_a_machine_is_saved_twice(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    Hardware({"cpu": "p50=2ms", "gpu": "p50=1ms"}).save(file)
    left = Hardware(file).remove("gpu")
    left.save(file)
    left.save(file)
    assert list(Hardware(file).result.paths) == ["cpu"]
