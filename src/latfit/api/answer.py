"""What verbs return: a verdict, tables, sentences and warnings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from latfit import reporting
from latfit.errors import FitNotUsable, LatfitError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from latfit.messages import Message
State = Literal["good", "doubt", "bad"]


class Answer:
    """Base of answers. `.summary()` is what the command prints. result: the record."""

    result: Any

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        """What terminal, notebook and page show."""
        raise NotImplementedError

    @property
    def verdict(self) -> str:
        return self._shown.verdict

    @property
    def state(self) -> State:
        return self._shown.state

    @property
    def lines(self) -> Sequence[str]:
        """Sentences below the verdict."""
        return list(self._shown.lines)

    @property
    def details(self) -> Sequence[str]:
        """Sentences that only `--verbose` shows."""
        return list(self._shown.details)

    @property
    def warnings(self) -> "Sequence[Message]":
        return []

    @property
    def messages(self) -> "Sequence[Message | str]":
        """What limits the answer; a plain sentence is a warning."""
        return list(self._shown.messages)

    def tables(self, *, brief: bool = False) -> "list[reporting.table.Table]":
        """brief: the few rows that fit a terminal."""
        shown = self._shown.brief if brief else self._shown.tables or self._shown.brief
        return [table for table in shown if table.rows]

    def to_json(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        return dict(self.result.to_json())

    def save(self, target: str | Path) -> None:
        """Write the document as JSON. Raises TargetNotWritable."""
        from latfit.files import write_json

        write_json(Path(target), self.to_json())

    def summary(self) -> str:
        """Return the answer as the command prints it."""
        tables = map(reporting.table.table_text, self.tables(brief=True))
        return "\n".join([self.verdict, *tables, *self.lines, *map(_labelled, self.messages)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.verdict}"

    def plot(self) -> "Figure | None":
        """Return a matplotlib figure; None if the answer has none."""
        return None

    def _repr_html_(self) -> str:
        try:
            figure = self.plot()
        except LatfitError:
            figure = None
        sentences = [*self.lines, *map(_labelled, self.messages)]
        return reporting.table.card_html(self.verdict, self.state, self.tables(brief=True), sentences, figure)


class WithPage(Answer):
    title = ""

    @property
    def subject(self) -> str:
        return ""

    def page(self, made: "reporting.layout.Making") -> "reporting.layout.Rendered":
        """Return the answer as one self-contained page of HTML."""
        lines = [line for line in self.lines if not isinstance(line, reporting.table.CommandLine)]
        command = "".join(line.partition(": ")[2] for line in self.lines if line not in lines)
        card = reporting.table.Card(self.subject, "", self.verdict, self.state, lines, self._shown.numbers, command)
        return reporting.layout.answer_page(self.title, card, made, self.tables(), self.plot(), self.messages)


@dataclass(frozen=True, repr=False, eq=False)
class PlainAnswer(Answer):
    result: Any
    _shown: "reporting.table.Shown" = field()

    def to_json(self) -> dict[str, Any]:
        return dict(self.result) if isinstance(self.result, Mapping) else super().to_json()


class Planned(Answer):
    """Base of plans."""

    @property
    def feasible(self) -> bool:
        return bool(self.result.feasible)

    @property
    def promise(self) -> str:
        """meets, likely or misses."""
        return str(self.result.promise)

    @property
    def warnings(self) -> "list[Message]":
        return list(self.result.warnings)

    def check_supported(self, where: str) -> None:
        """Raises FitNotUsable if the data do not support the plan."""
        if self.result.unsupported:
            found = f"the plan is not supported by these data: {self.result.unsupported[0]}"
            raise FitNotUsable(found, where=where, remedy="Measure such steps, or fit a better model (latfit fit).")


def data_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    from pandas import DataFrame

    return DataFrame([dict(row) for row in rows])


def _labelled(message: "Message | str") -> str:
    if isinstance(message, str):
        return f"warning: {message}"
    return f"warning: {message.text}" if message.needs_action else f"note: {message.message}"
