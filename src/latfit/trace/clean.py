"""Which rows are no usable steps: a table of rules, tried in order; docs/formats.md describes each reason.

Slow steps stay, because a real prefill takes longer than any fixed limit; outliers are only marked.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput, WrongUsage, tell
from latfit.stats import MAD_TO_SIGMA, FloatArray, weighted_quantile
from latfit.trace.metadata import CellFacts, facts_of
from latfit.trace.table import IDENTITY, MAX_EXACT, WEIGHT, Mask, Trace, row_weights, step_count

MAX_COUNT = 2**31 - 1  # requests or tokens of a step
MAX_CACHED_TOKENS = 2**40
MIN_MS, MAX_MS = 1e-9, 1e13  # less than a clock cycle; 300 years

ZERO_TIME_SHARE = 0.05  # of the shortest median over octaves of S
MIN_OCTAVE_ROWS = 5
COLD_RATIO, COLD_SIGMA = 1.5, 4.0  # a cold step exceeds its cell's median by both
MAX_COLD_ROWS = 100  # per run, and at most a tenth of it
OUTLIER_SIGMA = 5.0
MIN_SPREAD = 0.02  # relative; a smaller one is the resolution of a clock
MIN_REPEATS = 3  # rows of a cell that show its spread
CONTEXT_BIN = 1.25  # ratio of the ends of a context bin
Q10_TO_Q90 = 2.5631031310892007  # of a normal distribution, in standard deviations

MAX_SHORT_ROWS, MAX_SHORT_SHARE = 2, 0.01  # rows with S < B, before S must be another quantity
WINDOW_COLUMNS = ("window_ms", "window_steps", "B_sd", "S_sd")
LOOKED_AT = (
    *("B", "S", "T_ms", "t_s", "run", "replica", "step", "rep", "dummy", "idle", "warmup", "queued_requests"),
    *("prefill_requests", "prefill_tokens", "context_tokens", "prefill_context_tokens"),
    *IDENTITY,
    *WINDOW_COLUMNS,
)


@dataclass(frozen=True)
class CleanOptions:
    """Drop rows above max_ms, keep or drop rows of a reason; most: accept that most are dropped."""

    max_ms: float | None = None
    keep: Sequence[str] = ()
    drop: Sequence[str] = ()
    most: bool = False

    def __post_init__(self) -> None:
        renamed = tuple("idle" if reason == "dummy" else reason for reason in self.keep)  # as older fits store it
        object.__setattr__(self, "keep", renamed)
        can_keep = [rule.reason for rule in RULES if not (rule.necessary or rule.marks)]
        can_drop = [rule.reason for rule in RULES if rule.marks]
        for option, reasons, choices in (("--keep", self.keep, can_keep), ("--drop", self.drop, can_drop)):
            if wrong := next((reason for reason in reasons if reason not in choices), None):
                remedy = f"Choose from {', '.join(dict.fromkeys(choices))}."
                raise WrongUsage(f"{wrong!r} cannot be chosen", where=option, remedy=remedy)


@dataclass(frozen=True, repr=False)
class Cleaned:
    """The usable rows, and how many were read, dropped and marked, by reason.

    fate: for each row read (n,), the number of the rule that dropped it, counted from 1; 0 if it is used. short: rows
    with S < B.
    """

    trace: Trace
    rows_read: int
    dropped: Mapping[str, int]
    marked: Mapping[str, int] = field(default_factory=dict)
    fate: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    short: int = 0

    @property
    def reasons(self) -> NDArray[np.object_]:
        """Why each row read (n,) was dropped; empty for rows that are used."""
        return np.array(["", *(rule.reason for rule in RULES)], dtype=object)[self.fate]

    def __repr__(self) -> str:
        return f"{self.trace!r}, of {self.rows_read:,} rows, dropped {list_counts(self.dropped) or 'none'}"

    @property
    def rows_used(self) -> int:
        return step_count(self.trace)


def list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} {reason}" for reason, n in counts.items())


class Rule(NamedTuple):
    """One reason to drop rows; several rules may share it. necessary: no fit could use them; marks: only count them."""

    reason: str
    find: Callable[[Trace, CleanOptions], Mask]
    scope: Literal["row", "system", "trace"] = "row"
    necessary: bool = False
    marks: bool = False


def clean(trace: Trace, options: CleanOptions | None = None, *, rows_only: bool = False) -> Cleaned:
    """Drop what cannot be a step. rows_only: by rules that judge each row alone. Raises WrongUsage."""
    options = options or CleanOptions()
    if WEIGHT in trace:
        if options.max_ms or options.keep or options.drop:
            tell("note: --set max_t, --keep and --drop have no effect: the rows are cells of steps that were cleaned.")
        return _take_cells(trace)
    fate = np.zeros(len(trace), dtype=np.uint8)
    marked: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    rest, rows = trace.only(LOOKED_AT), np.arange(len(trace))
    for number, rule in enumerate(RULES, start=1):
        kept = rule.reason in options.keep and not rule.necessary
        if kept or (rows_only and rule.scope != "row"):
            continue
        found = np.zeros(len(rest), dtype=bool)
        for part in rest.split(rest.identity() if rule.scope == "system" else ()):
            found[part] = rule.find(rest.select(part) if len(part) < len(rest) else rest, options)
        if rule.marks and rule.reason not in options.drop:
            marked[rule.reason] += int(np.count_nonzero(found))
        elif found.any():
            fate[rows[found]] = number
            dropped[rule.reason] += int(np.count_nonzero(found))
            rest, rows = rest.select(~found), rows[~found]
    used = trace.select(rows) if dropped else trace
    B, S = trace.floats("B"), trace.floats("S")
    short = int(np.count_nonzero((S < B) & (S > 0) & np.isfinite(B)))
    return Cleaned(used, len(trace), dict(dropped), +marked, fate, short)


def _take_cells(trace: Trace) -> Cleaned:
    """Return rows of cells, whose steps were cleaned when the cells were made. Raises BadInput."""
    weights = np.asarray(row_weights(trace))
    bad = ~((weights >= 0) & (weights <= MAX_EXACT)) | find_non_finite(trace) | find_bad_value(trace)
    bad |= weights.sum() < 0.5
    if bad.any():
        raise BadInput(
            f"row {int(np.argmax(bad)) + 1} is no cell: its B, S, T_ms or {WEIGHT} is impossible ({bad.sum():,} such)",
            remedy=f"Make the cells again, or leave {WEIGHT} out where each row is one step.",
        )
    facts = facts_of(trace.provenance).cells or CellFacts()
    rows_read = step_count(trace) if facts.rows_read is None else facts.rows_read
    return Cleaned(trace, rows_read, facts.dropped, fate=np.zeros(len(trace), dtype=np.uint8))


def check_usable(cleaned: Any, options: CleanOptions) -> None:
    """Raise BadInput if S is another quantity, no row is left, or over half of the rows at work are dropped."""
    rows, short = cleaned.rows_read, cleaned.short
    if not options.most and short > max(MAX_SHORT_ROWS, MAX_SHORT_SHARE * rows):
        raise BadInput(
            f"{short:,} of {rows:,} rows have fewer tokens than requests (S < B)",
            remedy="S is all tokens of a step, at least one for each request: is it tokens per request? Multiply it by"
            " B, or name the right column with --map S=COLUMN. --allow-drops drops these rows.",
        )
    lost = rows - cleaned.rows_used
    expected = cleaned.dropped.get("cold_start", 0) + cleaned.dropped.get("idle", 0)
    if cleaned.rows_used and (options.most or 2 * (lost - expected) <= rows - expected):
        return
    verdict = "would be dropped" if cleaned.rows_used else "cannot be used"
    raise BadInput(
        f"{lost:,} of {rows:,} rows {verdict} ({list_counts(cleaned.dropped)})",
        remedy="B is requests (>= 1), S tokens (>= B), T_ms milliseconds (> 0): check them, or --map and --unit."
        " --keep REASON keeps a rule's rows, --allow-drops accepts it (`latfit ingest --allow-drops --dropped FILE`"
        " shows them).",
    )


def _flagged(trace: Trace, *names: str) -> Mask:
    flags = [trace[name].astype(bool) for name in names if name in trace]
    return np.logical_or.reduce(flags) if flags else np.zeros(len(trace), dtype=bool)


def find_idle(trace: Trace, _: CleanOptions) -> Mask:
    B, S = trace.floats("B"), trace.floats("S")
    less_than_one = B < 1 if are_window_means(trace) else (B == 0) & (S == 0)
    return np.asarray(_flagged(trace, "idle", "dummy") | less_than_one)


def are_window_means(trace: Trace) -> bool:
    """Return whether rows are means over a window's steps: a column says so, or most B are fractions."""
    if WEIGHT in trace or not len(trace):
        return False
    if any(np.any(trace.floats(name) > 0) for name in WINDOW_COLUMNS if name in trace):
        return True
    B = trace.floats("B")
    return bool(np.mean((np.rint(B) != B) & np.isfinite(B)) > 0.5)


