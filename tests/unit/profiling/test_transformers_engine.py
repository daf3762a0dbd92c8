"""A real engine, step by step: what it says of its steps is consistent, and becomes a trace that can be fitted."""

from importlib.util import find_spec

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.profiling.devices.device import DeviceSettings
from latfit.profiling.devices.select import PathSpec
from latfit.profiling.engine_run import ANSWERS, PROMPTS, STEP_TOKENS, TransformersEngine, run_engine
from latfit.profiling.request import ProfileRequest
from latfit.profiling.run import measure
from latfit.profiling.shapes import ModelShape

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed (latfit[engine])"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed (latfit[torch])"),
    pytest.mark.filterwarnings("ignore"),  # transformers warns of its own future
]

SMALL = ModelShape("small", 64, 1, 4, 2, 16, 96, 128)


def test_steps_follow_the_tokens_of_a_request() -> None:
    """A prompt of 700 tokens comes in chunks of at most 512, then an answer token by token, each with one cached token
    more than the last."""
    engine = TransformersEngine(SMALL, DeviceSettings("fp32", threads=1), gpu=False)
    engine.add(700, 5, np.random.default_rng(0))
    seen = []
    while (step := engine.step()) is not None:
        seen.append(step)
    engine.close()
    chunks = [chunk for step in seen for chunk in step.prefill]
    assert sum(tokens for tokens, _ in chunks) == 700
    assert chunks[0] == (STEP_TOKENS, 0)
    assert chunks[1][1] == STEP_TOKENS
    cached = [context for step in seen for context in step.decode]
    assert cached == list(range(700, 704))
    assert all(step.T_ms > 0 for step in seen)


def test_a_run_becomes_a_trace() -> None:
    request = ProfileRequest(
        engine="transformers", device="torch-cpu", layers=1, budget_ms=4000.0, threads=1, dtype="fp32"
    )
    trace, (outcome,) = measure(request)
    assert outcome.path == "cpu"
    assert len(trace) > 10
    decoding = trace["B"] - trace["prefill_requests"]
    assert np.all(trace["S"] == decoding + trace["prefill_tokens"])
    assert np.all(trace["S"] <= STEP_TOKENS)
    assert np.all(trace["context_tokens"] >= trace["prefill_context_tokens"])
    assert trace["context_tokens"].max() <= int(trace["B"].max()) * (PROMPTS[1] + ANSWERS[1])
    assert set(trace["phase"]) >= {"decode", "mixed"}
    assert np.all(np.diff(trace["t_s"]) > 0)
    assert trace.provenance["paths"]["cpu"]["engine"] == "transformers"


def test_experts_are_refused() -> None:
    shape = ModelShape("moe", 64, 1, 4, 2, 16, 96, 128, experts=4, active_experts=2)
    spec = PathSpec(("torch-cpu",), shape, {"torch-cpu": DeviceSettings("fp32")})
    with pytest.raises(WrongUsage, match="mixture of experts"):
        run_engine(ProfileRequest(engine="transformers"), spec)
