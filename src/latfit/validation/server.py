"""Read what a server counted of a run from its `/metrics` texts before and after it.

Client, server and engine measure a request on three clocks: docs/theory/planning.md, "Validation".
"""

import math
from dataclasses import dataclass
from pathlib import Path

from latfit.errors import BadInput
from latfit.metrics import Interval, ServerState, read_state
from latfit.trace import open_source

TPOT = ("tpot", "itl")
"""In order of preference: `itl`, the gap between tokens, is a mean over tokens, not requests."""
COUNTS = ("preemptions", "prefix_queries", "prefix_hits", "draft_tokens", "accepted_tokens")


@dataclass(frozen=True, repr=False)
class ServerRun:
    """A run as a server counted it."""

    seen: Interval
    source: str

    @property
    def requests(self) -> int:
        return round(self.seen.seen("latency"))

    @property
    def counts(self) -> dict[str, float]:
        return {name: self.seen.count(name) for name in COUNTS if name in self.seen.last.counters}

    @property
    def names(self) -> dict[str, str]:
        """The histogram of each metric."""
        tpot = next(name for name in TPOT if self.seen.seen(name) > 0)
        return {"ttft_ms": "ttft", "tpot_ms": tpot, "latency_ms": "latency"}

    def server_ms(self) -> dict[str, float]:
        return {metric: self.seen.mean(name) for metric, name in self.names.items()}

    @property
    def has_engine(self) -> bool:
        return all(self.seen.seen(name) > 0 for name in ("queue", "prefill", "inference"))

    def engine_ms(self) -> dict[str, float]:
        found = self.server_ms()
        if self.has_engine:
            queue, prefill, inference = map(self.seen.mean, ("queue", "prefill", "inference"))
            found |= {"ttft_ms": queue + prefill, "latency_ms": queue + inference}
        return found

    def quantile_ms(self, metric: str, q: float) -> tuple[float, float]:
        found = self.seen.histogram(self.names[metric])
        return (math.nan, math.nan) if found is None else found.bucket(q)


def read_server(after: str | Path, before: str | Path | None = None) -> ServerRun:
    """Read a run from `/metrics` texts; without the first, since the server started. Raises BadInput."""
    last = read_state(open_source(after))
    first = ServerState(last.engine) if before is None else read_state(open_source(before))
    if last.fell_below(first):
        remedy = "Give the two texts of one server in their order; it may have started again in between."
        raise BadInput("its counters are below those of the text from before", where=str(after), remedy=remedy)
    seen = Interval(first, last, seconds=1.0)
    needed = {"TTFT": ("ttft",), "TPOT": TPOT, "latency": ("latency",)}
    if missing := [text for text, names in needed.items() if not last.histograms.keys() & set(names)]:
        found = f"{last.engine} publishes no histograms of {', '.join(missing)}"
        remedy = "Save all of /metrics, or measure with a load generator and compare with its result alone."
        raise BadInput(found, where=str(after), remedy=remedy)
    if not all(any(seen.seen(name) > 0 for name in names) for names in needed.values()):
        found = "no request finished between the two texts" if before else "no finished request in it"
        raise BadInput(found, where=str(after), remedy="Save http://SERVER/metrics before and after the run.")
    return ServerRun(seen, Path(after).name)
