"""One run of a policy against a load."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput, refuse
from latfit.files import write_text
from latfit.policies import Policy, codes
from latfit.simulation.policies import event_loop as core
from latfit.simulation.policies.event_loop import Load, Machine
from latfit.simulation.policies.service import System
from latfit.stats import FloatArray
from latfit.workload import (
    ARRIVALS,
    CLASSES,
    LENGTHS,
    SERVICE,
    ClosedLoad,
    Load as AnyLoad,
    RecordedLoad,
    Streams,
    draw_classes,
)

FINEST = 1e-3  # largest rounding error of the last time stamp, as a share of the mean response
FEWEST = 20


class Totals(NamedTuple):
    """Numbers of a run over the requests that count."""

    sizes: NDArray[np.int64]  # batches (2, largest + 1) by path and size, begun while it counted
    busy: FloatArray  # share of the time that a server of each path (2,) was busy
    throughput: float
    in_system: float
    most_waiting: int


@dataclass(frozen=True, eq=False)
class Replication:
    """A finished run; arrays (n,) in order of arrival."""

    arrive_ms: FloatArray
    response_ms: FloatArray  # NaN for requests never served
    path: NDArray[np.int8]  # 0 main, 1 side, -1 never served
    load: Load
    totals: Totals
    out: core.Out | None = None  # arrays of the core; None for a run of a real system


def draw(load: AnyLoad, requests: int, warmup: float, system: System, streams: Streams) -> Load:
    """Draw what the compiled core needs of a load: ten million requests fit into a GiB."""
    think, users, tokens, ids, own = np.empty(0), 0, np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0)
    if isinstance(load, RecordedLoad):
        taken = load.sample(requests, streams)
        arrive, count, own = taken.arrival_ms.copy(), int(taken.class_id.max()) + 1, taken.deadline_ms
        deadlines = np.array([own[taken.class_id == c].min(initial=math.inf) for c in range(count)])
        tokens = taken.prompt_tokens if system.needs_tokens else tokens
        ids = taken.class_id if count > 1 else ids
    else:
        arrive, count = np.empty(requests), len(load.classes)
        if isinstance(load, ClosedLoad):
            think, users = load.thinking(requests, streams), load.users
        else:
            arrive = np.ascontiguousarray(load.arrivals.times_ms(requests, streams.generator(ARRIVALS)))
            if len(arrive) < FEWEST:
                found, remedy = f"the load ends after {len(arrive)} requests", "Let it repeat, or raise its rate."
                raise BadInput(found, where="load", remedy=remedy)
        if system.needs_tokens:
            tokens = load.lengths.lengths(len(arrive), streams.generator(LENGTHS))[0]
        deadlines = np.array([each.deadline_ms for each in load.classes])
        ids = draw_classes(load.classes, len(arrive), streams.generator(CLASSES)) if count > 1 else ids
    warm = min(int(len(arrive) * warmup), len(arrive) - 1)
    return Load(arrive, tokens, ids, deadlines, own, think, users, warm)


def run(policy: Policy, system: System, load: Load, streams: Streams, *, log: bool = False) -> Replication:
    """Serve a drawn load under a policy. log: keep batches and starts for the event log."""
    check_paths(policy, system)
    machine = system.tables
    n = len(load.arrive)
    kept = n if log else 0
    out = core.Out(
        response=np.full(n, math.nan),
        path=np.full(n, -1, np.int8),
        sizes=np.zeros((2, machine.typical.shape[1]), np.int64),
        busy=np.zeros((3, 2)),
        batch=np.full(kept, -1, np.int64),
        start=np.full(kept, math.nan),
        counters=np.zeros(core.COUNTERS, np.int64),
    )
    parameters = np.ascontiguousarray(policy.parameters, dtype=np.float64)
    rule = core.Rule(int(policy.code), parameters, float(policy.ageing_ms))
    rngs = tuple(streams.generator(SERVICE, path) for path in range(2))
    decided = core.serve_requests(load, machine, rule, rngs, _scratch(load, machine), out)
    issued = int(out.counters[core.KNOWN]) if load.users else n
    arrive, response, path = load.arrive[:issued], out.response[:issued], out.path[:issued]
    span, busy = _span(load, out, issued)
    ended, begin, ends = max(float(decided), float(arrive[-1])), load.arrive[load.warm], arrive + response
    total = float(np.nansum(response))
    mean = total / issued
    seldom = f"requests come so seldom that at {ended:.3g} ms a response of {mean:.3g} ms is below rounding"
    too_fine = bool(mean > 0 and np.spacing(ended) > FINEST * mean)
    refuse(too_fine, seldom, "--rate", "Raise the rate, or simulate fewer --requests.")
    in_system = total + float(np.sum(ended - arrive[path < 0]))
    totals = Totals(
        out.sizes,
        busy / np.maximum(machine.servers, 1) / span if span > 0 else busy * math.nan,
        np.count_nonzero((ends > begin) & (ends <= begin + span)) / span if span > 0 else math.nan,
        in_system / ended if ended > 0 else math.nan,
        int(out.counters[core.MOST]),
    )
    return Replication(arrive, response, path, load, totals, out)


def serve_arrivals(policy: Policy, system: System, arrive_ms: FloatArray, warm: int, streams: Streams) -> Replication:
    """Serve requests that are alike, of one class without deadlines. warm: the first that counts."""
    return run(policy, system, _alike(arrive_ms, warm), streams)


def measured_run(served: Mapping[str, Any], system: System, warm: int = 0) -> Replication:
    """Return what a real system did, as a finished run; warm: the first request that counts.

    served: columns (n,) in order of arrival, `arrive_ms`, `response_ms`, `started_ms` of its batch, `path` (0 main, 1
    side), `batch` size.
    """
    arrive, response, path = (np.asarray(served[name]) for name in ("arrive_ms", "response_ms", "path"))
    batches, firsts = np.unique(np.stack([path, served["started_ms"]]), axis=1, return_index=True)
    lasts = arrive[firsts] + response[firsts] - batches[1]
    sizes = np.zeros((2, max(each.largest for each in system.paths) + 1), np.int64)
    np.add.at(sizes, (batches[0].astype(int), np.asarray(served["batch"])[firsts]), 1)
    n, ends = len(arrive), arrive + response
    span = float(arrive[-1] - arrive[warm]) if n > warm + 1 else math.nan
    counted = batches[1] >= arrive[min(warm, n - 1)]
    busy = np.array([lasts[(batches[0] == side) & counted].sum() for side in range(2)]) / span
    busy /= [path.servers for path in system.paths] + [1] * (2 - len(system.paths))
    changes = np.concatenate([np.stack([arrive, np.ones(n)]), np.stack([served["started_ms"], -np.ones(n)])], axis=1)
    waiting = np.cumsum(changes[1, np.lexsort((-changes[1], changes[0]))])
    done = float(np.count_nonzero((ends > arrive[warm]) & (ends <= arrive[-1])))
    in_system = float(response.sum()) / float(ends.max() - arrive[0])
    totals = Totals(sizes, busy, done / span, in_system, int(waiting.max(initial=0)))
    return Replication(arrive, response, path.astype(np.int8), _alike(arrive, warm), totals)


def _alike(arrive_ms: FloatArray, warm: int) -> Load:
    nothing = np.empty(0)
    return Load(
        arrive_ms, np.empty(0, np.int64), np.empty(0, np.int32), np.array([math.inf]), nothing, nothing, 0, warm
    )


def check_paths(policy: Policy, system: System) -> None:
    """Raise WrongUsage for a policy without the path, or with batches larger than the path, it needs."""
    alone = f"policy {policy.name} needs two execution paths, and there is only {system.main.name}"
    remedy = "Add the other one with `latfit hardware add`, or take a policy that needs only one."
    refuse(policy.needs_side and system.side is None, alone, "--policy", remedy)
    largest = [policy.main_largest, policy.side_largest]
    for path, batch in zip(system.paths[: 1 + policy.needs_side], largest, strict=False):
        found = f"policy {policy.name} has batches of up to {batch}, the path takes {path.largest}"
        refuse(batch > path.largest, found, "--set max_batch", "Make the policy for what the path can take.")


def _scratch(load: Load, machine: Machine) -> core.Scratch:
    servers, ids, n = machine.servers, load.class_id, len(load.arrive)
    line, starts = np.arange(n, dtype=np.int32), np.zeros(1, np.int64)
    if len(ids):
        by_class = [np.flatnonzero(ids == c) for c in range(len(load.deadlines))]
        line, starts = np.concatenate(by_class).astype(np.int32), np.cumsum([0, *map(len, by_class[:-1])])
    free = np.full((2, max(1, int(servers.max()))), math.inf)
    for path in range(2):
        free[path, : servers[path]] = 0.0
    return core.Scratch(
        free=free,
        members=np.zeros(machine.typical.shape[1], np.int64),
        seen=np.zeros(codes.VIEW + free.size),
        line=line,
        slices=np.tile(starts, (4, 1)),
        returns=np.zeros(load.users, np.int64),
        sent=load.think.copy(),
    )


def _span(load: Load, out: core.Out, issued: int) -> tuple[float, FloatArray]:
    if issued <= load.warm:
        return 0.0, np.zeros(2)
    end = out.busy[2] if out.counters[core.PHASE] == core.DRAINING else out.busy[0]
    return float(load.arrive[issued - 1] - load.arrive[load.warm]), end - out.busy[1]


ORDER = ("ends", "arrives", "starts")
"""Order of simultaneous events: services end, requests arrive, then the policy acts."""


class Event(NamedTuple):
    """An event of a run; an arrival has no path, and batch -1. requests: in the order of their taking."""

    at_ms: float
    what: str
    path: str
    batch: int
    requests: tuple[int, ...]


def event_log(policy: Policy, system: System, load: AnyLoad, requests: int, seed: int = 0) -> list[Event]:
    streams = Streams(seed)
    served = run(policy, system, draw(load, requests, 0.0, system, streams), streams, log=True)
    assert served.out is not None
    events = [Event(float(t), "arrives", "", -1, (i,)) for i, t in enumerate(served.arrive_ms)]
    batch_of = served.out.batch[: len(served.path)]
    for batch in range(batch_of.max(initial=-1) + 1):
        taken = tuple(np.flatnonzero(batch_of == batch).tolist())
        first, path = taken[0], system.paths[int(served.path[taken[0]])].name
        ends = float(served.arrive_ms[first] + served.response_ms[first])
        events.append(Event(float(served.out.start[first]), "starts", path, batch, taken))
        events.append(Event(ends, "ends", path, batch, taken))
    return sorted(events, key=lambda each: (each.at_ms, ORDER.index(each.what), each.batch, each.requests[0]))


def write_events(target: Path, events: Sequence[Event]) -> None:
    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(Event._fields)
    for at, what, path, batch, requests in events:
        rows.writerow((f"{at:.6f}", what, path, "" if batch < 0 else batch, " ".join(map(str, requests))))
    write_text(target, stream.getvalue())
