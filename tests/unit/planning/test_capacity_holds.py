"""The capacity of a plan is kept by a plan at that rate, and not by one of 5 % more, on steps that were measured."""

import re
from pathlib import Path

import pytest

from latfit.fitting.fit import fit_trace
from latfit.hardware.nominal import parse_nominal
from latfit.hardware.profile import ExecutionPath, HardwareProfile, nominal_path
from latfit.planning.plan import make_plan
from latfit.planning.request import PlanOptions
from latfit.planning.result import Capacity
from latfit.planning.wording import capacity_line
from latfit.trace.read import ingest
from latfit.units import parse_rate_per_ms
from tests.conftest import ROOT

SAMPLE = ROOT / "sample_traces" / "cpu_numpy_tiny.parquet"


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    gpu = nominal_path("gpu", parse_nominal("launch=12ms,slope=0.05ms"))
    return HardwareProfile({"cpu": ExecutionPath("cpu", fit_trace(ingest(Path(SAMPLE)).trace)), "gpu": gpu})


@pytest.mark.nightly
def test_on_the_sample_profile(profile: HardwareProfile) -> None:
    found = make_plan(profile, 20.0, request=PlanOptions(rate=2.0)).capacity
    assert isinstance(found, Capacity)
    printed = re.search(r"Capacity ([\d,.]+) req/s", capacity_line(found))
    assert printed is not None
    highest = parse_rate_per_ms(f"{printed[1].replace(',', '')}/s", option="--rate")
    at, above = (make_plan(profile, 20.0, request=PlanOptions(rate=factor * highest)) for factor in (1.0, 1.05))
    assert at.feasible
    assert isinstance(at.capacity, Capacity)
    assert at.capacity.replicas == 1
    assert not above.feasible
    assert isinstance(above.capacity, Capacity)
    assert above.capacity.replicas == 2
    assert "--replicas 2" in above.remedy
