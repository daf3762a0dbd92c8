"""Parse loads from options: `gamma:2`, `chat:0.3:50ms`, `512:128`."""

import math

from latfit.errors import WrongUsage
from latfit.units import parse_duration_ms
from latfit.workload.arrivals import ArrivalProcess, Gamma, Poisson, bursts
from latfit.workload.lengths import Constant, LengthDistribution, Lognormal
from latfit.workload.load import RequestClass

LIMITS = {"ttft": "ttft_slo_ms", "tpot": "tpot_slo_ms", "sla": "deadline_ms"}
"""Limits of a request class, by the names of the options that set them for all requests."""


def parse_arrival_process(text: str, rate: float) -> ArrivalProcess:
    """Parse `poisson`, `gamma:CV` or `bursts:TIMES:SHARE:LENGTH`, with a mean rate per ms. Raises WrongUsage."""
    where = "--arrival-process"
    remedy = "Write poisson, gamma:2 or bursts:4:0.1:1s, with numbers above zero."
    try:
        match text.split(":"):
            case ["poisson"]:
                return Poisson(rate)
            case ["gamma", cv]:
                return Gamma(rate, float(cv))
            case ["bursts", times, share, length]:
                return bursts(rate, float(times), float(share), parse_duration_ms(length, option=where))
    except WrongUsage as error:
        raise WrongUsage(f"{text!r}: {error.found}", where=where, remedy=remedy) from None
    except ValueError:
        pass
    raise WrongUsage(f"{text!r} is not an arrival process", where=where, remedy=remedy)


def parse_class(text: str) -> RequestClass:
    """Parse `NAME:SHARE`, `NAME:SHARE:DEADLINE`, or `NAME:SHARE:ttft=300ms,tpot=50ms,sla=2s`. Raises WrongUsage."""
    name, _, rest = text.partition(":")
    share, limited, given = rest.partition(":")
    remedy = "Write chat:0.3:50ms, or chat:0.3:ttft=300ms,tpot=50ms."
    limits: dict[str, float] = {}
    try:
        for each in given.split(",") if limited else ():
            option, named, value = each.rpartition("=")
            limit = LIMITS[option.strip() if named else "sla"]
            if limit in limits:
                raise WrongUsage(f"{text!r} gives one limit twice", where="--class", remedy=remedy)
            limits[limit] = parse_duration_ms(value, option="--class")
        return RequestClass(float(share), name=name, **limits)
    except (ValueError, KeyError):
        raise WrongUsage(f"{text!r} is not a class", where="--class", remedy=remedy) from None


def parse_lengths(text: str) -> LengthDistribution:
    """Parse prompt and output tokens: `512:128` for all requests; `512:128:0.8` lognormal, sd 0.8 of the mean.

    Raises WrongUsage.
    """
    prompt, output, *more = text.split(":") if text.count(":") in (1, 2) else ("", "")
    try:
        counts, variation = (int(prompt), int(output)), float(more[0]) if more else 0.0
    except ValueError:
        counts, variation = (0, 0), math.nan
    if min(counts) < 1 or not 0 <= variation < math.inf or (more and not variation):
        remedy = "Write 512:128, or 512:128:0.8."
        raise WrongUsage(f"{text!r} is not a pair of lengths", where="--lengths", remedy=remedy)
    if not variation:
        return Constant(*counts)
    # Of a lognormal variable, mean = exp(m + s^2/2) and (sd/mean)^2 = exp(s^2) - 1.
    s = math.sqrt(math.log1p(variation**2))
    m = [math.log(count) - s**2 / 2 for count in counts]
    return Lognormal((m[0], m[1]), (s, s))
