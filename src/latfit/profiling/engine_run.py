"""`--engine transformers`: the continuous batching of HuggingFace transformers on a random model, step by step.

A real engine chooses its own batches, so there is no grid: requests with prompts and answers of random length keep a
number of them alive (a load level), levels come in shuffled order until the time is spent, and every step of the engine
is recorded as it was: scheduling, forward pass, sampling and bookkeeping together. Prompts longer than what a step
takes are prefilled in chunks, and chunks share steps with decode requests. The steps become a path of a trace, with the
load levels as its runs.

The steps are driven one by one in this thread, through the same calls as the engine's own loop; on a GPU the clock is
stopped when its work is done.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.errors import HardwareMissing, WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.devices.protocol import DeviceSettings
from latfit.profiling.devices.select import PathSpec
from latfit.profiling.host.machine import LoadWatch, sensible_threads
from latfit.profiling.quality import drift, instability
from latfit.profiling.request import ProfileRequest
from latfit.profiling.result import ProfileResult, Sample, StopReason, TraceLabels, to_trace
from latfit.profiling.shapes import ModelShape, StepShape, check_fits
from latfit.trace import Trace

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = (8, 512)
ANSWERS = (4, 64)
STEP_TOKENS = 512
"""Tokens that a step takes at most, so that long prompts come in chunks."""
STEPS_PER_LEVEL = 60
COLD_STEPS = 3
PAGE_TOKENS = 32


@dataclass(frozen=True)
class EngineStep:
    """One step of the engine. decode: cached tokens of each decode request; prefill: (tokens, cached tokens before
    them) of each chunk; visit: which stretch of a load level it belongs to."""

    visit: int
    level: int
    t_s: float
    T_ms: float
    decode: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    queued: int
    cold: bool


class TransformersEngine:
    """The engine over a random model of `shape`. Raises WrongUsage for a mixture of experts, HardwareMissing where this
    version of transformers has no such continuous batching."""

    def __init__(self, shape: ModelShape, settings: DeviceSettings, *, gpu: bool) -> None:
        import torch

        if shape.experts:
            raise WrongUsage(
                f"{shape.name} is a mixture of experts",
                where="--engine",
                remedy="Measure a dense model with an engine.",
            )
        check_fits(shape, free_memory_bytes())
        self.threads = settings.threads or sensible_threads()
        torch.set_num_threads(self.threads)
        self._torch, self._gpu, self._vocab = torch, gpu, shape.vocab
        try:
            self._open(shape, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision, torch.float32))
        except (ImportError, AttributeError, TypeError) as error:
            raise HardwareMissing(
                f"this version of transformers has no continuous batching that can be driven step by step ({error})",
                where="--engine transformers",
                remedy="Install transformers 5.",
            ) from None

    def _open(self, shape: ModelShape, dtype: Any) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        config = LlamaConfig(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate,
            vocab_size=shape.vocab,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
        model = model.to("cuda") if self._gpu else model
        longest = PROMPTS[1] + ANSWERS[1]
        pages = LEVELS[-1] * (longest // PAGE_TOKENS + 2)
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, max_new_tokens=ANSWERS[1], eos_token_id=-1),
            ContinuousBatchingConfig(
                num_blocks=pages,
                page_size=PAGE_TOKENS,
                max_batch_tokens=STEP_TOKENS,
                use_async_batching=False,
                use_cuda_graph=False,
                allow_block_sharing=False,
            ),
        )
        self._manager.switch_to_cb_friendly_attn(model, False)
        self._processor = self._manager._create_batch_processor()
        self._manager.batch_processor = self._processor

    def add(self, prompt: int, answer: int, rng: np.random.Generator) -> None:
        """Queue a request with a random prompt of so many tokens."""
        self._manager.add_request(rng.integers(0, self._vocab, prompt).tolist(), max_new_tokens=answer)

    @property
    def alive(self) -> int:
        """Requests that run or wait."""
        scheduler = self._processor.scheduler
        queued = int(self._manager.input_queue.qsize())
        return len(scheduler.active_requests) + len(scheduler.waiting_requests) + queued

    def step(self) -> tuple[float, tuple[int, ...], tuple[tuple[int, int], ...], int] | None:
        """(T_ms, decode, prefill, queued) of one step; None where nothing is left to do."""
        with self._torch.inference_mode():
            started = time.perf_counter_ns()
            if not self._processor.prepare_next_batch():
                return None
            batch = [
                (future.query_length, future.state.position_offset, len(future.state.initial_tokens))
                for future in self._processor.inputs_and_outputs.requests_in_batch
            ]
            self._manager._generation_step()
            self._processor.update_batch()
            if self._gpu:
                self._torch.cuda.synchronize()
            elapsed_ms = (time.perf_counter_ns() - started) / 1e6
        before = [(tokens, end - tokens, prompt) for tokens, end, prompt in batch]
        decode = tuple(cached for _, cached, prompt in before if cached >= prompt)
        prefill = tuple((tokens, cached) for tokens, cached, prompt in before if cached < prompt)
        return elapsed_ms, decode, prefill, len(self._processor.scheduler.waiting_requests)

    def close(self) -> None:
        with suppress(RuntimeError):
            self._manager.destroy()


def engine_steps(
    engine: TransformersEngine, budget_s: float, seed: int, tell: Callable[[float, int], None] | None = None
) -> Iterator[EngineStep]:
    """Steps at all load levels in shuffled rounds until the time is spent; `tell` hears of (seconds, steps)."""
    rng = np.random.default_rng(seed)
    start_s, visit, count = time.perf_counter(), 0, 0

    def elapsed_s() -> float:
        return time.perf_counter() - start_s

    while elapsed_s() < budget_s:
        for level in rng.permutation(LEVELS).tolist():
            for number in range(STEPS_PER_LEVEL):
                while number < STEPS_PER_LEVEL // 2 and engine.alive < level:
                    engine.add(_length(rng, *PROMPTS), _length(rng, *ANSWERS), rng)
                t_s = elapsed_s()
                found = engine.step() if t_s < budget_s else None
                if found is None:
                    break
                count += 1
                yield EngineStep(visit, level, t_s, *found, cold=count <= COLD_STEPS)
            visit += 1
            if tell:
                tell(elapsed_s(), count)


def _length(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


Tell = Any


def run_engine(request: ProfileRequest, spec: PathSpec, tell: Tell = None) -> tuple[list[EngineStep], ProfileResult]:
    """Drive the engine for the request's budget. Ctrl-C ends it and keeps the steps so far."""
    kind = spec.kinds[0]
    engine = TransformersEngine(spec.shape, spec.settings[kind], gpu=spec.on_gpu)
    load = LoadWatch(engine.threads)
    steps: list[EngineStep] = []
    stop: StopReason = "budget"
    try:
        for step in engine_steps(engine, request.budget_ms / 1e3, request.seed, tell):
            steps.append(step)  # noqa: PERF402 - Ctrl-C must leave what came before
    except KeyboardInterrupt:
        stop = "interrupted"
    finally:
        engine.close()
    return steps, _result(steps, stop, request, load)


