"""Trim a candidate batch to the tokens of a step, in microseconds: docs/theory/planning.md, "Step budgets"."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.hardware import ExecutionPath, step_columns
from latfit.planning.steps.limits import StepLevels, levels_for, tokens_within
from latfit.stats import FloatArray

if TYPE_CHECKING:
    from pandas import DataFrame

CONTEXTS = 24


@dataclass(frozen=True)
class Trimmed:
    """A trimmed batch: how many candidates take part, tokens of each (0: left out), their total."""

    requests: int
    tokens: tuple[int, ...]
    total: int


@dataclass(frozen=True, repr=False)
class StepBudget:
    """Token limits of a step by number of requests.

    contexts: cached tokens of the whole step, rising. most, fewest: largest S (-1: none), and smallest from which all
    are feasible, as most[k][B]. shown: the B of the table.
    """

    contexts: tuple[float, ...]
    most: tuple[tuple[int, ...], ...]
    fewest: tuple[tuple[int, ...], ...]
    shown: tuple[int, ...] | None = None

    def at(self, B: int | Sequence[int]) -> "StepBudget":
        top, B = len(self.most[0]) - 1, [B] if isinstance(B, int) else B
        if not B or min(B) < 1 or max(B) > top:
            raise WrongUsage(f"B of {list(B)}", where="B", remedy=f"Give whole numbers from 1 to {top:,}.")
        return replace(self, shown=tuple(B))

    @property
    def table(self) -> "DataFrame":
        """DataFrame of B, S_max (missing: none is feasible), and context_tokens if the fit uses them."""
        from pandas import DataFrame

        top = len(self.most[0]) - 1
        sizes = self.shown or sorted({*(1 << i for i in range(top.bit_length())), top})
        reads = len(self.contexts) > 1
        rows = [
            {**({"context_tokens": context} if reads else {}), "B": B, "S_max": most[B] if most[B] >= 0 else None}
            for context, most in zip(self.contexts, self.most, strict=True)
            for B in sizes
        ]
        return DataFrame(rows).astype({"S_max": "Int64"})

    def __repr__(self) -> str:
        return f"StepBudget(up to {max(max(row) for row in self.most):,} tokens, {len(self.most[0]) - 1:,} requests)"

    def trim(self, least: Sequence[int], wanted: Sequence[int], context_tokens: float = 0.0) -> Trimmed:
        """Trim candidates, given in priority order, to one step.

        least, wanted: tokens that each candidate needs, and takes at most. context_tokens: of all candidates together.
        """
        k = bisect_left(self.contexts, context_tokens)
        most, fewest = (self.most[k], self.fewest[k]) if k < len(self.contexts) else ((0,), (0,))
        sums, reach = list(accumulate(least)), list(accumulate(wanted))
        taken = min(len(sums), len(most) - 1)
        while taken and (sums[taken - 1] > most[taken] or reach[taken - 1] < fewest[taken]):
            taken -= 1
        spare = most[taken] - sums[taken - 1] if taken else 0
        tokens = [0] * len(least)
        for i in range(taken):
            more = max(min(wanted[i] - least[i], spare), 0)
            tokens[i] = least[i] + more
            spare -= more
        return Trimmed(taken, tuple(tokens), most[taken] - spare if taken else 0)


def step_budget(
    path: ExecutionPath, sla_ms: float, percentile: float = 99.0, *, max_requests: int | None = None
) -> StepBudget:
    """Tabulate the steps of a path within `sla_ms` at a percentile, up to the largest measured ones.

    Raises SlaOutOfReach if no step meets the SLA, WrongUsage if it is not positive.
    """
    if not sla_ms > 0:
        raise WrongUsage(f"an SLA of {sla_ms:g} ms", where="SLA", remedy="Give one above zero.")
    levels = levels_for(path, percentile)
    B_top = path.fit.largest_batch if max_requests is None else max_requests
    S_top = max(int(path.fit.domain["S"][1]), B_top)
    contexts: tuple[float, ...] = (float("inf"),)
    if path.fit.reads_context:
        high = max(float(path.fit.domain["context_tokens"][1]), 1.0)
        contexts = tuple(np.concatenate([[0.0], np.geomspace(high / 1000, high, CONTEXTS)]).tolist())
    rows = [[_last_range(path, sla_ms, levels, B, S_top, each) for B in range(1, B_top + 1)] for each in contexts]
    fewest = tuple((0, *(low for low, _ in row)) for row in rows)
    most = tuple((0, *(high for _, high in row)) for row in rows)
    if max(max(row) for row in most) < 1:
        remedy = "Relax the SLA or lower the percentile."
        raise SlaOutOfReach(f"no step on {path.label} meets {sla_ms:g} ms", where="SLA", remedy=remedy)
    return StepBudget(contexts, most, fewest)


def _last_range(
    path: ExecutionPath, sla_ms: float, levels: StepLevels, B: int, top: int, context: float
) -> tuple[int, int]:
    """Return the last feasible range of S up to `top` for B requests; -1 if there is none."""

    def latency(S: FloatArray) -> FloatArray:
        each = None if context == float("inf") else context / B
        return path.fit.latency_ms(**step_columns(np.full(len(S), float(B)), S, each))

    spans = tokens_within(latency, B, sla_ms, levels, top=top) if top >= B else []
    return (spans[-1].low, spans[-1].high or top) if spans else (-1, -1)
