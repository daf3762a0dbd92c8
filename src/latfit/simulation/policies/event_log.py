"""The event log of a policy run: arrivals, starts and ends of batches in order of time."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from latfit.errors import WrongUsage
from latfit.files import write_text
from latfit.policies import Policy
from latfit.simulation.policies.replication import draw, run
from latfit.simulation.policies.service import System
from latfit.workload import Load, Streams

MOST_LOGGED = 1_250_000

ORDER = ("ends", "arrives", "starts")
"""Order of simultaneous events: services end, requests arrive, then the policy acts."""


class Event(NamedTuple):
    """An event; `requests` in the order of their taking, `path` empty for an arrival, `batch` -1 for an arrival."""

    at_ms: float
    what: str
    requests: tuple[int, ...]
    path: str = ""
    batch: int = -1


def event_log(policy: Policy, system: System, load: Load, requests: int, seed: int = 0) -> list[Event]:
    """Return the events of a run of so many requests, with load and service as in replication 0 of `simulate`."""
    if requests > MOST_LOGGED:
        found = f"an event log of {requests:,} requests"
        raise WrongUsage(found, where="--log", remedy=f"Log at most {MOST_LOGGED:,}.")
    streams = Streams(seed)
    served = run(policy, system, draw(load, requests, 0.0, system, streams), streams, log=True)
    events = [Event(float(t), "arrives", (i,)) for i, t in enumerate(served.arrive_ms)]
    members: dict[int, list[int]] = {}
    for i in np.flatnonzero(served.path >= 0).tolist():
        members.setdefault(int(served.out.batch[i]), []).append(i)
    for batch, taken in members.items():
        first, path = taken[0], system.paths[int(served.path[taken[0]])].name
        ended = float(served.arrive_ms[first] + served.response_ms[first])
        events.append(Event(float(served.out.start[first]), "starts", tuple(taken), path, batch))
        events.append(Event(ended, "ends", tuple(taken), path, batch))
    return sorted(events, key=lambda each: (each.at_ms, ORDER.index(each.what), each.batch, each.requests[0]))


def write_events(target: Path, events: Sequence[Event]) -> None:
    """Write a log as CSV, an event a row; requests between spaces."""
    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(("at_ms", "what", "path", "batch", "requests"))
    for each in events:
        batch = "" if each.batch < 0 else each.batch
        rows.writerow((f"{each.at_ms:.6f}", each.what, each.path, batch, " ".join(map(str, each.requests))))
    write_text(target, stream.getvalue())
