"""Snapshots of a planted engine: its SLO by buckets, its capacity, servers that go away and come back."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import latfit
from latfit.api import block_of, watch_server
from tests.stand_in import live, one_after_another, serving, steady

STEPS = steady(60.0, 8, 0.018, waiting=12)


def test_the_slo_is_told_by_the_buckets_around_it() -> None:
    """Every first token after 18 ms, every further one too: the buckets end at 10, 20, 50 and at 10, 25, 50 ms."""
    texts = [STEPS.text(5.0), STEPS.text(9.0), STEPS.text(13.0)]
    with serving(one_after_another(texts)) as url:
        first, last = islice(watch_server(url, ttft="50ms", tpot="20ms", every="100ms"), 2)
    assert last.seen.finished == first.seen.finished * 2
    document = json.loads(json.dumps(last.to_json()))
    assert document["slo"]["ttft"] == {"limit_ms": 50.0, "share_low": 1.0, "share_high": 1.0}
    assert (document["slo"]["tpot"]["share_low"], document["slo"]["tpot"]["share_high"]) == (0.0, 1.0)
    assert document["p99_ms"]["ttft"] == [10.0, 20.0]
    assert last.state == "doubt"
    assert "within 20 ms: 0 % to 100 %" in last.summary()
    assert "unknown without a fit" in last.summary()


def test_a_server_that_goes_away_and_starts_again() -> None:
    texts = [STEPS.text(5.0), STEPS.text(6.0), "", STEPS.text(1.0), STEPS.text(2.0)]
    with serving(one_after_another(texts)) as url:
        before, away, again = islice(watch_server(url, every="100ms"), 3)
    assert before.problem == ""
    assert "answers 503" in away.verdict
    assert away.state == "bad"
    assert again.problem == ""
    assert again.seen.first.counters["generation_tokens"] < before.seen.first.counters["generation_tokens"]


def test_the_capacity_under_the_slo(tmp_path: Path) -> None:
    """T = 16 + B / 4 ms: at 30 ms a token 56 requests of 20 tokens run, 56 / (20 x 30 ms) = 93 a second at most."""
    B = np.tile(np.arange(1, 65), 8)
    noise = np.random.default_rng(2).lognormal(0, 0.01, len(B))
    fit = latfit.fit(
        pd.DataFrame({"B": B, "S": B + (B % 5 == 0) * 100, "T_ms": (16.0 + B / 4) * noise}), model="linear"
    )
    fit.save(tmp_path / "p.fit.json")
    with serving(live(steady(600.0, 8, 0.018))) as url:
        fitted: dict[str, Any] = {"fit": tmp_path / "p.fit.json", "max_num_seqs": 64}
        found = block_of(watch_server(url, ttft="2s", tpot="30ms", window="2s", **fitted), 3.5)
    assert 60 < found.capacity_per_s < 105  # steps times the factor that makes the even load's TPOT
    assert "of such requests within the SLO" in found.summary()
