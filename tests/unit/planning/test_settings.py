"""Engine settings against enumeration; the same under the engines' names; trimming a batch against enumeration."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from latfit.hardware.profile import ExecutionPath
from latfit.model.fit_parts import Identifiability
from latfit.planning.engine_settings import MEASURED, engine_settings
from latfit.planning.plan import make_plan
from latfit.planning.request import PlanOptions
from latfit.planning.result import Settings, Unknown
from latfit.planning.steps.budget import step_budget
from tests.conftest import REFERENCE
from tests.unit.planning.test_plan import fit_with, line, machine

WIDE = {"B": [1, 64], "S": [1, 4000], "context_tokens": [0, 1_000_000]}
PATH = ExecutionPath("gpu", fit_with(REFERENCE.tolist(), domain={"B": [1, 32], "S": [1, 600]}))


def T(B: int, S: int) -> float:
    return float(PATH.fit.latency_ms(np.array([float(B)]), np.array([float(S)]))[0])


def most_sequences(budget: int, tpot: float, ttft: float, prompt: int) -> int | None:
    """The most sequences whose steps keep both targets, with 128 prefill tokens left beside them, by trying all."""

    def keeps(D: int) -> bool:
        chunk = budget - D + 1
        steps = [T(d + -(-(budget - d) // prompt), budget) for d in range(1, D)]
        return max(steps) <= tpot and -(-prompt // chunk) * T(D, D - 1 + min(chunk, prompt)) <= ttft

    return max((D for D in range(2, min(32, budget - 127) + 1) if T(D, D) <= tpot and keeps(D)), default=None)


class TestEngine:
    @pytest.mark.parametrize(("tpot", "ttft", "prompt"), [(22.0, 60.0, 512), (25.0, 40.0, 512), (22.0, None, 2000)])
    def test_choices_are_those_of_enumeration(self, tpot: float, ttft: float | None, prompt: int) -> None:
        found = engine_settings(PATH, tpot, 99.0, PlanOptions(ttft_ms=ttft, tpot_ms=tpot, prompt_tokens=prompt))
        assert isinstance(found, Settings)
        for row in found.choices:
            best = most_sequences(row.max_num_batched_tokens, tpot, ttft or np.inf, prompt)
            assert best is not None
            assert 0.9 * best <= row.max_num_seqs <= best  # a round number below it
            assert row.chunk_tokens == row.max_num_batched_tokens - row.max_num_seqs + 1 >= 128
            assert row.decode_tokens_per_s == pytest.approx(
                1e3 * row.max_num_seqs / T(row.max_num_seqs, row.max_num_seqs)
            )
        top = max(row.max_num_seqs for row in found.choices)
        product = max(row.max_num_seqs * row.chunk_tokens for row in found.choices)
        assert found.chunk_tokens is not None
        assert found.max_num_seqs == top if ttft else found.max_num_seqs * found.chunk_tokens == product

    def test_a_chunk_below_128_tokens_is_not_recommended(self) -> None:
        """T = 2 + 0.1 B + 0.1 S: 14 ms take a chunk of about 110 beside one request."""
        path = ExecutionPath("gpu", fit_with([2.0, 0.1, 0.1], "linear", domain={"B": [1, 64], "S": [1, 1000]}))
        found = engine_settings(path, 14.0, 99.0, PlanOptions())
        assert isinstance(found, Unknown)
        assert "128 prefill tokens" in found.reason
        asked = engine_settings(path, 14.0, 99.0, PlanOptions(prompt_tokens=32))
        assert isinstance(asked, Settings)
        assert asked.chunk_tokens is not None
        assert asked.chunk_tokens >= 32

    def test_a_fit_of_decode_alone_gives_sequences_and_no_budget(self) -> None:
        fit = structs.replace(line(4, 0.5), identifiability=Identifiability(prefill=False))
        found = engine_settings(ExecutionPath("gpu", fit), 20.0, 99.0, PlanOptions())
        assert isinstance(found, Settings)
        assert (found.max_num_seqs, found.max_num_batched_tokens) == (32, None)
        assert found.binding == "the time between tokens"
        all_measured = engine_settings(ExecutionPath("gpu", fit), 200.0, 99.0, PlanOptions())
        assert isinstance(all_measured, Settings)
        assert (all_measured.max_num_seqs, all_measured.binding) == (256, MEASURED)

    def test_measured_steps_of_one_request_give_no_settings(self) -> None:
        """Steps of 551 tokens take 2 + 0.1 + 0.02 * 551 = 13.1 ms, so it is not the SLA that rules settings out."""
        path = ExecutionPath("gpu", fit_with([2.0, 0.1, 0.02], "linear", domain={"B": [1, 1], "S": [1, 600]}))
        found = engine_settings(path, 14.0, 99.0, PlanOptions())
        assert isinstance(found, Unknown)
        assert "hold one request" in found.reason

    def test_no_choice_has_more_sequences_and_as_early_a_first_token_as_the_recommended_one(self) -> None:
        for tpot in (20.0, 22.0, 25.0, 40.0):
            found = engine_settings(PATH, tpot, 99.0, PlanOptions())
            assert isinstance(found, Settings)
            best = next(row for row in found.choices if row.max_num_batched_tokens == found.max_num_batched_tokens)
            more = [row for row in found.choices if row.max_num_seqs > best.max_num_seqs]
            assert all(row.ttft_ms > 1.04 * best.ttft_ms for row in more)

    def test_every_step_in_which_requests_decode_keeps_the_target(self) -> None:
        """T = 2 + 0.1 B + 0.02 S + 1e-4 K of cached tokens; prompts of 2,000, so a last chunk reads those before it."""
        theta = [2.0, 0.0, 1e-9, 1.0, 1.0, 1.0, 0.1, 0.02, 1e-4, 1e-4, 1e-4, 0.0, 0.0, 0.0, 0.0]
        fit = fit_with(theta, "context", domain=WIDE)
        targets = PlanOptions(context=500.0, tpot_ms=20.0, prompt_tokens=2000)
        found = engine_settings(ExecutionPath("gpu", fit), 20.0, 99.0, targets)
        assert isinstance(found, Settings)
        budget = found.max_num_batched_tokens
        assert budget is not None

        def slowest(sequences: int) -> float:
            D = np.arange(1.0, sequences)
            P = budget - D
            history = 2000 - P
            columns = {"B": D + 1, "S": D + P, "prefill_requests": np.ones_like(D), "prefill_tokens": P}
            cached = {"context_tokens": 500 * D + history, "prefill_context_tokens": history}
            return float(fit.latency_ms(**columns, **cached).max())

        assert slowest(found.max_num_seqs) <= 20.0 * (1 + 1e-9)
        assert slowest(int(found.max_num_seqs * 1.1) + 1) > 20.0


class TestNames:
    def test_every_engine_gets_its_own_names(self) -> None:
        plan = make_plan(machine(amx=line(0, 2), gpu=line(8, 0.05)), 20.0)
        assert isinstance(plan.settings, Settings)
        flags = plan.engines
        assert flags["vllm"]["max_num_seqs"] == plan.settings.max_num_seqs
        assert flags["vllm"]["max_num_batched_tokens"] == plan.settings.max_num_batched_tokens
        # A chunk of SGLang beside requests that decode is what they leave of its size, which is then that of a step.
        assert flags["sglang"]["chunked_prefill_size"] == plan.settings.max_num_batched_tokens
        assert flags["sglang"]["enable_mixed_chunk"] is True
        assert flags["trtllm"]["max_num_tokens"] == plan.settings.max_num_batched_tokens
        assert flags["triton"]["max_batch_size"] == 240  # 8 + 0.05 * 240 = 20
        assert flags["triton"]["max_queue_delay_microseconds"] == 0
        assert "preferred_batch_size" not in flags["triton"]  # it would leave requests waiting that could go
        assert flags["tensorrt"]["opt_batch"] == plan.B2.value

    def test_the_prefill_threshold_of_kt(self) -> None:
        """AMX 0.5 S against 8 + 0.01 S: equal at 16.33 tokens."""
        slow, fast = (fit_with([tau, 0.0, s], "linear") for tau, s in ((0.0, 0.5), (8.0, 0.01)))
        plan = make_plan(machine(amx=slow, gpu=fast), 50.0)
        assert plan.B1_tokens.value == 17
        assert plan.engines["sglang"]["kt_gpu_prefill_token_threshold"] == 17


candidates = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 400)), min_size=1, max_size=40)


class TestTrim:
    budget = step_budget(PATH, 14.0)

    @given(candidates)
    def test_what_is_left_meets_the_sla_and_is_the_most(self, pairs: list[tuple[int, int]]) -> None:
        least = [low for low, _ in pairs]
        wanted = [low + more for low, more in pairs]
        found = self.budget.trim(least, wanted)
        n = found.requests
        assert sum(found.tokens) == found.total
        assert all(low <= got <= high for low, got, high in zip(least[:n], found.tokens, wanted[:n], strict=False))
        assert not any(found.tokens[n:])
        if n:
            assert T(n, found.total) <= 14.0
            # Either everybody who takes part has what it wants, or one token more is too many.
            assert list(found.tokens[:n]) == wanted[:n] or T(n, found.total + 1) > 14.0 or found.total == 600
        for more in range(n + 1, min(len(pairs), 32) + 1):
            start, end = sum(least[:more]), min(sum(wanted[:more]), 600)
            assert start > 600 or all(T(more, S) > 14.0 for S in range(start, end + 1, 7))

    def test_contexts_cost(self) -> None:
        fit = fit_with([2, 10, 1, 50, 0.5, 0.05, 0.01, 0.001, 0.0005, 0.0005, 0, 0, 0, 0, 0], "context")
        fit = structs.replace(fit, domain={"B": [1, 16], "S": [1, 256], "context_tokens": [0, 40_000]})
        path = ExecutionPath("gpu", fit)
        budget = step_budget(path, 12.0)
        ones = [1] * 16
        light, heavy = (budget.trim(ones, [20] * 16, context).total for context in (0.0, 8000.0))
        assert light > heavy > 0
        assert budget.trim(ones, ones, 1e9).requests == 0
