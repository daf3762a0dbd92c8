"""One or two execution paths, each with its times T(b), servers and noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from latfit.errors import BadInput, refuse
from latfit.hardware import CPU_PATHS, GPU_PATHS, ExecutionPath, HardwareProfile, phase_of
from latfit.model import StepNoise, noise_table
from latfit.policies import PathTimes, Policy
from latfit.simulation.policies.event_loop import DETERMINISTIC, EMPIRICAL, EXPONENTIAL, Machine
from latfit.stats import FloatArray

TOKEN_POINTS = 48  # points of the grid of tokens between which T is interpolated linearly


@dataclass(frozen=True, eq=False, repr=False)
class ServicePath:
    name: str
    times_ms: FloatArray  # typical T (largest + 1, grid) by batch (0 is unused) and tokens in the batch
    tokens: FloatArray  # the grid (grid,), rising; one entry if requests are alike
    tokens_per_request: float = 1.0  # of a typical request
    servers: int = 1
    exponential: bool = False  # the time is exponential with mean T(b)
    noise: StepNoise | None = None  # else, of each batch's time about T(b); None if it always is T(b)
    fixed_ms: float = 0.0  # added to each time, without noise
    nominal: bool = False  # whether its times are nominal, not measured

    def __post_init__(self) -> None:
        times = self.times_ms[1:]
        wrong = not len(times) or not np.all(np.isfinite(times) & (times > 0)) or self.servers < 1
        found = f"path {self.name} has a batch whose time is not above zero, or no batch or server"
        remedy = "Give T(b) in ms for each batch, or limit the batch to where the fit holds."
        refuse(wrong, found, self.name, remedy)

    @property
    def largest(self) -> int:
        return len(self.times_ms) - 1

    @property
    def typical_ms(self) -> FloatArray:
        """T(b) (largest + 1,) for typical requests."""
        if len(self.tokens) == 1:
            return np.ascontiguousarray(self.times_ms[:, 0])
        wanted = np.arange(self.largest + 1) * self.tokens_per_request
        return np.array([np.interp(s, self.tokens, row) for s, row in zip(wanted, self.times_ms, strict=True)])

    @property
    def mean_ms(self) -> FloatArray:
        T = self.typical_ms
        if self.noise is not None and not self.exponential:
            T = np.concatenate([T[:1], self.noise.mean_ms(T[1:], np.arange(1.0, len(T)))])
        return np.asarray(T + self.fixed_ms)

    def rate_limit(self, batch: int) -> float:
        return self.servers * batch / float(self.mean_ms[batch])


@dataclass(frozen=True, eq=False)
class System:
    """The main path (the GPU, or the only one) and the side path (the AMX), if there is one."""

    main: ServicePath
    side: ServicePath | None = None

    @property
    def paths(self) -> tuple[ServicePath, ...]:
        return (self.main,) if self.side is None else (self.main, self.side)

    @property
    def needs_tokens(self) -> bool:
        return any(len(path.tokens) > 1 for path in self.paths)

    def capacity(self, policy: Policy) -> float:
        """Requests per ms that the paths serve at most under a policy."""
        main = self.main.rate_limit(policy.long_queue_batch)
        return main + self.side.rate_limit(policy.side_largest) if policy.needs_side and self.side else main

    @cached_property
    def tables(self) -> Machine:
        """As the compiled core wants it: both paths on the tokens of either."""
        largest = max(path.largest for path in self.paths)
        grids = [path.tokens for path in self.paths if len(path.tokens) > 1]
        grid = np.unique(np.concatenate(grids)) if grids else self.main.tokens
        times, typical = np.full((2, largest + 1, len(grid)), np.inf), np.full((2, largest + 1), np.inf)
        kind, servers, fixed = np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2)
        for i, path in enumerate(self.paths):
            times[i, : path.largest + 1] = [np.interp(grid, path.tokens, row) for row in path.times_ms]
            typical[i, : path.largest + 1] = path.mean_ms
            servers[i] = path.servers
            kind[i] = EXPONENTIAL if path.exponential else DETERMINISTIC if path.noise is None else EMPIRICAL
            fixed[i] = path.fixed_ms
        noise = noise_table([path.noise for path in self.paths], largest)
        return Machine(times, grid, typical, servers, kind, fixed, noise)


def table_path(name: str, T_ms: Sequence[float] | FloatArray, **more: object) -> ServicePath:
    """T of batches 1, 2, ..., len(T_ms), in ms. more: servers, exponential, noise, fixed_ms."""
    times = np.concatenate([[0.0], np.asarray(T_ms, dtype=np.float64)])
    return replace(ServicePath(name, times[:, None], np.zeros(1)), **more)  # type: ignore[arg-type]


def linear_path(name: str, tau_ms: float, alpha_ms: float, max_batch: int, **more: object) -> ServicePath:
    """T(b) = tau + alpha b up to `max_batch`."""
    return table_path(name, tau_ms + alpha_ms * np.arange(1.0, max_batch + 1), **more)


def bucketed(path: ServicePath, buckets: Sequence[int]) -> ServicePath:
    """Return the path of an engine that pads a batch to the next of `buckets`; the last is its largest batch."""
    sizes = np.array(sorted(set(buckets)), dtype=np.int64)
    wrong = not len(sizes) or sizes[0] < 1 or sizes[-1] > path.largest
    found = f"buckets {list(buckets)} are not between 1 and the largest batch"
    refuse(wrong, found, "--set buckets", "Give the batch sizes that the engine has captured.")
    padded = sizes[np.searchsorted(sizes, np.arange(sizes[-1] + 1))]
    noise = None if path.noise is None else path.noise.padded(buckets)
    return replace(path, times_ms=np.ascontiguousarray(path.times_ms[padded]), noise=noise)


SERVICES = ("fitted", "deterministic", "exponential")
LARGEST, LARGEST_NOMINAL = 1024, 1 << 20  # largest batch of a fitted path, whatever was measured, and of a nominal one


@dataclass(frozen=True)
class Serving:
    tokens_per_request: float = 1.0
    service: str = "fitted"  # times scatter as the fit's residuals did; or deterministic, exponential
    most_tokens: float = 0.0  # the longest request; 0 if requests are alike
    servers: Mapping[str, int] = field(default_factory=dict)  # by path
    buckets: Sequence[int] = ()

    def __post_init__(self) -> None:
        found, remedy = f"{self.service!r} is not a service-time distribution", f"Take one of {', '.join(SERVICES)}."
        refuse(self.service not in SERVICES, found, "--set service", remedy)
        few, where = "a request has at least one token", "--tokens-per-request"
        refuse(self.tokens_per_request < 1, few, where, "Give 1 or more.")


def system_of(profile: HardwareProfile, serving: Serving = Serving()) -> System:
    """Return the GPU as main path and the CPU beside it, or the only path. Raises BadInput, WrongUsage."""
    paths = {name: measured_path(path, serving) for name, path in profile.paths.items()}
    if not paths:
        raise BadInput("the hardware profile has no execution path", remedy="Add one with `latfit fit trace.parquet`.")
    for name in serving.servers:
        refuse(name not in paths, f"there is no path {name!r}", "--set servers", f"Take {', '.join(paths)}.")
    paths = {name: replace(path, servers=serving.servers.get(name, 1)) for name, path in paths.items()}
    gpu = next((paths[name] for name in GPU_PATHS if name in paths), None)
    main = gpu or next(iter(paths.values()))
    side = next((paths[name] for name in CPU_PATHS if name in paths), None) if gpu is not None else None
    return System(bucketed(main, serving.buckets) if serving.buckets else main, side)


def measured_path(path: ExecutionPath, serving: Serving) -> ServicePath:
    """Return a path of a profile; a nominal median is served one at a time, as exponential unless deterministic."""
    fit, nominal, most = path.fit, path.nominal, serving.most_tokens
    if not fit.status.ok or "B" not in fit.domain:
        found = f"the fit of path {path.name!r} is not usable ({fit.status.sentence})"
        raise BadInput(found, remedy="Fit it again with `latfit fit`.")
    median = nominal is not None and nominal.median
    largest = 1 if median else max(1, min(int(fit.domain["B"][1]), LARGEST if nominal is None else LARGEST_NOMINAL))
    b: FloatArray = np.arange(1.0, largest + 1).reshape(-1, 1)
    grid, tokens = np.zeros(1), b * serving.tokens_per_request
    if most > 0:
        grid = np.unique(np.round(np.geomspace(1.0, max(largest * most, 2.0), TOKEN_POINTS)))
        tokens = np.maximum(grid, b)
    times = fit.latency_ms(np.broadcast_to(b, tokens.shape).ravel(), tokens.ravel()).reshape(tokens.shape)
    phase = phase_of(max(serving.tokens_per_request, most))
    noise = fit.limits.of(phase).ratios if serving.service == "fitted" else None
    if noise is not None:
        times = times * noise.levels.factors(tokens)
    exponential = serving.service == "exponential" or (nominal is not None and nominal.exponential)
    if nominal is not None and median and serving.service != "deterministic":
        times, exponential = nominal.mean_factor() * times, True
    return ServicePath(
        path.name,
        np.concatenate([np.zeros((1, len(grid))), times]),
        grid,
        serving.tokens_per_request,
        exponential=exponential,
        noise=noise,
        nominal=bool(fit.data.nominal),
    )


def path_times(system: System) -> PathTimes:
    side = np.empty(0) if system.side is None else system.side.mean_ms[1:]
    return PathTimes(system.main.mean_ms[1:], side, system.main.servers)
