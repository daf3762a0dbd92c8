"""What users say of a plan, read into its wishes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from latfit.errors import WrongUsage
from latfit.units import parse_duration_ms, parse_rate_per_ms

if TYPE_CHECKING:
    from latfit.plan.wishes import Wishes


@dataclass(frozen=True)
class PlanOptions:
    """The options as typed; None where one was left out."""

    rate: str | None = None
    arrivals: Path | None = None
    window: str | None = None
    replicas: int = 1
    context: float | None = None
    max_batch: int | None = None
    transfer: str | None = None
    wait: str | None = None
    launch_share: float = 0.5
    ttft: str | None = None
    tpot: str | None = None
    prompt_tokens: int = 512
    objective: str | None = None


def wishes_of(typed: PlanOptions) -> "Wishes":
    """The options, checked. Raises WrongUsage, BadInput."""
    from latfit.plan.recorded_load import read_load
    from latfit.plan.wishes import ServingTargets, Wishes, parse_objective

    if typed.rate is not None and typed.arrivals is not None:
        raise WrongUsage(
            "a rate and recorded arrivals contradict each other",
            where="--rate, --arrivals",
            remedy="Give one of them.",
        )
    if typed.window is not None and typed.arrivals is None:
        raise WrongUsage("a window without recorded arrivals", where="--window", remedy="Give --arrivals FILE as well.")
    if typed.objective is not None and typed.rate is None and typed.arrivals is None:
        raise WrongUsage("an objective needs a load", where="--objective", remedy="Give --rate or --arrivals.")
    window = _duration(typed.window, "--window")
    return Wishes(
        rate=None if typed.rate is None else parse_rate_per_ms(typed.rate, option="--rate"),
        load=None if typed.arrivals is None else read_load(typed.arrivals, window),
        replicas=typed.replicas,
        context=typed.context,
        max_batch=typed.max_batch,
        transfer_ms=_duration(typed.transfer, "--transfer", zero=True) or 0.0,
        wait_ms=_duration(typed.wait, "--wait", zero=True),
        launch_share=typed.launch_share,
        serving=ServingTargets(_duration(typed.ttft, "--ttft"), _duration(typed.tpot, "--tpot"), typed.prompt_tokens),
        objective=None if typed.objective is None else parse_objective(typed.objective),
    )


def _duration(text: str | None, option: str, *, zero: bool = False) -> float | None:
    """Milliseconds; where `zero`, a plain 0 needs no unit."""
    if text is None:
        return None
    if zero and text.strip() in ("0", "0ms"):
        return 0.0
    return parse_duration_ms(text, option=option)
