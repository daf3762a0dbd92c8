"""Fit many systems in parallel, one process per processor core: a fit is many short NumPy calls under the GIL.

Not by `multiprocessing`, which would import the user's script.
"""

import os
import pickle
import sys
from collections.abc import Callable, Generator
from concurrent.futures import as_completed
from dataclasses import dataclass
from queue import SimpleQueue
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from latfit.errors import LatfitError, first_line
from latfit.fitting.bootstrap import DoubtOptions
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.messages import message
from latfit.model import FitResult, FitStatus
from latfit.threads import on_threads
from latfit.trace import Trace

WORKER = "from latfit.fitting.many_fits import run_worker; run_worker()"
SEVERAL = 8  # systems; for fewer, starting processes (half a second each) costs more

Outcome = FitResult | Exception
"""A fit, or the error that ended it."""
Outcomes = Generator[tuple[int, Outcome]]
"""(number of a system, its outcome), in order of completion."""


@dataclass(frozen=True)
class FitTask:
    rows: Trace
    options: FitOptions
    doubt: DoubtOptions
    data: dict[str, Any]
    provenance: dict[str, Any]

    def run(self) -> Outcome:
        try:
            return fit_trace(self.rows, self.options, doubt=self.doubt, data=self.data, provenance=self.provenance)
        except Exception as error:  # noqa: BLE001  any error ends this fit only
            return error


def failed_fit(model: str, error: Exception) -> FitResult:
    found, remedy = f"{type(error).__name__}: {first_line(error)}", FitStatus.FAILED.remedy
    if isinstance(error, LatfitError):
        found, remedy = error.found, error.remedy
    return FitResult(model, FitStatus.FAILED, {}, warnings=[message("failed", found=found, remedy=remedy)])


def fit_all(task: Callable[[int], FitTask], systems: int, workers: int | None = None) -> Outcomes:
    """Yield the outcome of each system. workers: processes; None: one per core for SEVERAL or more systems, else 1."""
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = cores if systems >= SEVERAL else 1
    if min(workers, systems) < 2:
        yield from ((number, task(number).run()) for number in range(systems))
        return
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    streams: Any = {"stdin": PIPE, "stdout": PIPE, "stderr": DEVNULL, "start_new_session": True}
    running: list[Popen[bytes]] = []
    free: SimpleQueue[Popen[bytes] | None] = SimpleQueue()
    for _ in range(workers):
        free.put(None)

    def fit(number: int) -> tuple[int, Outcome]:
        process = free.get()
        if process is None:
            process = Popen([sys.executable, "-P", "-c", WORKER], env=environment, **streams)
            running.append(process)
        try:
            pickle.dump(task(number), process.stdin, protocol=5)  # type: ignore[arg-type]
            process.stdin.flush()  # type: ignore[union-attr]
            outcome: Outcome = pickle.load(process.stdout)  # type: ignore[arg-type]
        except (OSError, EOFError, pickle.PickleError):
            process.kill()
            process, outcome = None, RuntimeError("the fitting process died (out of memory?)")
        free.put(process)
        return number, outcome

    try:
        with on_threads(workers) as threads:
            for done in as_completed([threads.submit(fit, number) for number in range(systems)]):
                yield done.result()
    finally:
        for process in running:
            process.kill()
            process.wait()


def run_worker() -> None:
    """Run a fitting process: answer tasks from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep library output out of the answers
    while True:
        try:
            task: FitTask = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        found = task.run()
        try:
            pickle.loads(content := pickle.dumps(found, protocol=5))
        except Exception as error:  # noqa: BLE001  unpickling runs another library's constructor
            content = pickle.dumps(RuntimeError(f"{type(found).__name__}: {first_line(error)}"), protocol=5)
        answers.write(content)
        answers.flush()
