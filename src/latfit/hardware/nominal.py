"""Parse nominal latencies of an unmeasured path, such as those of a data sheet; they have no intervals.

`launch=8ms,slope=0.05ms` (linear in B and S), short `8ms+0.05ms*256` (with the largest batch), `exp:2ms` (mean of an
exponential service), `p50=2ms` (median of one request at a time).
"""

import math
import re
from dataclasses import dataclass

from latfit.errors import refuse
from latfit.messages import message
from latfit.model import DataFacts, Errors, Estimate, FitResult, FitStatus
from latfit.units import parse_duration_ms, whole_number

LARGEST_BATCH = 256
MOST_TOKENS = 8192
LATENCIES = ("p50", "launch", "slope", "per_token")
SIZES = {"max_batch": LARGEST_BATCH, "max_tokens": MOST_TOKENS}
EXAMPLE = (
    'Write "p50=2ms", "launch=0.5ms,slope=0.02ms" (slope a request, per_token a token), or short "0.5ms+0.02ms*256",'
    ' "exp:2ms" (a mean).'
)
_SHORT = re.compile(r"(?=exp:|.*[+*])(?P<exp>exp:)?(?P<launch>[\d.][^=:+*,]*)(\+(?P<slope>[^+*,]+))?(\*(?P<most>\d+))?")


@dataclass(frozen=True)
class Nominal:
    """A linear latency in ms and the sizes it applies to.

    median: of one request at a time, so that the mean is unknown. exponential: mean of an exponential service.
    """

    text: str
    launch_ms: float
    slope_ms: float
    per_token_ms: float
    max_batch: int = LARGEST_BATCH
    max_tokens: int = MOST_TOKENS
    median: bool = False
    exponential: bool = False

    def mean_factor(self) -> float:
        """Return mean over median: 1/ln 2 of an exponential service, 1 unless a median was given."""
        return 1 / math.log(2) if self.median else 1.0

    def as_fit(self) -> FitResult:
        line = {
            "tau_0": (self.launch_ms, "ms"),
            "tau_B": (self.slope_ms, "ms/request"),
            "tau_S": (self.per_token_ms, "ms/token"),
        }
        return FitResult(
            model="linear",
            status=FitStatus.PARTLY_IDENTIFIED,
            parameters={n: Estimate(v, None, None, None, unit, fixed=True) for n, (v, unit) in line.items()},
            metrics=Errors(0),
            domain={"B": [1, self.max_batch], "S": [1, self.max_tokens]},
            data=DataFacts(nominal=self.text, rows_read=0, rows_used=0),
            warnings=[message("not_a_measurement", numbers=self.text)],
        )


def parse_nominal(text: str, where: str = "--nominal") -> Nominal:
    """Parse nominal latencies. Raises WrongUsage."""
    short = _SHORT.fullmatch(text.strip())
    given: dict[str, str] = {}
    if short:
        most = short["most"] or str(LARGEST_BATCH if short["slope"] else 1)
        given = {"launch": short["launch"], "slope": short["slope"] or "0", "max_batch": most}
    for part in [] if short else text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        wrong = not equals or name not in (*LATENCIES, *SIZES) or name in given
        refuse(wrong, f"{part.strip()!r} cannot be read", where, EXAMPLE)
        given[name] = value
    times = {name: parse_duration_ms(given[name], option=where, zero=True) for name in LATENCIES if name in given}
    refuse(not any(times.values()), f"{text!r} names no latency above zero", where, EXAMPLE)
    both = "a median and a linear latency contradict each other"
    refuse("p50" in times and len(times) > 1, both, where, "Give p50 alone, or launch and slope.")
    sizes = {name: whole_number(given.get(name, str(default))) or 0 for name, default in SIZES.items()}
    refuse(not all(sizes.values()), "the largest batch or number of tokens is no whole number above 0", where, EXAMPLE)
    line = (times.get("launch", 0.0), times.get("p50", times.get("slope", 0.0)), times.get("per_token", 0.0))
    return Nominal(text, *line, **sizes, median="p50" in times, exponential=bool(short and short["exp"]))