def find_non_finite(trace: Trace, _: CleanOptions | None = None) -> Mask:
    return np.asarray(~np.all([np.isfinite(trace.floats(name)) for name in ("B", "S", "T_ms")], axis=0))


def find_too_fast(trace: Trace, _: CleanOptions) -> Mask:
    S, T = trace.floats("S"), trace.floats("T_ms")
    return np.asarray((T > 0) & (shortest_plausible_ms(S[T > 0], T[T > 0]) > T))


def shortest_plausible_ms(S: FloatArray, T_ms: FloatArray, weights: FloatArray | None = None) -> float:
    """Return a share of the smallest median of T over octaves of S; 0 for few rows."""
    octave = np.frexp(np.clip(S, 1, MAX_COUNT))[1]
    counts = np.bincount(octave, weights)
    medians = [
        weighted_quantile(T_ms[rows], 0.5, None if weights is None else weights[rows])
        for size in np.flatnonzero(counts >= MIN_OCTAVE_ROWS)
        for rows in [octave == size]
    ]
    return ZERO_TIME_SHARE * min(medians, default=0.0)


def find_bad_value(trace: Trace, _: CleanOptions | None = None) -> Mask:
    T = trace.floats("T_ms")
    return np.asarray((T < MIN_MS) | (T > MAX_MS) | impossible_steps(trace))


