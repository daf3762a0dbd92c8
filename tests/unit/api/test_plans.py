"""`latfit.plan`, `latfit.step_budget`, `latfit.report`: the library says what the commands say, in the same units."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from msgspec import structs

from latfit.api import Fit, Hardware, plan, step_budget
from latfit.cli.app import run
from latfit.errors import BadInput, FitNotUsable, WrongUsage
from latfit.planning import within_measured
from latfit.simulation import EngineSettings, EngineSetup
from latfit.workload import RecordedLoad, make_requests
from tests.unit.planning.test_plan import line

SMALL = {"B": [1, 64], "S": [1, 64]}
CPU = Fit(line(0, 2, domain=SMALL), "cpu")
GPU = "launch=12ms,slope=0.05ms,max_batch=64,max_tokens=64"


def test_what_a_plan_holds() -> None:
    made = plan({"cpu": CPU, "gpu": GPU}, "20ms")
    assert made.B1 == 7  # 12 + 0.05 B <= 2 B from 6.15 on
    assert made.T_cut_ms is None
    assert made.capacity_per_s is None
    limits = made.limits.set_index(["path", "B"])
    assert limits.loc[("cpu", 8), "S_min"] == 8
    assert pd.isna(limits.loc[("cpu", 8), "S_max"])  # its latency does not depend on tokens

    vllm = made.settings.query("engine == 'vllm' and setting == 'max_num_seqs'")
    assert vllm["value"].tolist() == [10]  # of the CPU, 2 B <= 20: the GPU's nominal numbers price no token
    assert made.strategies.empty


def test_arrivals_as_a_table() -> None:
    table = pd.DataFrame({"t_s": [0.0, 60.0, 120.0], "rate_per_s": [50.0, 100.0, 20.0]})
    made = plan({"amx": "exp:2ms"}, "20ms", arrivals=table, laws_only=True)
    assert made.result.rate_per_s == pytest.approx(100.0)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"sla": 20}, "has no unit"),
            ({"sla": "20"}, "with its unit"),
            ({"sla": "20ms", "sla_ms": 20}, "contradict"),
            ({"sla": "20ms", "rate": 500}, "has no unit"),
            ({"sla": "20ms", "rate": "5/s", "arrivals": "a.csv"}, "contradict"),
            ({"sla": "20ms", "wait": 3}, "has no unit"),
            ({"sla": "20ms", "rate": "5/s", "tokens_per_request": 0}, "0 is too small"),
            ({"sla": "20ms", "rate": "5/s", "seed": 1 << 70}, "is too large"),
            ({"sla": "20ms", "percentile": 0.99}, "is not a percentile"),
            ({"sla": "20ms", "percentile": "most"}, "is not a percentage"),
        ],
    )
    def test_says_what_to_write(self, options: dict[str, object], words: str) -> None:
        with pytest.raises(WrongUsage, match=words) as caught:
            plan({"gpu": GPU}, **options)  # type: ignore[arg-type]
        assert "--" not in str(caught.value)

    def test_no_machine(self, in_tmp: Path) -> None:
        with pytest.raises(BadInput, match="no such hardware profile"):
            plan("none.json", "20ms")
        with pytest.raises(WrongUsage, match="without a name"):
            plan(GPU, "20ms")
        with pytest.raises(WrongUsage, match="int is no machine"):
            plan(3, "20ms")
        with pytest.raises(BadInput, match="path gpu: float is neither"):
            plan({"gpu": 1.5}, "20ms")
        with pytest.raises(WrongUsage, match="path gpu"):
            plan({"gpu": "fast"}, "20ms")
        with pytest.raises(BadInput, match="no execution path"):
            plan({}, "20ms")


class TestStepBudget:
    def test_tokens_by_requests(self) -> None:
        """12 + 0.05 B + 0.01 S <= 13 leaves S = 100 - 5 B tokens."""
        budget = step_budget({"gpu": "launch=12ms,slope=0.05ms,per_token=0.01ms,max_batch=16"}, "13ms", B=[4, 8])
        assert budget.table["S_max"].tolist() == [80, 60]
        assert budget.trim(least=[1, 1], wanted=[1, 200]).tokens == (1, 89)
        assert len(repr(budget)) < 100


def test_paths_of_two_models_are_refused_and_never_mixed(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One service runs one model; devices may differ, an AMX path and a GPU do. force goes on."""

    def measured(model: str, hardware: str) -> Fit:
        identity = {"model": model, "hardware": hardware}
        return Fit(structs.replace(line(0, 2, domain=SMALL), provenance={"identity": identity}))

    two = {"cpu": measured("llama-7b", "AMD EPYC"), "gpu": measured("llama-70b", "H100")}
    with pytest.raises(FitNotUsable, match="model differs: path cpu is of llama-7b, path gpu of llama-70b"):
        plan(two, "20ms")
    assert plan(two, "20ms", force=True).feasible
    assert plan({"cpu": measured("llama-7b", "AMD EPYC"), "gpu": measured("meta/Llama-7B", "H100")}, "20ms").feasible
    Hardware(two).save()
    assert run(["plan", "--sla", "20ms"]) == 4
    assert "--force" in capsys.readouterr().err
    assert run(["simulate", "policies", "--rate", "10/s"]) == 4
    capsys.readouterr()
    assert run(["plan", "--sla", "20ms", "--force"]) == 4  # of the largest step, which was not measured
    assert "was not measured" in capsys.readouterr().err


def test_recorded_lengths_are_never_ignored() -> None:
    """A table of requests with lengths is no load of batches, unless somebody says what a request counts."""
    requests = {"t_s": [0.01 * i for i in range(300)], "prompt_tokens": [9] * 300, "output_tokens": [5] * 300}
    with pytest.raises(WrongUsage, match="has the lengths of its requests"):
        plan({"gpu": GPU}, "200ms", arrivals=pd.DataFrame(requests))
    assert plan({"gpu": GPU}, "200ms", arrivals=pd.DataFrame(requests), tokens_per_request=1, laws_only=True)
    moments = pd.DataFrame({"t_s": requests["t_s"]})
    assert plan({"gpu": GPU}, "200ms", arrivals=moments, laws_only=True)


@pytest.mark.parametrize("origin", ["assumed", "vLLM's default"])
def test_a_search_begins_within_the_measured_steps_unless_settings_were_named(origin: str) -> None:
    """Of steps of up to 24 requests and 295 tokens the largest powers of two are 16 and 256."""
    measured = [line(6, 0.3, domain={"B": [1, 24], "S": [1, 295]})]
    usual = EngineSetup(EngineSettings(), {"max_num_seqs": origin, "max_num_batched_tokens": origin})
    load = RecordedLoad(make_requests(np.arange(9.0), np.full(9, 300), np.full(9, 20)))
    start = within_measured(usual, load, measured)
    assert (start.max_num_seqs, start.max_num_batched_tokens) == (16, 256)
    named = EngineSetup(EngineSettings(), {"max_num_seqs": "given", "max_num_batched_tokens": "server.log"})
    assert within_measured(named, load, measured) == EngineSettings()
