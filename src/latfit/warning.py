"""What a user should know of a result before relying on it: one record for fits, profiles and comparisons."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class LatfitWarning:
    """code: by which programs tell it.  message: what was found.  remedy: what can be done about it."""

    code: str
    message: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)
