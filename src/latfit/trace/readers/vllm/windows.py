"""A vLLM log without iteration lines: what its server logs every ten seconds, as a row a window.

    (APIServer pid=1) INFO 11-22 12:26:31 [loggers.py:335] Engine 000: Avg prompt throughput: 231.5 tokens/s, Avg
        generation throughput: 45.3 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%, ...

Every running request gets one token a step, so with B requests and g generated tokens a second a step takes B/g
seconds, and p prompt tokens a second are p B/g a step. `Running` is of the moment of the line: B is the mean of both
ends of the window, and where these differ by more than a third of it nobody knows what it was in between: such windows
are counted (`unsteady`) and left out. One that begins or ends without a request was idle for a part of it that nobody
tells either, and is flagged `idle`. How the steps of a window differ is not in these lines, and a load that comes and
goes within ten seconds is not either: they are good for a server that is busy all the time.
"""

import re
from collections.abc import Iterator

import numpy as np

from latfit.trace.readers.vllm.runs import seconds_of
from latfit.trace.readers.vllm.steps import LOOK_BACK, Engines, engines_and_times, rank_of
from latfit.trace.table import Trace

MARK = b"Avg prompt throughput: "
TOLD = re.compile(
    rb"Avg prompt throughput: (\d{1,12}(?:\.\d{1,6})?) tokens/s, Avg generation throughput: (\d{1,12}(?:\.\d{1,6})?)"
    rb" tokens/s, Running: (\d{1,9}) reqs, Waiting: (\d{1,9}) reqs"
)
LONGEST_S = 120.0
"""Lines farther apart are no neighbours."""
UNSTEADY = 1 / 3
"""Share of B that its ends may differ by."""


def windows_of_log(lines: Iterator[bytes]) -> Trace | None:
    """The windows of all engines; None where no line tells of one."""
    known, codes, told = Engines(), [], []
    for line in lines:
        at = line.find(MARK)
        if at >= 0 and (found := TOLD.match(line, at)):
            codes.append(known[line[max(at - LOOK_BACK, 0) : at]])
            told.append(tuple(map(float, found.groups())))
    engines, times = engines_and_times(np.array(codes, dtype=np.int64))
    names = [str(max(rank_of(name), 0)) for name, _ in known.numbers]
    before: dict[int, tuple[float, float]] = {}
    unsteady = 0
    rows: list[tuple[float, ...]] = []
    runs: list[str] = []
    for engine, now, each in zip(engines.tolist(), seconds_of(times).tolist(), told, strict=True):
        prompt, generated, running, waiting = each
        start, running_then = before.get(engine, (now, 0.0))
        before[engine] = now, running
        if not 0 < now - start <= LONGEST_S:
            continue
        B = (running + running_then) / 2
        busy = running > 0 and running_then > 0 and generated > 0
        if busy and abs(running - running_then) > UNSTEADY * B:
            unsteady += 1
            continue
        T_s = B / generated if busy else 0.0
        rows.append((start, (now - start) * 1e3, B, max(B, (prompt + generated) * T_s), 1e3 * T_s, waiting, not busy))
        runs.append(names[engine])
    if not rows:
        return None
    t_s, window_ms, B, S, T, waiting, idle = np.array(rows).T
    columns = {"B": B, "S": S, "T_ms": T, "t_s": t_s - t_s.min(), "window_ms": window_ms, "queued_requests": waiting}
    steps = np.divide(window_ms, T, out=np.zeros_like(T), where=T > 0)
    return Trace(
        {**columns, "window_steps": steps, "idle": idle > 0, "run": np.array(runs, dtype=object)},
        {"format": "vllm", "windows": len(rows), "unsteady": unsteady},
    )