def impossible_steps(trace: Trace) -> Mask:
    """Return which rows (n,) no step can be, whatever its time. B and S are finite."""
    B, S = trace.floats("B"), trace.floats("S")
    bad = (B < 1) | (S < B) | (S > MAX_COUNT)
    largest: dict[str, Any] = {"prefill_tokens": S, "prefill_requests": B}
    largest |= dict.fromkeys(("context_tokens", "prefill_context_tokens"), MAX_CACHED_TOKENS)
    for name in [name for name in largest if name in trace]:
        bad |= (trace.floats(name) > largest[name]) | (trace.floats(name) < 0)
    for name in [name for name in ("queued_requests", "step", "rep") if name in trace]:
        bad |= np.abs(trace.floats(name)) > MAX_EXACT
    return np.asarray(bad)


def find_duplicate(trace: Trace, _: CleanOptions) -> Mask:
    """Find rows that repeat run, replica, repetition, time and counter as well as B, S and T of an earlier one."""
    counter = ("run", "replica", "rep", "step")
    counted = trace.group(counter) if "step" in trace else np.arange(len(trace))
    if counted.max(initial=-1) + 1 == len(trace):  # as usual; the other columns are slow to number
        return np.zeros(len(trace), dtype=bool)
    found = np.isfinite(trace.floats("step"))
    found[np.unique(trace.group((*counter, "t_s", "B", "S", "T_ms")), return_index=True)[1]] = False
    return found


