"""Fit many systems in parallel, one process per processor core: a fit is many short NumPy calls under the GIL.

Not by `multiprocessing`, which would import the user's script. Of very many systems some are fitted with every model,
the others with those that win often.
"""

import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from queue import SimpleQueue
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from latfit.errors import LatfitError, first_line
from latfit.fitting.bootstrap import DoubtOptions
from latfit.fitting.fit import fit_trace
from latfit.fitting.model_selection import is_auto
from latfit.fitting.problem import FitOptions
from latfit.messages import message
from latfit.model import CORRECTION, FitResult, FitStatus
from latfit.threads import on_threads
from latfit.trace import Trace

WON_SHARE = 0.1
ALWAYS = ("constant", "linear")


@dataclass(frozen=True)
class Shortlist:
    """Models to try (and CORRECTION), and the largest held-out error in percent of the systems that chose them."""

    models: tuple[str, ...]
    error_pct: float

    def holds(self, found: FitResult) -> bool:
        error = found.cross_validation.mape_pct
        return error is not None and error <= self.error_pct


def shortlist_of(probed: Sequence[FitResult]) -> Shortlist | None:
    """Return the models that won often enough; None where no probed system compared models."""
    compared = [found for found in probed if found.cross_validation.selection and found.cross_validation.mape_pct]
    won = Counter(found.model for found in compared)
    won[CORRECTION] = sum(found.correction is not None for found in compared)
    chosen = [name for name, times in won.items() if times and times >= WON_SHARE * len(compared)]
    errors = [found.cross_validation.mape_pct or 0.0 for found in compared]
    return Shortlist(tuple(dict.fromkeys([*ALWAYS, *chosen])), max(errors)) if errors else None


SERVE = "from latfit.fitting.many_fits import serve; serve()"
SEVERAL = 8  # systems from which processes pay; each takes half a second to start
PROBED, MANY = 32, 100  # systems fitted with every candidate; number above which the others use a shortlist

Outcome = FitResult | Exception
"""A fit, or the error that ended it."""
Outcomes = Generator[tuple[int, Outcome]]
"""(number of a system, its outcome), in order of completion."""


@dataclass(frozen=True)
class FitTask:
    """One system to fit. shortlist: models to try, None for all."""

    rows: Trace
    options: FitOptions
    doubt: DoubtOptions
    data: dict[str, Any]
    provenance: dict[str, Any]
    shortlist: Shortlist | None = None

    def done(self) -> Outcome:
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
    probed: list[int] = []
    if systems >= MANY and is_auto(task(0).options.model):
        probed = [(2 * i + 1) * systems // (2 * PROBED) for i in range(PROBED)]
    fits: list[FitResult] = []
    for number, outcome in _in_parallel(task, probed, workers):
        fits += [outcome] if isinstance(outcome, FitResult) else []
        yield number, outcome
    short = shortlist_of(fits)
    rest = sorted(set(range(systems)) - set(probed))
    yield from _in_parallel(lambda number: replace(task(number), shortlist=short), rest, workers)


def _in_parallel(task: Callable[[int], FitTask], numbers: Sequence[int], workers: int) -> Outcomes:
    workers = min(workers, len(numbers))
    if workers < 2:
        yield from ((number, task(number).done()) for number in numbers)
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
            process = Popen([sys.executable, "-P", "-c", SERVE], env=environment, **streams)
            running.append(process)
        try:
            pickle.dump(task(number), process.stdin, protocol=5)  # type: ignore[arg-type]
            process.stdin.flush()  # type: ignore[union-attr]
            outcome: Outcome = pickle.load(process.stdout)  # type: ignore[arg-type]
        except (OSError, EOFError, pickle.PickleError):
            process.kill()
            process, outcome = None, RuntimeError("the process that made the fit has ended")
        free.put(process)
        return number, outcome

    try:
        with on_threads(workers) as threads:
            for done in as_completed([threads.submit(fit, number) for number in numbers]):
                yield done.result()
    finally:
        for process in running:
            process.kill()
            process.wait()


def serve() -> None:
    """Run a fitting process: answer tasks from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep library output out of the answers
    while True:
        try:
            task: FitTask = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        found = task.done()
        try:
            pickle.loads(content := pickle.dumps(found, protocol=5))
        except Exception as error:  # noqa: BLE001  unpickling runs another library's constructor
            content = pickle.dumps(RuntimeError(f"{type(found).__name__}: {first_line(error)}"), protocol=5)
        answers.write(content)
        answers.flush()
