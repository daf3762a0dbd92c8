"""The requests that a simulation serves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latfit import workload
from latfit.api.quantities import duration
from latfit.api.reading import table_of
from latfit.errors import WrongUsage


def recording_of(source: Any) -> workload.Recording:
    """Return recorded requests of a file or table. Raises BadInput."""
    if isinstance(source, workload.Recording):
        return source
    if isinstance(source, workload.Requests):
        return workload.Recording(source, "requests")
    return workload.read_requests(source) if isinstance(source, str | Path) else workload.recorded_in(table_of(source))


def make_load(request: Any, offered: Sequence[float]) -> workload.Load:
    """Return a request's load, at the first of the rates (per ms). Raises WrongUsage, BadInput."""
    curve, lengths = getattr(request, "load_curve", None), getattr(request, "lengths", None)
    if request.arrivals is not None:
        recording = recording_of(request.arrivals)
        return workload.RecordedLoad(recording.requests, tuple(recording.notes))
    more: dict[str, Any] = {}
    if request.classes:
        more["classes"] = tuple(
            workload.parse_class(each) if isinstance(each, str) else each for each in request.classes
        )
    if isinstance(lengths, str) and (":" in lengths or not (Path(lengths).suffix or Path(lengths).exists())):
        more["lengths"] = workload.parse_lengths(lengths)
    elif (source := getattr(request, "prompt_lengths", None) if lengths is None else lengths) is not None:
        recorded = recording_of(source).requests
        more["lengths"] = workload.Resampled(recorded.prompt_tokens, recorded.output_tokens)
    elif hasattr(request, "lengths"):
        where = "--rate" if request.users is None else "--users"
        raise WrongUsage("requests have no lengths", where=where, remedy="Give --lengths 512:128, or a file.")
    if request.users is not None:
        return workload.ClosedLoad(request.users, duration(request.think, "--think", zero=True), **more)
    if curve is not None:
        return workload.OpenLoad(workload.read_curve(curve), **more)
    if not offered:
        raise WrongUsage("no load is given", where="--rate", remedy="Give --rate 500/s, --arrivals FILE or --users 20.")
    return workload.OpenLoad(workload.parse_arrival_process(request.arrival_process, offered[0]), **more)


def notes_of(load: workload.Load) -> Sequence[str]:
    return load.notes if isinstance(load, workload.RecordedLoad) else ()


def request_tokens(load: workload.Load | None, by_prompt: bool, tokens_per_request: int | None) -> tuple[float, float]:
    """Return tokens of a mean request and of the longest, 0 if all are alike. Raises WrongUsage."""
    prompts = None
    if isinstance(load, workload.RecordedLoad):
        prompts = load.requests.prompt_tokens if by_prompt else None
    elif load is not None and isinstance(load.lengths, workload.Resampled):
        prompts = load.lengths.prompt_tokens
    if by_prompt and prompts is None:
        raise WrongUsage("no prompt lengths are known", where="--set by_prompt", remedy="Give --arrivals FILE.")
    if prompts is None:
        return float(tokens_per_request or 1), 0.0
    if tokens_per_request is not None:
        raise WrongUsage("prompt lengths are given as well", where="--tokens-per-request", remedy="Give one of both.")
    return float(prompts.mean()), float(prompts.max())
