"""The devices `torch-cpu` and `torch-cuda`: decoder steps in PyTorch.

With CUDA graphs a step is recorded once per cell and replayed; without them its time includes kernel launches. A
mixture of experts decides on the CPU which experts run, so its steps run eagerly.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from latfit.profiling.devices.decoder import (
    EPS,
    EagerStep,
    KvCache,
    Weights,
    build_weights,
    last_rows,
    make_cache,
    rotation,
)
from latfit.profiling.devices.device import (
    INPUT_SETS,
    DeviceOutOfMemory,
    DeviceSettings,
    LocalDevice,
    cpu_facts,
    loading,
    memory_errors,
    time_ms,
)
from latfit.profiling.host.machine import sensible_threads
from latfit.profiling.shapes import ModelShape, StepShape, check_fits, step_bytes

Tensor = Any
Linear = Callable[[Tensor], Tensor]
"""x (S, in) to (S, out)."""

RECORDING_SHARE = 0.5  # recorded cells give way to one that needs more than this share of the free memory
GRAPH_WARMUP_RUNS = 3  # libraries choose kernels and take workspace in their first runs, which a graph must not see


class TorchStep(EagerStep):
    def __init__(self, weights: Weights, cell: StepShape, cache: KvCache) -> None:
        import torch

        super().__init__(weights, cell)
        self.xp, self.cache = torch, cache
        self._place = {"device": weights.embedding.device, "dtype": weights.embedding.dtype}
        self.cosine, self.sine = (
            torch.from_numpy(each).to(**self._place) for each in rotation(cell, self.shape.head_dim)
        )
        self._last = torch.from_numpy(last_rows(cell)).to(self._place["device"])
        self._masks = [_causal_mask(tokens, cached, self._place["device"]) for _, tokens, cached in self.groups]

    def random(self, width: int) -> Tensor:
        return self.xp.randn(self.cell.S, width, **self._place)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.xp.nn.functional.embedding(tokens, self.weights.embedding)

    def last(self, x: Tensor) -> Tensor:
        return x[self._last]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.xp.nn.functional.rms_norm(x, (self.shape.hidden,), weight, EPS)

    def product(self, x: Tensor, matrix: Linear) -> Tensor:
        return matrix(x)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.xp.nn.functional.silu(gate) * up

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = scores.float().topk(self.shape.active_experts, dim=-1)
        return chosen, best.softmax(-1).to(scores.dtype)

    def attention(self, group: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attend = self.xp.nn.functional.scaled_dot_product_attention
        if queries.shape[1] == 1:  # heads that share a key head stand where positions would: the cache is read once
            grouped = queries.reshape(len(queries), keys.shape[1], -1, self.shape.head_dim)
            return attend(grouped, keys, values)
        mask, shared = self._masks[group], self.shape.heads != self.shape.kv_heads
        found = attend(queries.transpose(1, 2), keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=shared)
        return found.transpose(1, 2)


def _causal_mask(tokens: int, cached: int, device: Any) -> Tensor | None:
    """Return the mask of chunks behind cached tokens; None for the plain causal mask."""
    import torch

    if not cached:
        return None
    if device.type != "cpu":
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(tokens, cached + tokens)
    return torch.ones(tokens, cached + tokens, dtype=torch.bool).tril(cached)


def activation_dtype(precision: str) -> Any:
    import torch

    return {"fp16": torch.float16, "fp32": torch.float32}.get(precision, torch.bfloat16)


def linear(weight: Tensor, precision: str) -> Linear:
    """Return the fastest product with `weight` (out, in).

    On a CPU, bfloat16 weights are packed once: a plain `linear` repacks them at every step (2.3 times slower).
    """
    import torch

    if weight.device.type == "cpu" and precision == "int8":
        return _int8_linear(weight)
    if weight.device.type == "cpu" and precision == "bf16" and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return lambda x: torch.nn.functional.linear(x, weight)


def _int8_linear(weight: Tensor) -> Linear:
    """Use one scale per column of weights and one for activations: oneDNN's only kind with VNNI and AMX."""
    import torch

    scales = weight.float().abs().amax(1) / 127
    packed = torch.ops.onednn.qlinear_prepack((weight.float() / scales[:, None]).round().to(torch.int8), None)
    zeros = torch.zeros(len(scales), dtype=torch.int32)

    def multiply(x: Tensor) -> Tensor:
        scale = torch.clamp(x.abs().amax().float() / 127, min=1e-12)
        stored = torch.clamp((x.float() / scale).round() + 128, 0, 255).to(torch.uint8)
        factors = float(scale), 128, packed, scales, zeros
        return torch.ops.onednn.qlinear_pointwise(stored, *factors, None, 1.0, 0, x.dtype, "none", [], "")

    return multiply


def random_torch_weights(shape: ModelShape, place: str, precision: str, seed: int) -> Weights:
    import torch

    kind = {"dtype": activation_dtype(precision), "device": place}
    generator = torch.Generator(place).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Linear:
        return linear(torch.empty(columns, rows, **kind).normal_(0, rows**-0.5, generator=generator), precision)

    def norm(size: int) -> Tensor:
        return torch.empty(size, **kind).uniform_(0.8, 1.2, generator=generator)

    embedding = torch.empty(shape.vocab, shape.hidden, **kind).normal_(generator=generator)
    return build_weights(shape, matrix, norm, (embedding, linear(embedding, precision)))


