"""From an engine's steps to a path of a trace: steps as they came, with the load levels as its runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from latfit.profiler.doubts import find_doubts
from latfit.profiler.machine import LoadWatch
from latfit.profiler.opening import PathSpec
from latfit.profiler.record import ProfileResult, Sample, StopReason, TraceLabels, to_trace
from latfit.profiler.request import ProfileRequest
from latfit.profiler.transformers_engine import EngineStep, TransformersEngine, engine_steps
from latfit.profiler.workload import StepShape
from latfit.trace.table import Trace

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
    wanted = ("drift", "other_load")
    return replace(result, doubts=tuple(d for d in find_doubts(result, load()) if d.code in wanted))


def _shape(step: EngineStep) -> StepShape:
    tokens = sum(n for n, _ in step.prefill)
    rest = (1,) * (len(step.prefill) - 1)
    return StepShape(len(step.decode), 0, (tokens - len(rest), *rest) if step.prefill else ())


def engine_trace(steps: Sequence[EngineStep], result: ProfileResult, labels: TraceLabels) -> Trace:
    """The trace of an engine run; contexts are those of the very step, and a run is one stretch at a load level."""
    trace = to_trace(result, labels)
    prefill_context = np.array([sum(before for _, before in step.prefill) for step in steps], dtype=np.int64)
    return trace.with_columns(
        context_tokens=prefill_context + np.array([sum(step.decode) for step in steps], dtype=np.int64),
        prefill_context_tokens=prefill_context,
        queued_requests=np.array([step.queued for step in steps], dtype=np.int64),
        run=np.array([f"{labels.runs[0]}-{step.visit}-of-{step.level}" for step in steps], dtype=object),
    )
