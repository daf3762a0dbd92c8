"""The event log of a run, on demand: who arrived, was moved, was taken into a batch and was answered, in order."""

from dataclasses import dataclass

import numpy as np

from latfit.errors import WrongUsage
from latfit.scheduling.policy import Policy
from latfit.sim.machine import System
from latfit.sim.replication import Replication, draw, run
from latfit.workload.load import Load
from latfit.workload.randomness import Streams

MOST_EVENTS = 5_000_000
ENDS, ARRIVES, MOVES, STARTS = range(4)
WORDS = ("ends", "arrives", "moves", "starts")
"""In this order where they fall on one moment: services end, requests arrive, then the policy acts."""


@dataclass(frozen=True)
class Event:
    """at_ms: when.  what: arrives, moves (to wait for the side path), starts or ends.  requests: which ones, in order
    of their taking.  path: its name, empty for an arrival.  batch: its number, -1 for none."""

    at_ms: float
    what: str
    requests: tuple[int, ...]
    path: str = ""
    batch: int = -1


def event_log(policy: Policy, system: System, load: Load, requests: int, seed: int = 0) -> list[Event]:
    """Events of a run of so many requests, the load and the service as in replication 0 of `simulate`."""
    if requests * 4 > MOST_EVENTS:
        raise WrongUsage(
            f"an event log of {requests:,} requests", where="--log", remedy=f"Log at most {MOST_EVENTS // 4:,}."
        )
    streams = Streams(seed)
    served = run(policy, system, draw(load, requests, 0.0, system, streams), streams, log=True)
    return events_of(served, system)


def events_of(served: Replication, system: System) -> list[Event]:
    """The log of a run that was made with `log=True`."""
    names = [path.name for path in system.paths]
    found = [(float(t), ARRIVES, i, Event(float(t), WORDS[ARRIVES], (i,))) for i, t in enumerate(served.arrive_ms)]
    for i in np.flatnonzero(~np.isnan(served.out.moved)).tolist():
        t = float(served.out.moved[i])
        found.append((t, MOVES, i, Event(t, WORDS[MOVES], (i,), names[-1])))
    members: dict[int, list[int]] = {}
    for i in np.flatnonzero(served.path >= 0).tolist():
        members.setdefault(int(served.out.batch[i]), []).append(i)
    for batch, taken in members.items():
        path = names[int(served.path[taken[0]])]
        begun = float(served.out.start[taken[0]])
        ended = float(served.arrive_ms[taken[0]] + served.response_ms[taken[0]])
        found.append((begun, STARTS, batch, Event(begun, WORDS[STARTS], tuple(taken), path, batch)))
        found.append((ended, ENDS, batch, Event(ended, WORDS[ENDS], tuple(taken), path, batch)))
    found.sort(key=lambda row: row[:3])
    return [row[3] for row in found]
