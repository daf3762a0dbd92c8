"""Fit many systems in parallel, one process per processor core.

Processes, not threads, since a fit is many short NumPy calls under the GIL. They receive rows and return fits by
pickles over pipes, and never import the user's script. With the model `auto`, the first PROBED systems try every
candidate; the others try only models that often won there, unless their held-out error is larger.
"""

import os
import pickle
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from subprocess import DEVNULL, PIPE, Popen
from typing import TYPE_CHECKING, Any

from latfit.errors import LatfitError, first_line
from latfit.messages import Message as LatfitWarning
from latfit.model import FitResult, FitStatus
from latfit.threads import on_threads
from latfit.trace import Trace

if TYPE_CHECKING:
    from latfit.fitting import DoubtOptions, FitOptions, Shortlist

SERVE = "from latfit.api.many_fits import serve; serve()"
SEVERAL = 8
"""Systems from which processes pay; each takes half a second to start."""

PROBED, MANY = 32, 100
"""Systems fitted with every candidate, and number of systems above which the others use a shortlist."""


Outcome = FitResult | Exception
"""A fit, or the error that ended it."""
Outcomes = Generator[tuple[int, Outcome]]
"""(number of a system, its outcome), in order of completion."""


@dataclass(frozen=True)
class FitTask:
    """Everything needed to fit one system. shortlist: models to try, None for all."""

    rows: Trace
    options: "FitOptions"
    doubt: "DoubtOptions"
    data: dict[str, Any]
    provenance: dict[str, Any]
    shortlist: "Shortlist | None" = None

    def done(self) -> Outcome:
        """Return the fit, or the error that ended it."""
        from latfit.fitting import fit_trace

        facts: dict[str, Any] = {"doubt": self.doubt, "data": self.data, "provenance": self.provenance}
        try:
            if self.shortlist is not None:
                options = replace(self.options, candidates=self.shortlist.models)
                found = fit_trace(self.rows, options, **facts)
                if self.shortlist.holds(found):
                    return found
            return fit_trace(self.rows, self.options, **facts)
        except Exception as error:  # noqa: BLE001  any error ends this fit only
            return error


def failed(model: str, error: Exception) -> FitResult:
    """Return the fit record of an error."""
    told, remedy = f"{type(error).__name__}: {first_line(error)}", FitStatus.FAILED.remedy
    if isinstance(error, LatfitError):
        told, remedy = error.found, error.remedy
    return FitResult(model, FitStatus.FAILED, {}, warnings=[LatfitWarning("failed", told, remedy)])


@dataclass
class _Workers:
    """A pool of fitting processes that grows to the number of concurrent fits."""

    free: SimpleQueue["Popen[bytes]"] = field(default_factory=SimpleQueue)
    running: list["Popen[bytes]"] = field(default_factory=list)

    def fit(self, task: FitTask) -> Outcome:
        try:
            process = self.free.get_nowait()
        except Empty:
            process = self._started()
        try:
            found = _asked(process, task)
        except (OSError, EOFError, pickle.PickleError):
            process.kill()
            return RuntimeError("the process that made the fit has ended")
        self.free.put(process)
        return found

    def _started(self) -> "Popen[bytes]":
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = Popen(
            [sys.executable, "-P", "-c", SERVE],
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def end(self) -> None:
        """Kill the processes; callers waiting for an answer see the end of the pipe."""
        for process in self.running:
            process.kill()
            process.wait()


def _asked(process: "Popen[bytes]", task: FitTask) -> Outcome:
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump(task, process.stdin, protocol=5)
    process.stdin.flush()
    found: Outcome = pickle.load(process.stdout)
    return found


def serve() -> None:
    """Run a fitting process: answer tasks from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep library output out of the answers
    while True:
        try:
            task: FitTask = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answers.write(_pickled(task.done()))
        answers.flush()


def _pickled(found: Outcome) -> bytes:
    """Pickle an outcome; an error that cannot be unpickled becomes a RuntimeError."""
    try:
        pickle.loads(content := pickle.dumps(found, protocol=5))
    except Exception as error:  # noqa: BLE001  unpickling runs another library's constructor
        return pickle.dumps(RuntimeError(f"{type(found).__name__}: {first_line(error)}"), protocol=5)
    return content


def cores() -> int:
    """Return the processor cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def all_done(task: Callable[[int], FitTask], systems: int, workers: int | None = None) -> Outcomes:
    """Yield the outcome of each system on completion.

    Parameters
    ----------
    task
        Makes a system's task when its turn comes.
    workers
        Processes; None takes one per core for SEVERAL or more systems, else fits in this process.
    """
    workers = (cores() if systems >= SEVERAL else 1) if workers is None else workers
    first = _spread(systems) if systems >= MANY and _chooses(task(0)) else []
    probed: list[FitResult] = []
    for number, found in _in_parallel(task, first, workers):
        probed += [found] if isinstance(found, FitResult) else []
        yield number, found
    rest = sorted(set(range(systems)) - set(first))
    yield from _in_parallel(_narrowed(task, probed), rest, workers)


def _chooses(task: FitTask) -> bool:
    from latfit.fitting import is_auto

    return is_auto(task.options.model)


def _spread(systems: int) -> list[int]:
    """Return PROBED systems, evenly spread."""
    return [(2 * i + 1) * systems // (2 * PROBED) for i in range(PROBED)]


def _narrowed(task: Callable[[int], FitTask], probed: Sequence[FitResult]) -> Callable[[int], FitTask]:
    from latfit.fitting import shortlist_of

    short = shortlist_of(probed)
    return task if short is None else lambda number: replace(task(number), shortlist=short)


def _in_parallel(task: Callable[[int], FitTask], numbers: Sequence[int], workers: int) -> Outcomes:
    if workers < 2 or len(numbers) < 2:
        yield from ((number, task(number).done()) for number in numbers)
        return
    started, waiting = _Workers(), iter(numbers)
    running: dict[Future[Outcome], int] = {}
    try:
        with on_threads(workers) as threads:
            while True:
                # submit one more than are working, so that none idles
                while len(running) <= workers and (number := next(waiting, None)) is not None:
                    running[threads.submit(started.fit, task(number))] = number
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
    finally:
        started.end()
