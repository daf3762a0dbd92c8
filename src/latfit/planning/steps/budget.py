"""Cut a candidate batch to what a step may hold: which requests, how many tokens each, in microseconds.

Everything that depends on the model is tabulated once (`step_budget`): for each number of requests B the most tokens
S_max[B] with T(B, S) within the SLA at the percentile; for fits that read cached context, on a geometric grid of it, a
context between two points counting as the larger one. So a cut is integer arithmetic on a table.

Requests come in order of priority. Each has tokens it needs at least to take part (1 for decode, a first piece of a
prefill) and tokens it would take at most. The largest n whose first n requests fit with their least tokens is taken,
searched from above since S_max may grow with B at first; what is left of the budget goes to them in order. Nobody is
skipped, so no large request starves behind small ones.
"""

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
    """tokens: for each candidate, 0 where it is left out. requests: how many take part, the first ones."""

    requests: int
    tokens: tuple[int, ...]
    total: int


@dataclass(frozen=True, repr=False)
class StepBudget:
    """most[k][B]: tokens of a step of B requests, B = 0, 1, ..., with cached tokens up to contexts[k] for the whole
    step; -1 where no step of B requests meets the SLA. fewest: from so many tokens on it is met up to `most`; more
    than B where small steps take longer than larger ones. shown: the B of the table; None takes 1, 2, 4, ..."""

    contexts: tuple[float, ...]
    most: tuple[tuple[int, ...], ...]
    fewest: tuple[tuple[int, ...], ...]
    shown: tuple[int, ...] | None = None

    def at(self, B: int | Sequence[int]) -> "StepBudget":
        """The same, with these numbers of requests in its table. Raises WrongUsage."""
        top, B = len(self.most[0]) - 1, [B] if isinstance(B, int) else B
        if not B or min(B) < 1 or max(B) > top:
            raise WrongUsage(f"B of {list(B)}", where="B", remedy=f"Give whole numbers from 1 to {top:,}.")
        return replace(self, shown=tuple(B))

    @property
    def table(self) -> "DataFrame":
        """DataFrame: B, S_max (missing where no step of B requests meets the SLA), and where the fit reads cached
        context the context_tokens of the whole step."""
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
        """Cut candidates in order of priority: tokens each needs at least (1 or more) and would take at most.

        context_tokens: cached tokens of all candidates together; a fit that does not read them ignores it.
        """
        k = bisect_left(self.contexts, context_tokens)
        if k == len(self.contexts):
            return Trimmed(0, (0,) * len(least), 0)
        most, fewest = self.most[k], self.fewest[k]
        sums, reach = list(accumulate(least)), list(accumulate(wanted))
        taken = min(len(sums), len(most) - 1)
        while taken and (sums[taken - 1] > most[taken] or reach[taken - 1] < fewest[taken]):
            taken -= 1
        if not taken:
            return Trimmed(0, (0,) * len(least), 0)
        spare = most[taken] - sums[taken - 1]
        tokens = list(least[:taken])
        for i in range(taken):
            if not spare:
                break
            more = min(wanted[i] - tokens[i], spare)
            if more > 0:
                tokens[i] += more
                spare -= more
        total = most[taken] - spare
        tokens += [0] * (len(least) - taken)
        return Trimmed(taken, tuple(tokens), total)


def step_budget(
    path: ExecutionPath, sla_ms: float, percentile: float = 99.0, *, max_requests: int | None = None
) -> StepBudget:
    """The table of a path for steps within `sla_ms` at a percentile, up to the largest measured batch and step.

    Raises SlaOutOfReach where no step meets it, WrongUsage.
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
    rows = [_fewest_and_most(path, (sla_ms, levels), (B_top, S_top), context) for context in contexts]
    fewest, most = zip(*rows, strict=True)
    if max(max(row) for row in most) < 1:
        raise SlaOutOfReach(
            f"no step on {path.label} meets {sla_ms:g} ms", where="SLA", remedy="Relax the SLA or lower the percentile."
        )
    return StepBudget(contexts, most, fewest)


def _fewest_and_most(
    path: ExecutionPath, wanted: tuple[float, StepLevels], tops: tuple[int, int], context: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The last range of S within the SLA for B = 0, 1, ..., up to the first of `tops`, S up to the second; -1 where
    there is none."""
    fewest, most = [0], [0]
    for B in range(1, tops[0] + 1):
        each = None if context == float("inf") else context / B

        def latency(S: FloatArray, B: int = B, each: float | None = each) -> FloatArray:
            return path.fit.latency_ms(**step_columns(np.full(len(S), float(B)), S, each))

        spans = tokens_within(latency, B, *wanted, top=tops[1], convex=path.fit.convex) if tops[1] >= B else []
        fewest.append(spans[-1].low if spans else -1)
        most.append(spans[-1].high or tops[1] if spans else -1)
    return tuple(fewest), tuple(most)
