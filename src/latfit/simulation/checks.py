"""Checks of what users ask of simulations."""

from latfit.errors import WrongUsage


def refuse(wrong: bool, found: str, where: str, remedy: str) -> None:
    """Raise WrongUsage if `wrong`."""
    if wrong:
        raise WrongUsage(found, where=where, remedy=remedy)
