"""A running engine examined, with settings moved on a planted fit; and what this machine lacks, by planted packages."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import latfit
from latfit.api import examine_server
from latfit.errors import WrongUsage
from tests.stand_in import Served, live, served, serving, steady


@pytest.fixture(scope="module")
def fit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T = 10 + B ms for a step that decodes, 0.02 ms a prompt's token besides."""
    rng = np.random.default_rng(1)
    B = rng.integers(1, 65, 600)
    prompts = np.where(rng.random(600) < 0.3, rng.integers(50, 1500, 600), 0)
    T = (10.0 + B + 0.02 * prompts) * rng.lognormal(0, 0.01, 600)
    table = pd.DataFrame({"B": B, "S": B + prompts, "T_ms": T})
    fit = latfit.fit(table, model="linear")
    target = tmp_path_factory.mktemp("fit") / "planted.fit.json"
    fit.save(target)
    return target


def planted(most: int, rate: float = 24.0, seconds: float = 60.0, slower: float = 1.0, seed: int = 3) -> Served:
    """Requests of about 100 + 20 tokens, as they come, through an engine of the planted step times."""
    rng = np.random.default_rng(seed)
    n = int(rate * seconds)
    arrival = np.cumsum(rng.exponential(1 / rate, n))
    prompt, output = rng.integers(50, 151, n), rng.integers(10, 31, n)

    def seconds_of(B: int, S: int) -> float:
        return slower * (10.0 + B + 0.02 * (S - B)) / 1e3

    return served(arrival, prompt, output, seconds_of, most)


def p99_ttft_ms(run: Served) -> float:
    return 1e3 * float(np.quantile((run.first - run.arrival)[len(run.first) // 5 :], 0.99))


def test_advice_of_this_engine_covers_what_follows_it(fit_file: Path) -> None:
    """An engine of 8 sequences past its capacity, read for two seconds; then the same load with 16."""
    with serving(live(planted(8))) as url:
        found = examine_server(url, fit=fit_file, duration="3s", synchronous=True)
    assert found.diagnosis.binding == "sequences"
    what_if = found.what_if
    assert what_if is not None
    assert what_if.believed, what_if.refusal
    assert what_if.engine.settings.max_num_seqs == 8
    assert what_if.engine.settings.kv_blocks == 1000
    assert what_if.factor == pytest.approx(1.0, abs=0.03)
    assert what_if.speed is not None
    assert not what_if.speed.has_changed
    double, half = (each for each in what_if.changes if each.setting == "max_num_seqs")
    assert (double.value, half.value) == (16, 4)
    low, high = double.range("ttft_p99_ms")
    followed = [p99_ttft_ms(planted(16, seed=seed)) for seed in range(5)]
    assert low <= np.median(followed) <= high
    assert half.median("tokens_per_s") < what_if.now.median("tokens_per_s")
    (cache,) = (each for each in what_if.changes if each.setting == "kv_blocks")
    assert cache.effect(what_if.now) == "nothing"
    assert any(line.strip().startswith("max_num_seqs 8 -> 16") for line in found.lines)
    document = json.loads(json.dumps(found.to_json()))["simulated"]
    assert document["believed"]
    assert [each["metric"] for each in document["checks"]] == ["running", "waiting", "TTFT", "queue", "TPOT"]


def test_a_limit_that_the_server_disproves_is_refused(fit_file: Path) -> None:
    """The same engine, told that it has 64 sequences: nobody would wait."""
    with serving(live(planted(8))) as url:
        found = examine_server(url, fit=fit_file, duration="3s", max_num_seqs=64, synchronous=True)
        with pytest.raises(WrongUsage, match=r"[78] requests ran at once"):
            examine_server(url, fit=fit_file, duration="1s", max_num_seqs=6)
    assert found.what_if is not None
    assert "TTFT" in {each.metric for each in found.what_if.checks if not each.agrees}
    (refusal,) = (line for line in found.lines if line.startswith("No advice by the fit"))
    assert "check --max-num-seqs" in refusal
    assert found.to_json()["simulated"]["changes"] == []


def test_a_slower_machine_is_an_answer_of_its_own(fit_file: Path) -> None:
    with serving(live(planted(8, rate=12.0, slower=1.5))) as url:
        found = examine_server(url, fit=fit_file, duration="3s", synchronous=True, max_num_seqs=8)
        at_speed = examine_server(
            url, fit=fit_file, duration="3s", synchronous=True, max_num_seqs=8, at_measured_speed=True
        )
    for each in (found, at_speed):
        assert each.what_if is not None
        # gaps between tokens weight steps by their batch, which varies within a second
        assert each.what_if.factor == pytest.approx(1.5, rel=0.06)
        assert any(line.startswith("Steps take 1.5") for line in each.lines)
    assert "--at-measured-speed" in found.summary()
    assert found.what_if is not None
    assert not found.what_if.believed
    assert at_speed.what_if is not None
    assert at_speed.what_if.believed, at_speed.what_if.refusal


def test_capacity_is_where_the_limits_are_just_met(fit_file: Path) -> None:
    """Requests of 20 tokens at 10 + B ms: with 50 ms a token at most 39 run, 39 / (49 ms x 20) = 40 requests/s."""
    with serving(live(planted(64, rate=15.0))) as url:
        found = examine_server(
            url, fit=fit_file, duration="3s", max_num_seqs=64, ttft="2s", tpot="50ms", synchronous=True
        )
    what_if = found.what_if
    assert what_if is not None
    assert 20 < what_if.capacity_per_s() < 41 / what_if.factor
    assert what_if.now.median("meets") == pytest.approx(1.0, abs=0.01)


def test_without_a_fit_only_what_counters_prove(fit_file: Path) -> None:
    with serving(live(steady(60.0, 5, 0.015))) as url:
        found = examine_server(url, duration="1s")
    assert "is not held back by any limit; 5" in found.verdict
    assert found.verdict.endswith("requests at once at 15 ms TPOT.")
    assert "--fit FIT" in found.lines[-1]
    assert found.to_json()["simulated"] is None
    assert found.state == "good"
    assert found.summary().startswith(found.verdict)
