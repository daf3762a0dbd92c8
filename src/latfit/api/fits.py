"""Fits as a library: made from anything that can be read, applied, compared, stored."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latfit.errors import FitNotUsable
from latfit.model import FitResult, fit_from_json, read_fit, write_fit


@dataclass(frozen=True, repr=False)
class Fit:
    """A latency model fitted to steps, with its doubts.

    result: the whole record (`latfit.model.FitResult`).  path: the execution path that the steps ran on, where the
    source or the user said so.
    """

    result: FitResult
    path: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit fit --json` and of a `.fit.json` file."""
        return self.result.to_json()

    @classmethod
    def from_json(cls, document: Any, path: str | None = None) -> "Fit":
        """The fit in a decoded document. Raises BadInput that names what is wrong with it."""
        return cls(fit_from_json(document, "the document"), path)

    def save(self, target: str | Path) -> None:
        """Write a `.fit.json` file whole or not at all. Raises TargetNotWritable."""
        write_fit(Path(target), self.result)

    @classmethod
    def load(cls, source: str | Path, path: str | None = None) -> "Fit":
        """The fit in a `.fit.json` file. Raises BadInput."""
        return cls(read_fit(Path(source)), path)


def as_fit(source: Any) -> Fit:
    """A fit from what stands for one: a Fit, a FitResult, a `.fit.json` file. Raises BadInput, FitNotUsable."""
    if isinstance(source, Fit):
        found = source
    elif isinstance(source, FitResult):
        found = Fit(source)
    else:
        found = Fit.load(source)
    status = found.result.status
    if not status.ok:
        raise FitNotUsable(status.sentence, where=str(source)[:200], remedy=status.remedy)
    return found
