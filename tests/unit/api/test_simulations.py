"""Simulations and validations of the library: what the commands print, from paths, tables and numbers alike."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import latfit
from latfit.api.simulations import SETTINGS
from latfit.cli.app import run
from latfit.errors import BadInput, WrongUsage
from latfit.files import dumps
from latfit.model import Estimate, FitResult, FitStatus
from latfit.policies import Settings
from latfit.simulation import EngineSettings, linear_costs, serve
from latfit.workload import make_requests

Captured = pytest.CaptureFixture[str]

NOMINAL = {"gpu": "8ms+0.05ms*256", "amx": "exp:2ms"}
PATHS = ["--nominal", "gpu=8ms+0.05ms*256", "--nominal", "amx=exp:2ms"]
SMALL: dict[str, Any] = {"requests": 3000, "replications": 2}
AS_TYPED = ["--requests", "3000", "--replications", "2", "--json"]


def printed(capsys: Captured, *arguments: str) -> Any:
    assert run([*arguments]) == 0
    return json.loads(capsys.readouterr().out)


def same(document: Any, printed: Any) -> bool:
    """As JSON, to the last bit: NaN is null there."""
    return bool(json.loads(dumps(document)) == printed)


@pytest.fixture
def fit(in_tmp: Path) -> Path:
    """T = 8 + 0.05 B + 0.02 S."""
    values = {"tau_0": 8.0, "tau_B": 0.05, "tau_S": 0.02}
    parameters = {name: Estimate(value, None, None, None, "ms") for name, value in values.items()}
    measured = {"B": [1, 4096], "S": [1, 65536]}
    FitResult("linear", FitStatus.CONVERGED, parameters, domain=measured).write(in_tmp / "a.fit.json")
    return in_tmp / "a.fit.json"


def measured() -> pd.DataFrame:
    """A run of an engine that costs exactly what the fit says."""
    rng = np.random.default_rng(0)
    arrival_ms = np.sort(rng.uniform(0, 10_000, 60))
    requests = make_requests(arrival_ms, rng.integers(10, 300, 60), rng.integers(2, 90, 60))
    made = serve(requests, linear_costs(8.0, 0.05, 0.02), EngineSettings(kv_blocks=400))
    columns = (requests.prompt_tokens, requests.output_tokens, made.first_ms / 1e3, made.last_ms / 1e3)
    names = ("prompt_tokens", "output_tokens", "first_token_s", "last_token_s")
    return pd.DataFrame({"t_s": arrival_ms / 1e3, **dict(zip(names, columns, strict=True))})


class TestPolicies:
    def test_says_what_the_command_says(self, in_tmp: Path, capsys: Captured) -> None:
        names = ["--policy", "three-stage", "--policy", "fixed", "--batch", "4"]
        load = ["--rate", "500/s", "--arrival-process", "gamma:2", "--class", "chat:0.3:50ms", "--class", "batch:0.7"]
        told = printed(capsys, "simulate", "policies", *names, *load, "--sla", "20ms", *PATHS, *AS_TYPED)
        found = latfit.simulate(
            NOMINAL,
            rate_per_s=500,
            policy=["three-stage", "fixed"],
            settings={"batch": 4},
            arrival_process="gamma:2",
            classes=["chat:0.3:50ms", "batch:0.7"],
            sla_ms=20,
            **SMALL,
        )
        assert same(found.to_json(), told)

    def test_frame_summary_and_figure(self) -> None:
        found = latfit.simulate(NOMINAL, "500/s", ["three-stage", "gpu-only"], **SMALL)
        frame = found.frame
        assert frame["policy"].tolist() == ["three-stage", "gpu-only"]
        assert {"rate_per_s", "p99_ms", "p99_low_ms", "share_amx", "stable"} <= set(frame.columns)
        assert frame["p99_ms"].tolist() == [each.latency["p99"].value for each in found.runs]
        assert found.verdict.startswith("three-stage")
        assert found.summary().startswith(found.verdict)
        assert len(repr(found)) < 300
        assert len(repr(found.runs[0])) < 200
        assert ">gpu-only</" in found._repr_html_()
        assert isinstance(found.plot(), Figure)

    def test_the_best_is_told_with_its_interval(self) -> None:
        """Greedy batches beat a fixed batch of 8 at 200/s: T(1) = 8.05 ms against a wait for eight arrivals, 40 ms."""
        many: dict[str, Any] = {"requests": 120_000, "replications": 2}
        found = latfit.simulate({"gpu": "8ms+0.05ms*16"}, "200/s", ["fixed", "gpu-only"], settings={"batch": 8}, **many)
        assert found.verdict.startswith("gpu-only is best: p99 ")
        assert "below fixed." in found.verdict
        assert found.state == "good"

    def test_settings_are_those_of_policies(self) -> None:
        assert set(SETTINGS.values()) == set(vars(Settings()))

    def test_a_table_without_requests(self) -> None:
        with pytest.raises(BadInput, match="no columns of request arrivals"):
            latfit.simulate(NOMINAL, arrivals=pd.DataFrame({"x": [1, 2]}))


class TestEngines:
    def test_says_what_the_command_says(self, fit: Path, capsys: Captured) -> None:
        engine = ["--fit", "a.fit.json", "--kv-blocks", "400", "--batching", "chunked-prefill", "--engine", "static"]
        load = ["--rate", "5/s", "--lengths", "64:32", "--ttft-slo", "1s", "--replicas", "2"]
        apart = ["--synchronous", "--set", "prefix_hit_rate=0.5"]
        few = ["--requests", "200", "--replications", "2", "--json"]
        told = printed(capsys, "simulate", "engine", *engine, *load, *apart, *few)
        found = latfit.simulate_engine(
            latfit.Fit.load(fit),
            "5/s",
            "64:32",
            kv_blocks=400,
            batching=["chunked-prefill", "static"],
            engine={"synchronous": True, "prefix_hit_rate": 0.5, "kv_blocks": 7},  # what is named precedes it
            ttft="1s",
            replicas=2,
            requests=200,
            replications=2,
        )
        assert same(found.to_json(), told)
        assert found.frame["engine"].tolist() == ["chunked-prefill", "static"]
        assert {"ttft_p99_ms", "latency_p50_ms", "throughput_per_s"} <= set(found.frame.columns)
        assert found.verdict.startswith("Stable at 5 req/s")
        assert len(repr(found.runs[0])) < 200

    def test_the_mapping_of_settings_holds_settings_alone(self, fit: Path) -> None:
        with pytest.raises(WrongUsage, match=r"^engine: 'seed' is no setting"):
            latfit.simulate_engine(fit, "5/s", "64:32", engine={"seed": 3})


class TestValidation:
    def test_a_run_in_a_table_agrees_with_itself(self, fit: Path) -> None:
        found = latfit.validate(fit, measured(), kv_blocks=400)
        assert (found.agrees, found.state) == (True, "good")
        judged = found.frame[found.frame["limit_pct"].notna()]
        assert judged["error_pct"].abs().max() == pytest.approx(0, abs=0.1)
        assert found.summary().startswith("Simulation agrees")
        assert isinstance(found.plot(), Figure)


def test_a_swept_rate_without_a_unit_names_the_parameter(fit: Path) -> None:
    with pytest.raises(WrongUsage, match=r"^vary: '5' "):
        latfit.simulate_engine(fit, lengths="64:32", vary={"rate": ["5"]})


def test_a_profile_is_steps_to_fit(in_tmp: Path) -> None:
    found = latfit.profile(
        budget="20s", device="numpy", layers=1, grid="B=1,2;S=2,8", context="16", precision=0.5, threads=1, processes=1
    )
    assert len(found.frame) == len(found.trace) == found.to_json()["rows"]
    assert found.to_json()["out"] is None
    assert list(in_tmp.iterdir()) == []
    assert latfit.fit(found, model="constant").result.metrics.n
