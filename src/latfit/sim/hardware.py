"""The simulator's paths from a hardware profile, or from times that somebody quotes."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from latfit.errors import BadInput, WrongUsage
from latfit.hardware.profile import CPU_PATHS, GPU_PATHS, ExecutionPath, HardwareProfile
from latfit.hardware.profile import quoted_path as quoted_execution_path
from latfit.hardware.quote import parse_quote
from latfit.scheduling.named import PathTimes
from latfit.sim.machine import ServicePath, System, bucketed, fitted_path, table_path
from latfit.units import parse_duration_ms

SERVICES = ("fitted", "deterministic", "exponential")
LARGEST = 1024
"""Largest batch of a fitted path, whatever was measured."""

QUOTED_LARGEST = 256
_NAMED = re.compile(r"(?P<name>[\w-]+)[=:](?P<quote>.*)")
_QUOTED = re.compile(r"(?P<name>[\w-]+)=(?P<exp>exp:)?(?P<tau>[^+*]+)(\+(?P<alpha>[^*]+))?(\*(?P<most>\d+))?")


@dataclass(frozen=True)
class Serving:
    """How requests meet the paths. service: `fitted` (times scatter as the fit's residuals did), `deterministic` or
    `exponential`.  most_tokens: the longest request, where requests differ; 0 where they are alike.  servers: by path.
    """

    tokens_per_request: float = 1.0
    service: str = "fitted"
    most_tokens: float = 0.0
    servers: Mapping[str, int] = field(default_factory=dict)
    buckets: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.service not in SERVICES:
            raise WrongUsage(
                f"{self.service!r} is no law of service times",
                where="--service",
                remedy=f"Take one of {', '.join(SERVICES)}.",
            )
        if self.tokens_per_request < 1:
            raise WrongUsage("a request has at least one token", where="--tokens-per-request", remedy="Give 1 or more.")


def system_of(profile: HardwareProfile, quoted: Sequence[ServicePath], serving: Serving = Serving()) -> System:
    """The GPU as main path and the CPU beside it; the only path where there is one. Quoted paths replace measured ones
    of the same name. Raises BadInput, WrongUsage."""
    paths = {name: measured_path(path, serving) for name, path in profile.paths.items()}
    paths |= {path.name: path for path in quoted}
    if not paths:
        raise BadInput("the hardware profile has no execution path", remedy="Add one with `latfit fit trace.parquet`.")
    unknown = [name for name in serving.servers if name not in paths]
    if unknown:
        raise WrongUsage(f"there is no path {unknown[0]!r}", where="--servers", remedy=f"Take {', '.join(paths)}.")
    paths = {name: replace(path, servers=serving.servers.get(name, 1)) for name, path in paths.items()}
    gpu = next((paths[name] for name in GPU_PATHS if name in paths), None)
    main = gpu or next(iter(paths.values()))
    side = next((paths[name] for name in CPU_PATHS if name in paths), None) if gpu is not None else None
    if serving.buckets:
        main = bucketed(main, serving.buckets)
    return System(main, side)


def measured_path(path: ExecutionPath, serving: Serving) -> ServicePath:
    """A path of a profile, for batches up to the largest that was measured.

    A quoted median is served one at a time and taken as exponential, as plans take it: its mean is the median over
    ln 2. Only `deterministic` takes it as it stands.
    """
    fit = path.fit
    if not fit.status.ok or "B" not in fit.domain:
        raise BadInput(
            f"the fit of path {path.name!r} is not usable ({fit.status.sentence})",
            remedy="Fit it again with `latfit fit`.",
        )
    one_at_a_time = path.quote is not None and path.quote.median
    most = 1 if one_at_a_time else max(1, min(int(fit.domain["B"][1]), LARGEST))
    made = fitted_path(
        path.name,
        fit,
        most,
        serving.tokens_per_request,
        most_tokens=serving.most_tokens,
        spread=serving.service == "fitted",
    )
    made = replace(made, exponential=serving.service == "exponential", quoted=bool(fit.data.get("quoted")))
    if path.quote is None or not one_at_a_time or serving.service == "deterministic":
        return made
    return replace(made, times_ms=path.quote.mean_factor() * made.times_ms, exponential=True)


def quoted_path(text: str, serving: Serving = Serving()) -> ServicePath:
    """`gpu=8ms+0.05ms*256`: T(b) = 8 + 0.05 b ms up to b = 256; `amx=exp:2ms`: one at a time, exponential, mean 2 ms;
    `amx:p50=2ms`, `gpu:launch=8ms,slope=0.05ms`: as `latfit hardware add NAME --quoted` reads it."""
    name, line = _NAMED.fullmatch(text.strip()), _QUOTED.fullmatch(text.strip())
    if name and "=" in name["quote"]:
        return measured_path(quoted_execution_path(name["name"], parse_quote(name["quote"], "--path")), serving)
    if not line:
        raise WrongUsage(
            f"{text!r} is no path",
            where="--path",
            remedy="Write gpu:launch=8ms,slope=0.05ms, amx:p50=2ms, or short gpu=8ms+0.05ms*256, amx=exp:2ms.",
        )
    tau = parse_duration_ms(line["tau"], option="--path")
    alpha = parse_duration_ms(line["alpha"], option="--path") if line["alpha"] else 0.0
    most = int(line["most"] or (QUOTED_LARGEST if alpha else 1))
    if not 1 <= most <= 2**20:
        raise WrongUsage(f"a largest batch of {most}", where="--path", remedy="Give 1 or more.")
    times = tau + alpha * np.arange(1.0, most + 1)
    return table_path(line["name"], times, exponential=bool(line["exp"]), quoted=True)


def path_times(system: System) -> PathTimes:
    """Mean times as policies by name go by them."""
    side = np.empty(0) if system.side is None else system.side.typical_ms[1:]
    return PathTimes(system.main.typical_ms[1:], side, system.main.servers)


def capacity_of(path: ServicePath) -> float:
    """Requests per ms at the best batch."""
    return max(path.rate_limit(b) for b in range(1, path.largest + 1)) if path.largest else math.nan
