"""What users say of parameters, read: values, ranges and priors by name."""

import math

from latfit.errors import WrongUsage


def parse_fixed(texts: list[str]) -> dict[str, float]:
    """{parameter: value} from `P_max=60`. Raises WrongUsage."""
    return {
        name: _number(value, text, "--fix", "P_max=60") for text in texts for name, _, value in [text.partition("=")]
    }


def parse_ranges(texts: list[str], option: str) -> dict[str, tuple[float, float]]:
    """{parameter: two numbers} from `k_B=0.01:1`: low and high of --bounds, mean and spread of --prior.

    Raises WrongUsage.
    """
    found = {}
    for text in texts:
        name, _, span = text.partition("=")
        first, _, second = span.partition(":")
        ends = (_number(first, text, option, "k_B=0.01:1"), _number(second, text, option, "k_B=0.01:1"))
        orderly = ends[0] < ends[1] if option == "--bounds" else ends[1] > 0
        if not (0 <= ends[0] < math.inf and 0 < ends[1] < math.inf and orderly):
            wanted = "low:high with 0 <= low < high" if option == "--bounds" else "mean:sd, the sd above zero"
            raise WrongUsage(f"{text!r} cannot be used", where=option, remedy=f"Give {wanted}.")
        found[name] = ends
    return found


def _number(value: str, text: str, option: str, example: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise WrongUsage(f"{text!r} cannot be read", where=option, remedy=f"Write it like {example}.") from None
