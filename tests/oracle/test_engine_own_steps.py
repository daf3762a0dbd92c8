"""A simulation with an engine's own recorded steps gives back what the engine did.

The engine is written out here: requests join between two steps, a step computes all prompts that came and a token of
each other request, and takes a time that is known. Its record is fitted and its arrivals are simulated. Near its
capacity small errors of steps become large ones of what requests see, so that a cost of a step that is counted twice
shows: steps that an engine padded to a larger batch were slower when they were measured, and are not padded again.
Where the host works between two steps, a step's tokens are out before its period has passed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest

from latfit.api import engine_settings_of, validate
from latfit.errors import WrongUsage
from latfit.simulation import EngineSettings
from latfit.stats import FloatArray
from latfit.trace import Trace

RECORD: dict[str, Any] = {
    "run_started": "2026-11-23T12:00:00+00:00",
    "vllm": "0.32.0",
    "async_scheduling": False,
    "block_size": 16,
    "kv_capacity_tokens": 160_000,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
}
NOISE = 0.05


@dataclass(frozen=True)
class Served:
    """Steps as a recorder has them, and requests with their arrivals, first and last tokens in ms."""

    steps: Trace
    requests: pd.DataFrame

    @property
    def tpot_ms(self) -> FloatArray:
        more = self.requests["output_tokens"].to_numpy() - 1
        return np.asarray((self.requests["latency_ms"] - self.requests["ttft_ms"]).to_numpy() / more)


def served(
    rate_per_s: float,
    requests: int,
    captured: tuple[int, ...] = (),
    host_ms: float = 0.0,
    slower: tuple[float, float] = (1.0, 1.0),
) -> Served:
    """captured: batches that steps of decoding are padded to.  host_ms: from a computed step to the next one, three
    times as long behind steps that prefill; its tokens are out in the middle of that.  slower: steps of decoding and
    others take so many times as long."""
    rng = np.random.default_rng(5)
    arrival = np.cumsum(rng.exponential(1e3 / rate_per_s, requests))
    prompt, output = rng.integers(60, 181, requests), rng.integers(15, 46, requests)
    first, last = np.zeros(requests), np.zeros(requests)
    running: list[tuple[int, int]] = []
    rows, came, now = [], 0, 0.0
    while came < requests or running:
        if not running:
            now = max(now, arrival[came])
        new = np.arange(came, came + int(np.sum(arrival[came:] <= now)))
        came += len(new)
        P, decoding = int(prompt[new].sum()), len(running)
        computed = next((size for size in captured if size >= decoding), decoding) if not len(new) else decoding
        cost = (10.0 + 0.18 * P if len(new) else 8.0) + 0.6 * (computed + len(new))
        T = slower[len(new) > 0] * cost * rng.lognormal(-(NOISE**2) / 2, NOISE)
        cached = sum(prompt[r] + made for r, made in running)
        start = now
        gap = (3.0 if len(new) else 1.0) * host_ms * rng.uniform(0.8, 1.2)
        out = now + T + gap / 2
        first[new] = out
        running = [(r, made + 1) for r, made in [*running, *((int(r), 0) for r in new)]]
        last[[r for r, made in running if made == output[r]]] = out
        rows.append((start / 1e3, T, decoding + len(new), decoding + P, len(new), P, cached, T + gap))
        now += T + gap
        running = [(r, made) for r, made in running if made < output[r]]
    names = ("t_s", "T_ms", "B", "S", "prefill_requests", "prefill_tokens", "context_tokens", "period_ms")
    columns = {name: np.array(column, dtype=float) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    trace = Trace({**columns, "step": np.arange(float(len(rows)))}, RECORD)
    told = {"t_s": arrival / 1e3, "prompt_tokens": prompt, "output_tokens": output}
    return Served(trace, pd.DataFrame({**told, "ttft_ms": first - arrival, "latency_ms": last - arrival}))


@pytest.mark.parametrize(
    ("captured", "host_ms"),
    [
        pytest.param((), 0.0, id="as they are", marks=pytest.mark.nightly),
        pytest.param((1, 2, 4, 8, 16, 24, 32, 40), 0.0, id="padded", marks=pytest.mark.nightly),
        pytest.param((), 2.0, id="host time"),
    ],
)
def test_own_steps_give_back_what_the_engine_did(captured: tuple[int, ...], host_ms: float) -> None:
    run = served(8.5 if host_ms == 0 else 6.5, 600, captured, host_ms)
    found = validate(run.steps, run.requests, seed=1).result.run
    more = run.requests["output_tokens"].to_numpy() - 1
    tpot = (found.last_ms - found.first_ms) / more
    assert tpot.mean() == pytest.approx(run.tpot_ms.mean(), rel=0.02)
    assert (found.last_ms - found.requests.arrival_ms).mean() == pytest.approx(run.requests.latency_ms.mean(), rel=0.02)
    assert (found.first_ms - found.requests.arrival_ms).mean() == pytest.approx(run.requests.ttft_ms.mean(), rel=0.02)


def test_own_steps_tell_the_machine_s_speed_apart() -> None:
    """An hour later the engine decodes 12 % slower: the recorded steps say so, and with that the same costs give
    back what it did."""
    slower = (1.12, 1.0)
    then, now = served(7.0, 1000), served(6.0, 1000, slower=slower)
    found = validate(then.steps, now.requests, run_steps=now.steps, seed=1)
    assert found.run_speed is not None
    for each, truth in zip(found.run_speed.speeds, slower, strict=True):
        assert each.steps > 900
        assert abs(each.factor - truth) < 4 * each.error + 0.003
        assert 0 < each.error < 0.01
    off = found.run_speed.at_speed.mean_errors
    assert all(abs(off[name]) < 2 for name in ("ttft_ms", "tpot_ms", "latency_ms"))
    without = found.result.mean_errors
    assert without["tpot_ms"] < -8
    assert "decode steps +12 % (±" in found.verdict
    assert "During the run steps took" in found.verdict


def test_calibrated_costs_have_a_speed_of_their_own() -> None:
    run = served(6.0, 100)
    with pytest.raises(WrongUsage, match="contradict"):
        validate(run.steps, run.requests, run_steps=run.steps, calibrate=True)


@pytest.mark.parametrize(
    ("provenance", "padded"),
    [
        (RECORD, False),
        ({"format": "vllm", "device_type": "cuda"}, False),
        ({"format": "trtllm"}, False),
        ({"parts": {"a": RECORD, "b": RECORD}}, False),
        ({"made_by": "latfit profile", "device": {"device": "numpy"}}, False),
        ({"made_by": "latfit profile", "device": {"device": "torch-cuda"}}, True),
        ({"format": "llmservingsim", "host_time": "none"}, True),
        ({}, True),
    ],
)
def test_batches_are_padded_where_no_engine_made_the_steps(provenance: dict[str, Any], padded: bool) -> None:
    trace = Trace({name: np.ones(3) for name in ("B", "S", "T_ms")}, provenance)
    settings: EngineSettings = engine_settings_of(trace, kv_blocks=100).settings
    assert settings.padded_graphs is padded