def random_cache(weights: Weights, cell: StepShape) -> KvCache:
    """Return random numbers, the same in every layer: drawing them takes longer than a copy."""

    def filled(size: tuple[int, ...]) -> Tensor:
        array = weights.embedding.new_empty(size)
        array[1:] = array[:1].normal_()
        return array

    return make_cache(weights.shape, cell, filled)


class PreparedCell(NamedTuple):
    """What is timed, the tokens that it reads, the tokens copied there in turn, and the step (owns the cache)."""

    run: Callable[[], object]
    tokens: Tensor
    inputs: list[Tensor]
    step: TorchStep


class TorchDevice(LocalDevice):
    """Random weights on the CPU, and the prepared step. Raises WrongUsage if the weights do not fit."""

    name, place = "torch-cpu", "cpu"
    graphs = False

    def __init__(self, shape: ModelShape, settings: DeviceSettings) -> None:
        import torch

        check_fits(shape, self.free_bytes())
        self._shape, self._settings, self.path = shape, settings, settings.cpu_path
        self._threads_before = torch.get_num_threads()
        if self.name == TorchDevice.name:
            torch.set_num_threads(settings.threads or sensible_threads())
        with torch.inference_mode(), loading(shape):
            self._weights = random_torch_weights(shape, self.place, settings.precision, settings.seed)
        self._generator = torch.Generator(self.place).manual_seed(settings.seed)
        self._current: PreparedCell | None = None

    def facts(self) -> dict[str, Any]:
        import torch

        return {**cpu_facts(self.name, self._settings, torch.get_num_threads()), "torch": torch.__version__}

    def time_ms(self, run: Callable[[], object]) -> float:
        return time_ms(run)

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        return run

    def release(self) -> None: ...

    def prepare(self, cell: StepShape) -> None:
        self._current = None
        self.check_room(self._shape, cell)
        self._current = self._prepared(cell)

    def _prepared(self, cell: StepShape) -> PreparedCell:
        import torch

        place = {"device": self.place, "generator": self._generator}
        with memory_errors(self.release), torch.inference_mode():
            inputs = [torch.randint(self._shape.vocab, (cell.S,), **place) for _ in range(INPUT_SETS)]
            tokens, step = inputs[0].clone(), TorchStep(self._weights, cell, random_cache(self._weights, cell))

            def run() -> None:
                for _ in step.outputs(self._settings.part, tokens):
                    pass

            return PreparedCell(self.record(run) if self.graphs else run, tokens, inputs, step)

    def step_ms(self) -> float:
        import torch

        assert self._current is not None
        run, tokens, inputs, _ = self._current
        inputs.append(inputs.pop(0))
        with memory_errors(self._give_back), torch.inference_mode():
            tokens.copy_(inputs[0])
            return self.time_ms(run)

    def close(self) -> None:
        import torch

        self._weights = None  # type: ignore[assignment]
        self._give_back()
        torch.set_num_threads(self._threads_before)

    def _give_back(self) -> None:
        self._current = None
        self.release()


class CudaDevice(TorchDevice):
    """The first GPU. Recorded graphs are kept while memory lasts: recording costs several steps."""

    name, place = "torch-cuda", "cuda:0"

    def __init__(self, shape: ModelShape, settings: DeviceSettings) -> None:
        self._recorded: dict[StepShape, PreparedCell] = {}
        super().__init__(shape, settings)
        self.path, self.graphs = "gpu", settings.graphs and not shape.experts

    def facts(self) -> dict[str, Any]:
        facts = {"device": self.name, "dtype": self._settings.dtype, "part": self._settings.part}
        return {**facts, "cuda_graphs": self.graphs, **self.gpu_facts()}

    def gpu_facts(self) -> dict[str, Any]:
        import torch

        found = torch.cuda.get_device_properties(0)
        return {
            "gpu": found.name,
            "compute_capability": f"{found.major}.{found.minor}",
            "gpu_memory_bytes": int(found.total_memory),
            "multiprocessors": int(found.multi_processor_count),
            "l2_bytes": int(getattr(found, "L2_cache_size", 0)) or None,
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
        }

    def free_bytes(self) -> int | None:
        from torch import cuda

        free, _ = cuda.mem_get_info(0)
        return int(free + cuda.memory_reserved(0) - cuda.memory_allocated(0))

    def time_ms(self, run: Callable[[], object]) -> float:
        """Return the time between two events around `run`, on the GPU's clock."""
        from torch import cuda

        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize(0)
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        from torch import cuda

        side = cuda.Stream(0)
        side.wait_stream(cuda.current_stream(0))
        with cuda.stream(side):
            for _ in range(GRAPH_WARMUP_RUNS):
                run()
        cuda.current_stream(0).wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):  # not in a shared pool, which ends with its last graph
            run()
        replay: Callable[[], object] = graph.replay
        return replay

    def release(self) -> None:
        from torch import cuda

        cuda.synchronize(0)
        cuda.empty_cache()

    def prepare(self, cell: StepShape) -> None:
        self._current = self._recorded.get(cell)
        if self._current is not None:
            return
        if self._recorded and step_bytes(self._shape, cell) > RECORDING_SHARE * (self.free_bytes() or 0):
            self._give_back()
        self.check_room(self._shape, cell)
        try:
            self._current = self._prepared(cell)
        except DeviceOutOfMemory:
            if not self._recorded:
                raise
            self._give_back()
            self._current = self._prepared(cell)
        if self.graphs:
            self._recorded[cell] = self._current

    def _give_back(self) -> None:
        self._recorded.clear()
        super()._give_back()