def find_slow_start(trace: Trace, _: CleanOptions) -> Mask:
    """Find the slow start of each run: the longest prefix that ends with a slow step and has half of its steps slow.

    A step is slow if it exceeds the median of its cell by both COLD_RATIO and COLD_SIGMA.
    """
    found = np.zeros(len(trace), dtype=bool)
    if "t_s" not in trace or "rep" in trace:
        return found  # a grid marks its own warm-up, and rows without time have no first ones
    excess, sigma = excess_over_cell(trace)
    is_slow = excess > max(np.log(COLD_RATIO), COLD_SIGMA * sigma)
    for rows in runs_in_time(trace) if is_slow.any() else []:
        first = rows[: min(MAX_COLD_ROWS, len(rows) // 10)]
        slow = is_slow[first]
        share = np.cumsum(slow) / np.arange(1, len(slow) + 1)
        ends = np.flatnonzero(slow & (share >= 0.5))
        if len(ends):
            found[first[: ends[-1] + 1]] = True
    return found


def find_outlier(trace: Trace, _: CleanOptions) -> Mask:
    excess, sigma = excess_over_cell(trace)
    return np.abs(excess) > OUTLIER_SIGMA * sigma


@lru_cache(maxsize=1)
def excess_over_cell(trace: Trace) -> tuple[FloatArray, float]:
    """Return ln T minus the median of its cell of B, S and context (n,), and the robust spread over repeats."""
    if "context_tokens" in trace:
        context = np.floor(np.log1p(np.nan_to_num(trace.floats("context_tokens"))) / np.log(CONTEXT_BIN))
        trace = trace.with_columns(context_bin=context)
    cell = trace.group(("B", "S", "context_bin"))
    ln_T = np.log(trace.floats("T_ms"))
    # One sort for all medians: the cell's number, plus ln T scaled to [0, 1).
    low, span = ln_T.min(initial=np.inf), np.ptp(ln_T) + 1 if len(ln_T) else 1.0
    key = np.sort(cell + (ln_T - low) / span)
    size = np.bincount(cell)
    start = np.cumsum(size) - size
    middle = (key[start + (size - 1) // 2] + key[start + size // 2]) / 2 - np.arange(len(size))
    excess = ln_T - (low + span * middle)[cell]
    repeated = excess[(size >= MIN_REPEATS)[cell]]
    if not len(repeated):
        return excess, MIN_SPREAD
    # With a coarse clock most rows are exactly at the median, so the middle 80 % count too.
    q10, q90 = np.quantile(repeated, [0.1, 0.9])
    mad = MAD_TO_SIGMA * float(np.median(np.abs(repeated)))
    return excess, max(mad, float(q90 - q10) / Q10_TO_Q90, MIN_SPREAD)


@lru_cache(maxsize=2)
def runs_in_time(trace: Trace) -> list[NDArray[np.intp]]:
    """Return the rows of each run (and replica) by time, then by step counter, then as they stand."""
    run = trace.group(("run", "replica"))
    order = np.lexsort((*(trace.floats(name) for name in ("step", "t_s") if name in trace), run))
    return np.split(order, np.cumsum(np.bincount(run))[:-1])


RULES = (
    Rule("idle", find_idle),
    Rule("non_finite", find_non_finite, necessary=True),
    Rule("zero_time", lambda trace, _: trace.floats("T_ms") == 0),
    Rule("zero_time", find_too_fast, "system"),
    Rule("bad_value", find_bad_value, necessary=True),
    Rule("duplicate", find_duplicate, "system"),
    Rule("cold_start", lambda trace, _: _flagged(trace, "warmup")),
    Rule("cold_start", find_slow_start, "system"),
    Rule("max_t", lambda trace, options: trace.floats("T_ms") > (options.max_ms or np.inf)),
    Rule("outlier", find_outlier, "system", marks=True),
)  # every rule, in the order in which they are tried
