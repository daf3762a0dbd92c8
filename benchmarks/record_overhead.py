"""What recording costs an engine: microseconds a step beside a call that does nothing and beside appending a dict to a
list, rows a second, bytes a row on disk, and growth of resident memory.

In the long run the steps come as fast as Python makes them, thousands of times faster than any engine's, so that the
memory measured is nearly the bound and not what an engine would need.
"""

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from latfit.record.recorder import Buffers, Step, StepRecorder
from latfit.record.vllm_plugin import LatfitStatLogger
from latfit.record.vllm_scheduler import StepsInFlight

STEPS = 10_000_000
TIMED = 500_000
SMOKE = 20_000


def main(smoke: bool = False) -> None:
    """Print the figures."""
    steps, timed = (SMOKE, SMOKE) if smoke else (STEPS, TIMED)
    with tempfile.TemporaryDirectory() as folder:
        # First, because it is this one's memory that is looked at.
        _long_run(Path(folder) / "long", steps)
        _compare(Path(folder), timed)
        _by_request(Path(folder) / "scheduler", max(timed // 50, 200))


def _compare(folder: Path, steps: int) -> None:
    """Each call timed by itself; the clock's own cost is in all of them, the first line shows it."""
    kept: list[dict[str, float]] = []
    recorder = StepRecorder(folder / "recorder", buffers=Buffers(rows_per_file=steps + 1))
    recorded = StepRecorder(folder / "plugin", buffers=Buffers(rows_per_file=steps + 1))
    plugin = LatfitStatLogger(_no_config())
    plugin.recorder = recorded
    stats = _statistics()
    sides: dict[str, Callable[[int], object]] = {
        "no-op": lambda _: None,
        "list.append of a dict": lambda i: kept.append(
            {"step": i, "T_ms": 10.25, "B": 33, "S": 544, "kv_usage": 0.5, "queued": 3, "t_s": time.monotonic()}
        ),
        "StepRecorder.add": lambda i: recorder.add(Step(i, 10.25, 1, 512, 32, 32, queued_requests=3, kv_usage=0.5)),
        "LatfitStatLogger.record": lambda _: plugin.record(stats, None, mm_cache_stats=None, engine_idx=0),
    }
    for name, call in sides.items():
        times = _each_us(call, steps)
        median, high = np.quantile(times, (0.5, 0.99))
        print(f"record overhead: {name}: median {median:.2f} µs, p99 {high:.2f} µs a step")
    recorder.close()
    recorded.close()


def _by_request(folder: Path, steps: int) -> None:
    """What a recording scheduler does of a step with a chunk of a prompt beside requests that decode."""
    steps_of = StepsInFlight(StepRecorder(folder, buffers=Buffers(rows_per_file=steps + 1)), 0)
    steps_of.latest = _statistics()
    for decoding in (7, 63, 255):
        known = {
            f"request-{i}": SimpleNamespace(num_computed_tokens=501, num_prompt_tokens=500) for i in range(decoding)
        }
        known["chunk"] = SimpleNamespace(num_computed_tokens=512, num_prompt_tokens=900, num_output_tokens=0)
        scheduled = {**dict.fromkeys(known, 1), "chunk": 512}
        total = sum(scheduled.values())
        planned = [
            SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=total) for _ in range(steps)
        ]

        def record(i: int, planned: list[SimpleNamespace] = planned, known: dict[str, SimpleNamespace] = known) -> None:
            steps_of.plan(planned[i], known)
            steps_of.end(planned[i], time.monotonic(), 0)

        median, high = np.quantile(_each_us(record, steps), (0.5, 0.99))
        print(
            f"record overhead: RecordingScheduler, {decoding + 1} requests: "
            f"median {median:.1f} µs, p99 {high:.1f} µs a step"
        )
    steps_of.recorder.close()


def _long_run(folder: Path, steps: int) -> None:
    """As fast as it goes; waits for the disk now and then, as no engine does, so that every row arrives."""
    recorder = StepRecorder(folder, labels={"path": "gpu", "model": "org/model-8b"})
    recorder.kv_capacity_tokens = 1_000_000
    random = np.random.default_rng(0)
    size = 1 << 14
    T = random.lognormal(2.3, 0.2, size).tolist()
    decode = random.integers(1, 257, size).tolist()
    usage = random.random(size).tolist()
    before, settled, busy = _resident_mib(), 0.0, 0.0
    for first in range(0, steps, size):
        start = time.perf_counter()
        for i in range(min(size, steps - first)):
            recorder.add(Step(first + i, T[i], 0, 0, decode[i], decode[i], queued_requests=3, kv_usage=usage[i]))
        busy += time.perf_counter() - start
        while first - recorder.rows_written > 4 * 65_536:
            time.sleep(0.001)
        if first <= steps // 10:
            settled = _resident_mib()
    recorder.close(timeout_s=60)
    after = _resident_mib()
    stored = sum(file.stat().st_size for file in folder.glob("*.parquet"))
    print(
        f"record overhead: {steps:,} steps: {steps / busy / 1e6:.2f} million rows/s in the engine's thread, "
        f"{stored / max(1, recorder.rows_written):.1f} bytes/row on disk, {recorder.rows_dropped:,} dropped; "
        f"resident memory {settled - before:+.0f} MiB in the first tenth, {after - settled:+.0f} MiB in the rest"
    )


def _resident_mib() -> float:
    """What the process has in memory now; its peak where the system does not say."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _each_us(call: Callable[[int], object], steps: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    times = np.empty(steps)
    clock = time.perf_counter
    for i in range(steps):
        start = clock()
        call(i)
        times[i] = clock() - start
    return times * 1e6


def _statistics() -> SimpleNamespace:
    details = SimpleNamespace(
        iteration_index=7,
        elapsed_ms=10.25,
        num_ctx_requests=1,
        num_ctx_tokens=512,
        num_generation_requests=32,
        num_generation_tokens=32,
        num_encoder_inputs=0,
        num_encoder_output_tokens=0,
        is_dummy=False,
    )
    return SimpleNamespace(
        iteration_details=details, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5
    )


def _no_config() -> SimpleNamespace:
    """Enough for a plug-in that is given its recorder by hand: without LATFIT_TRACE_DIR it looks at no setting."""
    return SimpleNamespace()


if __name__ == "__main__":
    main()
