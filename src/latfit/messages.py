"""What a user should know of an answer before relying on it: one record, and one table of what latfit says of plans,
simulations and validations."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import structs

from latfit.records import Record


class Severity(StrEnum):
    """What a message does to the answer, the gravest first."""

    UNSUPPORTED = "unsupported"
    """The data do not support the answer."""
    DOUBT = "doubt"
    """The answer is not confirmed."""
    WARNING = "warning"
    """The user may act on it."""
    NOTE = "note"
    """An assumption; no action is needed."""


class Message(Record, frozen=True, omit_defaults=True):
    """A message. code: key of the table, by which programs tell it.  message: what was found.  remedy: what to do."""

    code: str
    message: str
    remedy: str
    severity: Severity = Severity.WARNING

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Older files said in the remedy that a message is a note."""
        note = str(document.get("remedy")).startswith(NO_ACTION)
        return {"severity": Severity.NOTE, **document} if note else document

    @property
    def needs_action(self) -> bool:
        return self.severity != Severity.NOTE

    def about(self, subject: str) -> "Message":
        """The message with what it is about in front."""
        return structs.replace(self, message=f"{subject}: {self.message}")

    @property
    def text(self) -> str:
        return f"{self.message} {self.remedy}".strip()


NO_ACTION = "No action needed."


class Template(NamedTuple):
    """severity; the message and its remedy, with the names of values in braces."""

    severity: Severity
    message: str
    remedy: str = ""


UNSUPPORTED, DOUBT, WARNING, NOTE = Severity
