"""The requests that a simulation serves: at a rate, recorded, or sent by users who wait for their answers."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from latfit.api.quantities import Duration, duration
from latfit.api.reading import table_of
from latfit.errors import WrongUsage
from latfit.workload import (
    ClosedLoad,
    Load,
    OpenLoad,
    RecordedLoad,
    Recording,
    RequestClass,
    Requests,
    Resampled,
    fit_lengths,
    parse_arrival_process,
    parse_class,
    read_curve,
    read_requests,
    recorded_in,
)


def recording_of(source: Any) -> Recording:
    """Requests in a file, a DataFrame, an Arrow table or a Polars frame, with when their tokens came where it says so.
    Raises BadInput."""
    if isinstance(source, Recording):
        return source
    if isinstance(source, Requests):
        return Recording(source, "requests")
    if isinstance(source, str | Path):
        return read_requests(source)
    return recorded_in(table_of(source))


def make_load(
    offered: Sequence[float],
    *,
    arrivals: Any = None,
    load_curve: str | Path | None = None,
    users: int | None = None,
    think: Duration = "1s",
    arrival_process: str = "poisson",
    classes: Iterable[str | RequestClass] = (),
    prompt_lengths: Any = None,
) -> Load:
    """The load, at the first of the offered rates (per ms). Raises WrongUsage for kinds of load that exclude each
    other, BadInput for a file that holds no requests."""
    kinds = [arrivals is not None, users is not None, load_curve is not None]
    if sum(kinds) > 1:
        raise WrongUsage("several kinds of load", where="--arrivals, --users, --load-curve", remedy="Give one.")
    if not any(kinds) and not offered:
        raise WrongUsage("no load is given", where="--rate", remedy="Give --rate 500/s, --arrivals FILE or --users 20.")
    several = tuple(parse_class(each) if isinstance(each, str) else each for each in classes)
    more: dict[str, Any] = {"classes": several} if several else {}
    if prompt_lengths is not None:
        more["lengths"] = fit_lengths(recording_of(prompt_lengths).requests)
    if arrivals is not None:
        if more:
            where = "--class, --prompt-lengths"
            raise WrongUsage("recorded requests have their own", where=where, remedy="Leave these out.")
        recording = recording_of(arrivals)
        return RecordedLoad(recording.requests, tuple(recording.notes))
    if users is not None:
        return ClosedLoad(users, duration(think, "--think", zero=True), **more)
    if load_curve is not None:
        return OpenLoad(read_curve(load_curve), **more)
    return OpenLoad(parse_arrival_process(arrival_process, offered[0]), **more)


def notes_of(load: Load) -> Sequence[str]:
    """What should be known of how its requests were read."""
    return load.notes if isinstance(load, RecordedLoad) else ()


def request_tokens(load: Load | None, by_prompt: bool, tokens_per_request: int | None) -> tuple[float, float]:
    """Tokens that a typical request and the longest one add to a batch; 0 for the latter where all are alike.
    Raises WrongUsage."""
    prompts = None
    if isinstance(load, RecordedLoad):
        prompts = load.requests.prompt_tokens if by_prompt else None
    elif load is not None and isinstance(load.lengths, Resampled):
        prompts = load.lengths.prompt_tokens
    if by_prompt and prompts is None:
        raise WrongUsage("no prompt lengths are known", where="--by-prompt", remedy="Give --arrivals FILE.")
    if prompts is None:
        return float(tokens_per_request or 1), 0.0
    if tokens_per_request is not None:
        raise WrongUsage(
            "prompt lengths are given as well", where="--tokens-per-request", remedy="Give one of the two."
        )
    return float(prompts.mean()), float(prompts.max())
