"""Two fits or more side by side, with a verdict on what changed."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack

from latfit.api.fits import Fit, as_fit
from latfit.api.quantities import Needs, library_verb, only_with, percent
from latfit.api.reading import ReadOptions
from latfit.errors import WrongUsage
from latfit.fitting import Change, change
from latfit.units import format_percent


@dataclass(frozen=True, repr=False)
class Comparison:
    """The latency of fits against that of the first, the baseline, where both have measured.

    names: of the fits, the baseline first.  changes: of each other one, relative.  tolerance_pct: a slowdown from which
    it is a regression.  fits: the fits themselves, where they are at hand.
    """

    names: Sequence[str]
    changes: Sequence[Change]
    tolerance_pct: float
    fits: Sequence[Fit] = field(default=(), compare=False)

    @property
    def baseline(self) -> str:
        return self.names[0]

    @property
    def verdicts(self) -> list[str]:
        """slower, faster or as fast, of each but the baseline."""
        return [found.verdict(self.tolerance_pct) for found in self.changes]

    @property
    def slower(self) -> list[str]:
        """Names of those that are slower by more than the tolerance."""
        return [name for name, found in zip(self.names[1:], self.verdicts, strict=True) if found == "slower"]

    @property
    def states(self) -> list[Literal["good", "bad"]]:
        """bad: a regression; of each but the baseline."""
        return ["bad" if found == "slower" else "good" for found in self.verdicts]

    @property
    def sentences(self) -> list[str]:
        """The verdict on each but the baseline, with the change of the median step and its 95 % interval."""
        words = {"slower": "slower than", "faster": "faster than", "as fast": "as fast as"}
        return [
            f"{name} is {words[verdict]} {self.baseline}: median latency {_signed(found.median)}{_interval(found)}."
            for name, found, verdict in zip(self.names[1:], self.changes, self.verdicts, strict=True)
        ]

    @property
    def range_lines(self) -> list[str]:
        """How single steps changed, of each but the baseline."""
        return [
            f"Over {found.points:,} common (B, S) steps: {_signed(found.least)} to {_signed(found.most)}"
            f" (tolerance {format_percent(self.tolerance_pct)})."
            for found in self.changes
        ]

    @property
    def table(self) -> Any:
        """DataFrame: verdict, change of the median step in percent, its 95 % interval, least and most, by name."""
        import pandas as pd

        rows = [
            {
                "verdict": verdict,
                **{
                    f"{name}_pct": None if value is None else 100 * value
                    for name, value in vars(found).items()
                    if name != "points"
                },
                "points": found.points,
            }
            for found, verdict in zip(self.changes, self.verdicts, strict=True)
        ]
        return pd.DataFrame(rows, index=pd.Index(self.names[1:], name="source"))

    def summary(self) -> str:
        """What `latfit compare` prints."""
        pairs = zip(self.sentences, self.range_lines, strict=True)
        return "\n".join(line for pair in pairs for line in pair)

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit compare --json`."""
        runs = [
            {"source": name, "verdict": verdict, **vars(found)}
            for name, found, verdict in zip(self.names[1:], self.changes, self.verdicts, strict=True)
        ]
        return {"baseline": self.baseline, "tolerance_pct": self.tolerance_pct, "compared": runs}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Comparison":
        """The comparison in a decoded document, without the fits."""
        runs = document["compared"]
        changes = [Change(**{name: run.get(name) for name in Change.__dataclass_fields__}) for run in runs]
        return cls([document["baseline"], *(run["source"] for run in runs)], changes, document["tolerance_pct"])

    def __repr__(self) -> str:
        return f"Comparison: {' '.join(self.sentences)}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.table.to_html(float_format='{:+.1f}'.format)}"


FITTED_HERE = ("seed", *ReadOptions.__annotations__)
OF_COMPARISONS = tuple(
    Needs(
        name,
        lambda o: o.sources is None or not all(str(source).endswith(".json") for source in o.sources),
        "every source is a fit already, nothing is read or fitted",
    )
    for name in FITTED_HERE
    if name != "progress"
)
"""What parameters of `compare` need."""


@library_verb
@only_with(*OF_COMPARISONS)
def compare(
    *sources: Any,
    tolerance: Any = "5%",
    names: Sequence[str] | None = None,
    seed: int = 0,
    **reading: Unpack[ReadOptions],
) -> Comparison:
    """The latency of fits against that of the first, where both have measured.

    sources: two or more: fits, fit files, or whatever `latfit.fit` takes.  tolerance: slowdown from which it is a
    regression, "5%" or 5.  names: of the sources, for the verdict.  reading: as of `latfit.read`, for those that are
    fitted here. Raises WrongUsage, FitNotUsable, BadInput where the fits have no common range.
    """
    tolerance_pct = percent(tolerance, "--tolerance")
    if not tolerance_pct >= 0:
        raise WrongUsage(f"a tolerance of {tolerance_pct:g} %", where="--tolerance", remedy="Give 0 or more.")
    if len(sources) < 2:
        raise WrongUsage("one fit has nothing to be compared with", remedy="Name two or more.")
    fits = [as_fit(source, seed=seed, **reading) for source in sources]
    shown = list(names or (_name(source, i) for i, source in enumerate(sources, start=1)))
    if len(shown) != len(fits):
        raise WrongUsage(f"{len(shown)} names for {len(fits)} fits", where="--names", remedy="Give a name for each.")
    changes = [change(fits[0].result, other.result) for other in fits[1:]]
    return Comparison(shown, changes, tolerance_pct, fits)


def _name(source: Any, position: int) -> str:
    if isinstance(source, str | Path):
        return str(source)
    path = source.path if isinstance(source, Fit) else None
    return f"{path} ({position})" if path else f"fit {position}"


def _signed(share: float) -> str:
    return format_percent(100 * share, signed=True)


def _interval(found: Change) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (95 % interval {_signed(found.low)} to {_signed(found.high)})"
