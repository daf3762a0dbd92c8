"""What a server says of the requests that it served: its `/metrics` texts from before and after a run.

Counters and histograms of Prometheus only grow, so a run is the difference of two texts; without the first it is all
since the server started (`latfit.metrics`).

Three clocks tell of a request:

- the client's (a load generator's result): from sending it to receiving its tokens.
- the server's: TTFT, TPOT and latency from the moment that its API process has the request, tokenising it included.
- the engine's: queue, prefill and decode time, from when the scheduler has it to when a step gave its token. What the
  engine makes of a request, and what a simulation of its steps is held against: TTFT = queue + prefill, latency =
  queue + inference, TPOT as the server has it, whose distances of tokens are the engine's own. vLLM's scheduler takes
  requests between two steps, so that the rest of the step that runs when one comes is in none of these.

Client - server is the network and the load generator; server - engine is tokenising, passing on, and that rest.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from latfit.engines import engine_named
from latfit.errors import BadInput
from latfit.metrics import Buckets, Interval, ServerState, read_state
from latfit.trace import open_source

TPOT = ("tpot", "itl")
"""The first that a version has; gaps between tokens are a mean over tokens, not over requests."""
TIMES = ("ttft", "latency", *TPOT, "queue", "prefill", "inference")
COUNTS = ("preemptions", "prefix_queries", "prefix_hits", "draft_tokens", "accepted_tokens")


@dataclass(frozen=True, repr=False)
class ServerRun:
    """What a server says of a run. times: histograms in ms, by `TIMES`; counts: by `COUNTS`; facts: settings, by the
    names of a recorder's provenance.  started_s: when its counters were made, in seconds since 1970, None where it does
    not tell."""

    times: Mapping[str, Buckets]
    counts: Mapping[str, float]
    facts: Mapping[str, Any]
    source: str
    started_s: float | None = None

    @property
    def requests(self) -> int:
        return round(self.times["latency"].count)

    @property
    def tpot(self) -> Buckets:
        return next(self.times[name] for name in TPOT if name in self.times)

    @property
    def of_tokens(self) -> bool:
        """Whether its TPOT is a mean over tokens and not over requests."""
        return TPOT[0] not in self.times

    def server_ms(self) -> dict[str, float]:
        """Mean TTFT, TPOT and latency as the server counts them."""
        means = {"ttft_ms": self.times["ttft"].mean, "tpot_ms": self.tpot.mean}
        return {**means, "latency_ms": self.times["latency"].mean}

    @property
    def has_engine(self) -> bool:
        """Whether it tells the engine's own times."""
        return all(name in self.times for name in ("queue", "prefill", "inference"))

    def engine_ms(self) -> dict[str, float]:
        """Mean TTFT, TPOT and latency of the engine alone; of the server where it does not tell the engine's."""
        found = self.server_ms()
        if self.has_engine:
            queue, prefill, inference = (self.times[name].mean for name in ("queue", "prefill", "inference"))
            found |= {"ttft_ms": queue + prefill, "latency_ms": queue + inference}
        return found

    def quantile_ms(self, metric: str, q: float) -> tuple[float, float]:
        """The bucket in ms that the server's quantile of a metric lies in."""
        found = {"ttft_ms": self.times["ttft"], "tpot_ms": self.tpot, "latency_ms": self.times["latency"]}[metric]
        return found.bucket(q)


def read_server(after: str | Path, before: str | Path | None = None) -> ServerRun:
    """A run from a server's `/metrics` texts. Raises BadInput where one is no such text, where a time is missing, and
    where counters fell, so that the server started again in between."""
    last = read_state(open_source(after))
    first = ServerState(last.engine) if before is None else read_state(open_source(before))
    if last.fell_below(first):
        raise BadInput(
            "its counters are below those of the text from before",
            where=str(after),
            remedy="Give the two texts of one server in their order; it may have started again in between.",
        )
    run = Interval(first, last, seconds=1.0)
    found = {name: run.histogram(name) for name in TIMES}
    times = {name: seen for name, seen in found.items() if seen is not None and seen.count > 0}
    if not engine_named(last.engine).histograms:
        raise BadInput(
            f"{last.engine} publishes no histograms of TTFT, TPOT and latency",
            where=str(after),
            remedy="Measure with a load generator, and compare with its result alone.",
        )
    if not {"ttft", "latency"} <= set(times) or not any(name in times for name in TPOT):
        raise BadInput(
            "no request finished between the two texts" if before else "no finished request in it",
            where=str(after),
            remedy="Save http://SERVER/metrics before and after the run.",
        )
    counts = {name: run.count(name) for name in COUNTS if name in last.counters}
    return ServerRun(times, counts, last.facts, Path(after).name, _started_s(after))


_CREATED = re.compile(rb"vllm:\w{1,100}_created(?:\{[^}]{0,20000}\})?\s+(\d{1,12}(?:\.\d{1,20})?(?:e\+\d\d)?)\s*")
MOST_LINES = 1_000_000


def _started_s(source: str | Path) -> float | None:
    """The first moment at which a counter of vLLM was made."""
    with open_source(source).open() as stream:
        found = [float(told[1]) for line in islice(stream, MOST_LINES) if (told := _CREATED.fullmatch(line))]
    return min(found, default=None)
