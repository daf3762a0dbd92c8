"""Paths of the simulator from fits and from quotes: typical times, scatter, and which path plays which part."""

import math

import numpy as np
import pytest
from msgspec import structs

from latfit.errors import BadInput, WrongUsage
from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import ExecutionPath, HardwareProfile, nominal_path as named_path
from latfit.model.fit_parts import Estimate
from latfit.model.fit_result import FitResult, FitStatus
from latfit.model.registry import FAMILY
from latfit.model.step_noise import noise_of
from latfit.simulation.policies.service import ServicePath, Serving, linear_path, system_of
from tests.conftest import REFERENCE

RATIOS = noise_of(np.array([0.9, 1.0, 1.2, 2.0]), np.array([30.0, 50.0, 19.0, 1.0]))


def fit_of(largest: int = 64) -> FitResult:
    structure = FAMILY["saturation"]
    return FitResult(
        "saturation",
        FitStatus.CONVERGED,
        {
            p.name: Estimate(v, None, None, None, "")
            for p, v in zip(structure.parameters, REFERENCE.tolist(), strict=True)
        },
        intervals={"ratios": RATIOS.to_json()},
        domain={"B": [1, largest], "S": [1, 4096]},
    )


def profile(*names: str) -> HardwareProfile:
    return HardwareProfile({name: ExecutionPath(name, fit_of()) for name in names})


def nominal(name: str, numbers: str, serving: Serving = Serving()) -> ServicePath:
    """The path of a machine that has no other."""
    return system_of(HardwareProfile({name: named_path(name, parse_nominal(numbers))}), serving).main


class TestParts:
    def test_the_gpu_is_the_main_path(self) -> None:
        for names in (("cpu", "gpu"), ("gpu", "amx"), ("amx", "cpu", "gpu")):
            system = system_of(profile(*names))
            assert system.main.name == "gpu"
            assert system.side is not None
            assert system.side.name == ("amx" if "amx" in names else "cpu")

    def test_one_path_alone(self) -> None:
        system = system_of(profile("cpu"))
        assert (system.main.name, system.side) == ("cpu", None)

    def test_servers_and_buckets(self) -> None:
        system = system_of(profile("gpu", "cpu"), Serving(servers={"cpu": 3}, buckets=[4, 8]))
        assert system.main.largest == 8
        assert system.main.typical_ms[1] == system.main.typical_ms[4]
        assert system.side is not None
        assert system.side.servers == 3


class TestTimes:
    def test_typical_times_are_the_fits(self) -> None:
        """T(8, 8) = 15.9640 is published for these parameters."""
        system = system_of(profile("gpu"))
        assert system.main.typical_ms[8] == pytest.approx(15.9640, abs=1e-4)
        assert system.main.largest == 64

    def test_times_scatter_as_measured(self) -> None:
        main = system_of(profile("gpu")).main
        assert main.noise is not None
        assert main.noise.pooled.values == pytest.approx(RATIOS.pooled.values, rel=1e-7)
        assert main.mean_ms[1] / main.typical_ms[1] == pytest.approx(0.3 * 0.9 + 0.5 + 0.19 * 1.2 + 0.01 * 2.0)
        assert system_of(profile("gpu"), Serving(service="deterministic")).main.noise is None

    def test_a_fit_without_ratios_does_not_scatter(self) -> None:
        bare = HardwareProfile({"gpu": ExecutionPath("gpu", structs.replace(fit_of(), intervals={}))})
        assert system_of(bare).main.noise is None

    @pytest.mark.parametrize(("tokens", "most", "factor"), [(1, 0, 1.05), (64, 0, 3.0), (1, 64, 3.0)])
    def test_scatter_is_that_of_the_phase(self, tokens: float, most: float, factor: float) -> None:
        """Steps of decode alone scatter by 5 %, those with prefill threefold; all of them together by 100 %."""
        laws = {phase: noise_of(np.array([1.0, f]), np.ones(2)) for phase, f in (("decode", 1.05), ("prefill", 3.0))}
        limits = {phase: {"ratios": law.to_json()} for phase, law in laws.items()}
        fit = structs.replace(fit_of(), intervals={**fit_of().intervals, "by_phase": limits})
        known = HardwareProfile({"gpu": ExecutionPath("gpu", fit)})
        main = system_of(known, Serving(tokens_per_request=tokens, most_tokens=most)).main
        assert main.noise is not None
        assert main.noise.pooled.values.max() == pytest.approx(factor)


class TestNominal:
    def test_a_median_is_that_of_an_exponential_service(self) -> None:
        """Median 2 ms: mean 2/ln 2, one at a time; only where every service is to take the same time, 2 ms."""
        path = nominal("amx", "p50=2ms")
        assert (path.largest, path.exponential, path.nominal) == (1, True, True)
        assert path.typical_ms[1] == pytest.approx(2 / math.log(2))
        plain = nominal("amx", "p50=2ms", Serving(service="deterministic"))
        assert (plain.typical_ms[1], plain.exponential) == (2, False)

    def test_tokens_count_as_the_requests_have_them(self) -> None:
        numbers = "launch=8ms,slope=0.05ms,per_token=1us,max_batch=32"
        path = nominal("gpu", numbers, Serving(tokens_per_request=500))
        assert (path.name, path.largest, path.nominal) == ("gpu", 32, True)
        assert path.typical_ms[[1, 32]] == pytest.approx([8.55, 8 + 32 * 0.55])


class TestRefused:
    def test_no_path(self) -> None:
        with pytest.raises(BadInput, match="no execution path"):
            system_of(HardwareProfile())

    def test_a_fit_that_is_none(self) -> None:
        broken = HardwareProfile(
            {"gpu": ExecutionPath("gpu", structs.replace(fit_of(), status=FitStatus.TOO_FEW_ROWS))}
        )
        with pytest.raises(BadInput, match="not usable"):
            system_of(broken)

    @pytest.mark.parametrize(
        "serving", [{"service": "weibull"}, {"tokens_per_request": 0.5}, {"servers": {"tpu": 2}}, {"buckets": [1, 999]}]
    )
    def test_serving(self, serving: dict[str, object]) -> None:
        with pytest.raises(WrongUsage):
            system_of(profile("gpu"), Serving(**serving))  # type: ignore[arg-type]

    def test_a_time_that_is_no_number(self) -> None:
        with pytest.raises(WrongUsage, match="not above zero"):
            linear_path("gpu", math.nan, 0.05, 8)