def _result(steps: Sequence[EngineStep], stop: StopReason, request: ProfileRequest, load: LoadWatch) -> ProfileResult:
    """The steps as samples; steps with the same B, S and phase are one cell, whatever their contexts."""
    shapes = [_shape(step) for step in steps]
    cells = tuple(dict.fromkeys(shapes))
    place = {cell: index for index, cell in enumerate(cells)}
    samples = tuple(
        Sample(place[shape], step.visit, step.t_s, step.T_ms, step.cold)
        for shape, step in zip(shapes, steps, strict=True)
    )
    elapsed_s = steps[-1].t_s + steps[-1].T_ms / 1e3 if steps else 0.0
    result = ProfileResult(cells, samples, (), stop, elapsed_s, request.budget_ms / 1e3, request.precision)
    warning = instability([drift(result)], load())  # contexts differ within a cell: other symptoms mean nothing
    return replace(result, warnings=(warning,) if warning else ())


def _shape(step: EngineStep) -> StepShape:
    tokens = sum(n for n, _ in step.prefill)
    rest = (1,) * (len(step.prefill) - 1)
    return StepShape(len(step.decode), 0, (tokens - len(rest), *rest) if step.prefill else ())


def engine_trace(steps: Sequence[EngineStep], result: ProfileResult, labels: TraceLabels) -> Trace:
    """The trace of an engine run; contexts are those of the very step, and a run is one stretch at a load level."""
    trace = to_trace(result, labels)
    steps = [step for step in steps if not step.cold]
    prefill_context = np.array([sum(before for _, before in step.prefill) for step in steps], dtype=np.int64)
    return trace.with_columns(
        context_tokens=prefill_context + np.array([sum(step.decode) for step in steps], dtype=np.int64),
        prefill_context_tokens=prefill_context,
        queued_requests=np.array([step.queued for step in steps], dtype=np.int64),
        run=np.array([f"{labels.runs[0]}-{step.visit}-of-{step.level}" for step in steps], dtype=object),
    )
