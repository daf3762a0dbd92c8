"""Times of requests that a recorder counted: by bins of 1 %, so that counts of several files add up."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from latfit.trace.serving_engine import parts_of

REQUEST_TIMES = "request_times_so_far"
"""Fact of a recorded file: counts by bin since its run began, by the names ttft_ms and tpot_ms."""
BINS_PER_E = 100
"""Bins of ln ms: each is 1 % wide."""


def time_bin(ms: float) -> int:
    """Return the bin of a time."""
    return round(BINS_PER_E * math.log(ms))


def request_times(provenance: Mapping[str, Any]) -> dict[str, Counter[int]]:
    """Return the counts of all runs by name: of each run those of its last file, which hold all before."""
    last: dict[tuple[str, str], Counter[int]] = {}
    for _, origin in parts_of("", provenance):
        known = origin.get(REQUEST_TIMES)
        for name, counts in known.items() if isinstance(known, Mapping) else ():
            found = Counter({int(place): int(n) for place, n in counts.items()})
            key = str(origin.get("run")), str(name)
            last[key] = max(last.get(key, found), found, key=Counter.total)
    merged: dict[str, Counter[int]] = {}
    for (_, name), counts in last.items():
        merged.setdefault(name, Counter()).update(counts)
    return merged


def time_quantile(counts: Counter[int], q: float) -> float:
    """Return a quantile in ms, within half a percent."""
    reached, total = 0, counts.total()
    for place in sorted(counts):
        reached += counts[place]
        if reached >= q * total:
            return math.exp(place / BINS_PER_E)
    return math.nan
