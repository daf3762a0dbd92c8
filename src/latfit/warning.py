"""What a user should know of a result before relying on it: one record for fits, profiles and comparisons."""

from dataclasses import asdict, dataclass

NO_ACTION = "No action needed."
"""How a remedy begins that asks for nothing: the warning is worth knowing, and stands where there is room."""


@dataclass(frozen=True)
class LatfitWarning:
    """code: by which programs tell it.  message: what was found.  remedy: what can be done about it, or NO_ACTION."""

    code: str
    message: str
    remedy: str

    @property
    def needs_action(self) -> bool:
        return not self.remedy.startswith(NO_ACTION)

    def to_json(self) -> dict[str, str]:
        return asdict(self)
