"""How often doctor believes the right sequence limit of a recorded vLLM, and a wrong one, and what it advises.

`python -m benchmarks.engine_loop.advice [--seconds 30] [--fit NAME]`, with the measured data beside the checkout.

Readings are put together from the recorded steps of a server and the requests of its load generator, served first come,
first served: a request begins with the prompt that a step holds and ends as many tokens later as it generated. Each
run is cut into readings every 8 s, and examined with the limit that the server had and with 128, at the measured speed.
"""

import argparse
import gzip
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from latfit.api.requests import DoctorRequest
from latfit.api.running.examination import Examination, engine_of, limits_of
from latfit.api.running.what_if import WhatIf
from latfit.metrics import Buckets, Reading, ServerState, between, diagnose, read_state
from latfit.stats import FloatArray
from latfit.trace import Trace, open_source, read_parquet

DATA = Path(os.environ.get("LATFIT_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "vllm_amx"
RUNS = {
    "lim4_r3": ("lim4", 4), "lim4b_r3": ("lim4", 4), "lim4c_r3": ("lim4", 4), "lim4d_r3": ("lim4", 4),
    "lim8_r3": ("lim8", 8), "slow_r2": ("slow", 11),
    "r1.5": ("rec", 128), "r3": ("rec", 128), "r4": ("rec", 128), "r5": ("rec", 128),
}  # fmt: skip
"""Load generator's result -> (server, its sequence limit)."""
EVERY_S, FIRST_S, LAST_S = 8.0, 5.0, 8.0


class Replay:
    """A recorded run from moment to moment, on a clock that begins before its first step."""

    def __init__(self, name: str) -> None:
        parts = [read_parquet(file) for file in sorted((DATA / "traces").glob(f"{RUNS[name][0]}-trace-*.parquet"))]
        found = {
            each: np.concatenate([part.floats(each) for part in parts]) for each in parts[0].columns if _needed(each)
        }
        steps = Trace(found).select(np.argsort(found["step"], kind="stable"))
        with gzip.open(DATA / "bench" / f"{name}.json.gz", "rt") as stream:
            result = json.load(stream)
        order = np.argsort(result["start_times"], kind="stable")
        sent, ttft = (np.array(result[column])[order] for column in ("start_times", "ttfts"))
        self.prompt, self.output = (np.array(result[column])[order] for column in ("input_lens", "output_lens"))
        end, prompts = steps.floats("t_s") + steps.floats("T_ms") / 1e3, np.cumsum(steps.floats("prefill_requests"))
        which = self._matched(end, prompts, sent + ttft)
        last = np.minimum(which + self.output - 1, len(end) - 1)
        origin = end[which[0]] - steps.floats("T_ms")[which[0]] / 1e3 - 1.0
        kept = np.arange(int(which[0]), int(last.max()) + 1)
        self.steps, self.end = steps.select(kept), end[kept] - origin
        self.period = np.minimum(np.diff(end, prepend=end[0] - 0.02), 5.0)[kept]
        self.came = sent + np.median(end[which] - (sent + ttft)) - origin
        self.begun = (end - steps.floats("T_ms") / 1e3)[which] - origin
        self.first, self.last = end[which] - origin, end[last] - origin
        after = np.minimum(np.searchsorted(self.end, self.came), len(self.end) - 1)
        ran = self.end[after] - self.period[after] <= self.came
        self.seen = np.where(ran, self.end[after], self.came)  # the scheduler takes requests between two steps
        self.state = read_state(open_source(DATA / "metrics" / f"{name}.after.txt.gz"))

    @staticmethod
    def _matched(end: FloatArray, prompts: FloatArray, first: FloatArray) -> np.ndarray:
        """The step of each request's first token: the alignment at which the two clocks differ least."""
        n = len(first)
        offsets = range(int(prompts[-1]) - n + 1)
        steps = [np.searchsorted(prompts, skipped + 1 + np.arange(n)) for skipped in offsets]
        return min(steps, key=lambda which: float(np.std(end[which] - first)))

    def reading(self, t: float) -> Reading:
        """What the server publishes at a moment, with the edges of its own histograms."""
        done = self.end <= t
        D = (self.steps.floats("B") - self.steps.floats("prefill_requests"))[done]
        F, P = (self.steps.floats(name)[done] for name in ("prefill_requests", "prefill_tokens"))
        since = self.end[done][-1] - self.period[done][-1] if done.any() else -math.inf
        told, ended = self.first <= t, self.last <= t
        running = (self.begun <= since + 1e-9) & ~ended
        several = ended & (self.output > 1)
        values = {
            "ttft": 1e3 * (self.first - self.came)[told],
            "latency": 1e3 * (self.last - self.came)[ended],
            "queue": 1e3 * np.maximum(self.begun - self.seen, 0.0)[ended],
            "tpot": 1e3 * ((self.last - self.first) / np.maximum(self.output - 1, 1))[several],
            "itl": 1e3 * np.repeat(self.period[done], D.astype(int)),
            "step_tokens": D + P,
            "prompt_lengths": 1.0 * self.prompt[ended],
            "output_lengths": 1.0 * self.output[ended],
        }
        state = ServerState(
            "vLLM",
            running=float(running.sum()),
            waiting=float(((self.came <= since) & (self.begun > since + 1e-9)).sum()),
            kv_usage=float(self.steps.floats("kv_usage")[max(int(done.sum()) - 1, 0)]),
            counters={
                "prefill_tokens": float(P.sum()),
                "prompt_tokens": float(P.sum()),
                "generation_tokens": float(D.sum() + F.sum()),
                "finished": float(ended.sum()),
            },
            histograms={name: _counted(each, self.state.histograms[name].edges) for name, each in values.items()},
            facts=self.state.facts,
        )
        return Reading(t, 0.01, b"", state)

    def readings(self, begin: float, seconds: float) -> list[Reading]:
        return [self.reading(begin + i) for i in range(round(seconds) + 1)]


def _needed(column: str) -> bool:
    return column in ("step", "B", "T_ms", "t_s", "prefill_requests", "prefill_tokens", "kv_usage")


def _counted(values: FloatArray, edges: Sequence[float]) -> Buckets:
    reached = np.searchsorted(np.sort(values), np.array(edges), side="right")
    return Buckets(float(len(values)), float(values.sum()), edges, reached.astype(float).tolist())


def examined(readings: Sequence[Reading], fit: Path, limit: int | None) -> Examination:
    """As `latfit doctor --at-measured-speed` examines a server that was read so. limit: None where it is not told."""
    request = DoctorRequest(fit=fit, max_num_seqs=limit)
    seen, diagnosis = between(readings[0], readings[-1]), diagnose(readings, limits_of(request))
    engine = engine_of(seen, diagnosis, {}, request)
    return Examination("recorded", diagnosis, seen, WhatIf(engine, readings, at_measured_speed=True))


def begins(run: Replay, seconds: float) -> Iterator[float]:
    """Moments at which readings begin."""
    yield from np.arange(FIRST_S, float(run.end[-1]) - seconds - LAST_S, EVERY_S).tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long readings are")
    parser.add_argument("--fit", default="rec_steps", help="name of the fit")
    asked = parser.parse_args(arguments)
    if not DATA.is_dir():
        print(f"{DATA}: no measured data", file=sys.stderr)
        return 1
    fit, believed = DATA / "fits" / f"{asked.fit}.fit.json", Counter[tuple[str, bool]]()
    for name, (_, limit) in RUNS.items():
        run = Replay(name)
        for begin in begins(run, asked.seconds):
            readings = run.readings(begin, asked.seconds)
            for kind, given in (("right", limit), ("128", 128)):
                if kind == "right" or limit != 128:
                    what_if = examined(readings, fit, given).what_if
                    assert what_if is not None
                    believed[kind, what_if.believed] += 1
        for told in (None, limit):
            found = examined(run.readings(20.0, asked.seconds), fit, told)
            print(f"\n{name}, limit {limit}, told {told or 'nothing'}: {found.verdict}")
            print("\n".join(found.lines[3:]))
    print("\nReadings that agree, of all:")
    for kind in ("right", "128"):
        print(f"  told {kind}: {believed[kind, True]} of {believed[kind, True] + believed[kind, False]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
