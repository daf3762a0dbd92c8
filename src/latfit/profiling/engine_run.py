"""`--engine transformers`: the continuous batching of HuggingFace transformers on a random model, step by step.

An engine chooses its own batches, so there is no grid: random requests keep a load level alive, levels come in shuffled
order until the time is spent, and every step is recorded with scheduling, sampling and bookkeeping. A run of the trace
is a stretch at one load level."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from latfit.errors import HardwareMissing, WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.devices.device import DeviceSettings
from latfit.profiling.devices.select import PathSpec
from latfit.profiling.host.machine import LoadWatch, sensible_threads
from latfit.profiling.quality import warn_of_instability
from latfit.profiling.request import ProfileRequest
from latfit.profiling.result import ProfileResult, Sample, StopReason
from latfit.profiling.shapes import ModelShape, StepShape, check_fits
from latfit.trace import Trace

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = (8, 512)
ANSWERS = (4, 64)
STEP_TOKENS = 512  # at most in a step, so that long prompts come in chunks
STEPS_PER_LEVEL = 60
COLD_STEPS = 3
PAGE_TOKENS = 32
VERSIONS = "5.17 and 5.24"  # of transformers that were driven


class EngineStep(NamedTuple):
    """A step of the engine: its time, cached tokens of each decode request, (tokens, cached tokens before them) of each
    prefill chunk, requests that wait; and when it ran, in which stretch (visit) of which load level."""

    T_ms: float
    decode: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    queued: int
    visit: int = 0
    level: int = 0
    t_s: float = 0.0

    @property
    def shape(self) -> StepShape:
        """A cell with the same B, S and phase; the first chunk stands for all but one token of the others."""
        tokens = sum(n for n, _ in self.prefill)
        rest = (1,) * (len(self.prefill) - 1)
        return StepShape(len(self.decode), 0, (tokens - len(rest), *rest) if self.prefill else ())


class TransformersEngine:
    """The engine over a random model. Raises WrongUsage for a mixture of experts, HardwareMissing if this version of
    transformers has no such continuous batching."""

    def __init__(self, shape: ModelShape, settings: DeviceSettings, *, gpu: bool) -> None:
        import torch
        import transformers

        if shape.experts:
            remedy = "Measure a dense model with an engine."
            raise WrongUsage(f"{shape.name} is a mixture of experts", where="--engine", remedy=remedy)
        check_fits(shape, free_memory_bytes())
        self.threads = settings.threads or sensible_threads()
        torch.set_num_threads(self.threads)
        self._torch, self._gpu, self._vocab = torch, gpu, shape.vocab
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision, torch.float32)
        try:
            self._manager = _open_manager(shape, dtype, gpu=gpu)
            self._processor = self._manager._create_batch_processor()
        except (ImportError, AttributeError, TypeError) as error:
            found = f"the continuous batching of transformers {transformers.__version__} has no single steps ({error})"
            remedy = f"Install a version that can: {VERSIONS} are known to."
            raise HardwareMissing(found, where="--engine transformers", remedy=remedy) from None
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

    def step(self) -> EngineStep | None:
        """Run one step; None if nothing is left to do."""
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
        return EngineStep(elapsed_ms, decode, prefill, len(self._processor.scheduler.waiting_requests))

    def close(self) -> None:
        with suppress(RuntimeError):
            self._manager.destroy()


def _open_manager(shape: ModelShape, dtype: Any, *, gpu: bool) -> Any:
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
    model = AutoModelForCausalLM.from_config(config, attn_implementation="paged|sdpa", dtype=dtype).eval()
    page = "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
    batching = ContinuousBatchingConfig(
        **{page: PAGE_TOKENS},
        num_blocks=LEVELS[-1] * ((PROMPTS[1] + ANSWERS[1]) // PAGE_TOKENS + 2),
        max_batch_tokens=STEP_TOKENS,
        use_async_batching=False,
        use_cuda_graph=False,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, max_new_tokens=ANSWERS[1], eos_token_id=-1)
    return (model.to("cuda") if gpu else model).init_continuous_batching(generation, batching)


def engine_steps(engine: TransformersEngine, budget_s: float, seed: int) -> Iterator[EngineStep]:
    """Run steps at all load levels in shuffled rounds until the time is spent."""
    rng = np.random.default_rng(seed)
    start_s, visit = time.perf_counter(), 0

    def length(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))

    while time.perf_counter() - start_s < budget_s:
        for level in rng.permutation(LEVELS).tolist():
            for number in range(STEPS_PER_LEVEL):
                while number < STEPS_PER_LEVEL // 2 and engine.alive < level:
                    engine.add(length(*PROMPTS), length(*ANSWERS), rng)
                t_s = time.perf_counter() - start_s
                step = engine.step() if t_s < budget_s else None
                if step is None:
                    break
                yield step._replace(visit=visit, level=level, t_s=t_s)
            visit += 1


def run_engine(request: ProfileRequest, spec: PathSpec) -> tuple[list[EngineStep], ProfileResult]:
    """Drive the engine for the request's budget. Ctrl-C ends it and keeps the steps so far."""
    engine = TransformersEngine(spec.shape, spec.settings[spec.kinds[0]], gpu=spec.on_gpu)
    load = LoadWatch(engine.threads)
    steps: list[EngineStep] = []
    stop: StopReason = "budget"
    try:
        for step in engine_steps(engine, request.budget_ms / 1e3, request.seed):
            steps.append(step)  # noqa: PERF402 - Ctrl-C must leave what came before
    except KeyboardInterrupt:
        stop = "interrupted"
    finally:
        engine.close()
    place = {cell: index for index, cell in enumerate(dict.fromkeys(step.shape for step in steps))}
    samples = tuple(
        Sample(place[step.shape], step.visit, step.t_s, step.T_ms, number < COLD_STEPS)
        for number, step in enumerate(steps)
    )
    elapsed_s = steps[-1].t_s + steps[-1].T_ms / 1e3 if steps else 0.0
    result = ProfileResult(tuple(place), samples, (), stop, elapsed_s, request.budget_ms / 1e3, request.precision)
    warning = warn_of_instability(result, load(), ["drift"])  # contexts differ within a cell: no other counts
    return steps, replace(result, warnings=(warning,) if warning else ())


def add_contexts(trace: Trace, steps: Sequence[EngineStep]) -> Trace:
    """Return the trace of an engine run with the contexts of the very steps, a run for each stretch."""
    steps = steps[COLD_STEPS:]
    prefill = np.array([sum(cached for _, cached in step.prefill) for step in steps], dtype=np.int64)
    runs = [f"{run}-{step.visit}-of-{step.level}" for run, step in zip(trace["run"].tolist(), steps, strict=True)]
    return trace.with_columns(
        context_tokens=prefill + np.array([sum(step.decode) for step in steps], dtype=np.int64),
        prefill_context_tokens=prefill,
        queued_requests=np.array([step.queued for step in steps], dtype=np.int64),
        run=np.array(runs, dtype=object),
    )
