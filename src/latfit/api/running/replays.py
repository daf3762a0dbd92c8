"""`replay`: a policy driven live on this machine, and its prediction beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from latfit import live, reporting
from latfit.api.answer import Answer, State
from latfit.api.quantities import duration, percent, rates, several
from latfit.api.request import verb
from latfit.api.requests import ReplayRequest
from latfit.errors import refuse
from latfit.policies import POLICIES
from latfit.simulation import System
from latfit.units import format_percent

if TYPE_CHECKING:
    from pandas import DataFrame

LOADS = ("50%", "70%")


@dataclass(frozen=True, repr=False, eq=False)
class Replay(Answer):
    runs: Sequence[live.Compared]
    system: System

    @property
    def agrees(self) -> bool | None:
        """Whether every run is as predicted; None if runs were disturbed."""
        outcomes = [run.agrees for run in self.runs]
        return False if False in outcomes else None if None in outcomes else True

    @property
    def state(self) -> State:
        return "good" if self.agrees else "bad" if self.agrees is False else "doubt"

    @property
    def verdict(self) -> str:
        counted = [run for run in self.runs if run.agrees is not None]
        disturbed = len(self.runs) - len(counted)
        if not counted:
            most = format_percent(100 * max(run.others_share for run in self.runs))
            return f"Cannot tell: others used up to {most} of the cores. Repeat it while they rest."
        more = f" {disturbed} more were disturbed by others." if disturbed else ""
        return f"{sum(run.agrees is True for run in counted)} of {len(counted)} runs went as predicted.{more}"

    @property
    def frame(self) -> "DataFrame":
        """DataFrame: a row a run."""
        import pandas as pd

        return pd.json_normalize([run.to_json() for run in self.runs], sep="_")

    @property
    def lines(self) -> list[str]:
        return [note for run in self.runs for note in run.notes]

    def tables(self, *, brief: bool = False) -> "list[reporting.Table]":
        return [reporting.replay_table(self.runs, brief=brief)]

    def to_json(self) -> dict[str, Any]:
        return {"agrees": self.agrees, "verdict": self.verdict, "runs": [run.to_json() for run in self.runs]}


@verb(ReplayRequest)
def replay(request: ReplayRequest) -> Replay:
    """Send Poisson arrivals to executors on this machine under each policy, and compare with their simulation.

    Without executors decode steps of `model` run in two processes. Raises WrongUsage, BadInput, HardwareMissing.
    """
    names = _parts(request.policy)
    for name in names:
        refuse(name not in POLICIES, f"policy {name!r} is not known", "--policy", f"One of {', '.join(POLICIES)}.")
    per_ms = rates(_parts(request.rate) or None)
    loads = LOADS if request.load is None else _parts(request.load)
    shares = [] if per_ms else [percent(each, "--load") / 100 for each in loads]
    wrong = any(not 0 < share < 1 for share in shares)
    refuse(wrong, "a load must be above 0 % and below 100 %", "--load", "Give such as 70%.")
    launch_ms = duration(request.launch, "--set launch", zero=True)
    lasts_s = duration(request.duration_each, "--duration") / 1000
    none = not names or not (per_ms or shares)
    refuse(none, "no policy or no load", "--policy, --load", "Give one of each at least.")
    executors = request.executors
    executors = live.stand_ins(request.model, launch_ms, request.max_batch) if executors is None else list(executors)
    few = len(executors) < 1 + any(POLICIES[name].needs_side for name in names)
    remedy = "Give the main path, and the side path for a policy that needs one."
    refuse(few, f"{len(executors)} executors for {', '.join(names)}", "executors", remedy)

    offered = live.Offered(shares, per_ms, lasts_s, request.seed)
    return Replay(*live.precisely(live.run_policies(executors, names, offered, request.progress)))


def _parts(given: Any) -> list[Any]:
    return [part for each in several(given) for part in (each.split(",") if isinstance(each, str) else [each])]
