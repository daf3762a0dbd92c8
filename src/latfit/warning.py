"""The record of a warning, by the name that fits and profiles use."""

from latfit.messages import NO_ACTION as NO_ACTION, Message as LatfitWarning

__all__ = ["NO_ACTION", "LatfitWarning"]
