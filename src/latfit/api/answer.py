"""What verbs return: a verdict, tables, sentences and warnings, printed and shown in notebooks in one way."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from latfit.errors import LatfitError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from latfit.messages import Message
    from latfit.reporting import PlanSummary, Table

State = Literal["good", "doubt", "bad"]


class Answer:
    """Base of answers. Print one for its verdict; `.summary()` is what the command prints."""

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        raise NotImplementedError

    @property
    def state(self) -> State:
        """Whether the answer is good, in doubt or bad."""
        return "good"

    @property
    def lines(self) -> Sequence[str]:
        """Sentences below the verdict."""
        return []

    @property
    def details(self) -> Sequence[str]:
        """Sentences that only `--verbose` shows."""
        return []

    @property
    def messages(self) -> "Sequence[Message | str]":
        """What limits the answer; a sentence alone is a warning."""
        return []

    def tables(self, *, brief: bool = False) -> "list[Table]":
        """The results as tables of text; brief: the few rows that fit a terminal."""
        return []

    def to_json(self) -> dict[str, Any]:
        """The document that the command prints with `--json`."""
        raise NotImplementedError

    def save(self, target: str | Path) -> None:
        """Write the document as JSON, whole or not at all. Raises TargetNotWritable."""
        from latfit.files import write_json

        write_json(Path(target), self.to_json())

    def summary(self) -> str:
        """The answer as the command prints it."""
        from latfit.reporting import table_text

        tables = map(table_text, self.tables(brief=True))
        return "\n".join([self.verdict, *tables, *self.lines, *map(_labelled, self.messages)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.verdict}"

    def plot(self) -> "Figure | None":
        """A matplotlib figure of the answer; None if it has none."""
        return None

    def _repr_html_(self) -> str:
        from latfit.reporting import card_html

        try:
            figure = self.plot()
        except LatfitError:
            figure = None
        sentences = [*self.lines, *map(_labelled, self.messages)]
        return card_html(self.verdict, self.state, self.tables(brief=True), sentences, figure)


class Planned(Answer):
    """Base of plans: a record that is its own JSON, and its summary."""

    result: Any

    @cached_property
    def _summary(self) -> "PlanSummary":
        raise NotImplementedError

    @property
    def feasible(self) -> bool:
        """Whether the targets can be met."""
        return bool(self.result.feasible)

    @property
    def promise(self) -> str:
        """meets, likely or misses."""
        return str(self.result.promise)

    @property
    def warnings(self) -> "list[Message]":
        return list(self.result.warnings)

    @property
    def verdict(self) -> str:
        return self._summary.verdict

    @property
    def state(self) -> State:
        """good (met), doubt (met, but the data do not prove it) or bad (not met)."""
        return self._summary.state

    @property
    def lines(self) -> Sequence[str]:
        return self._summary.lines

    @property
    def details(self) -> Sequence[str]:
        return [*self._summary.others, *self.result.notes]

    @property
    def messages(self) -> Sequence[str]:
        return self._summary.warnings

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit plan --json`."""
        found: dict[str, Any] = self.result.to_json()
        return found


def _labelled(message: "Message | str") -> str:
    """Return a line such as `warning: ...`."""
    if isinstance(message, str):
        return f"warning: {message}"
    return f"warning: {message.text}" if message.needs_action else f"note: {message.message}"
