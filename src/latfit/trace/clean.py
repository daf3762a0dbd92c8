"""What is dropped before a fit, and why. Each rule has a name, can be switched, and is counted; none works silently.

Rules are tried in order and a row is counted under the first that drops it. Slow steps are not dropped by default: a
real prefill takes longer than any fixed limit, and the tail is what people plan for. Outliers are only marked.

Some rules find their limits in the data, those of each system (hardware, model, tp, path) in its own rows: beside a
CPU's steps of a second those of a GPU would be absurdly short.

* `zero_time`: engines that schedule asynchronously report steps of next to no time. Medians of T are taken in octaves
  of S (with five rows or more); a row below 5 % of the smallest of them is not a step's time.
* `cold_start`: the first steps of a run compile and capture. Each row is compared with the median of its (B,S) cell
  over all rows, in logarithms, against the spread that rows have about their cell's median: it stands out when it is
  1.5 times slower and four robust standard deviations away. The cold start is the longest beginning of a run, at most
  100 rows and a tenth of it, of which at least half stand out, the last one included. A first step whose cell has no
  other row stands out when it takes five times what nine tenths of the steps of its kind take that have half to twice
  its requests and its tokens.
* `outlier`: rows five robust standard deviations from the median of their cell.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput, WrongUsage
from latfit.stats import MAD_TO_SIGMA, FloatArray, IntArray, weighted_quantile
from latfit.trace.columns import REQUIRED
from latfit.trace.sketch.histogram import WEIGHT, Cells, step_count
from latfit.trace.table import Trace

Mask = NDArray[np.bool_]

TOO_FAST = 0.05
FEW_ROWS = 5
COLD_RATIO = 1.5
COLD_SIGMA = 4.0
COLD_ROWS = 100
COLD_ALONE = 5.0
COLD_RUNS = 100
"""Runs whose first step is looked at beside steps that are like it, not equal."""
OUTLIER_SIGMA = 5.0
Q90_TO_Q10 = 2.5631031310892007
"""Distance between the 10th and 90th percentile of a normal sample, in standard deviations."""
LARGEST = 2**31 - 1
"""Requests or tokens of a step; more are no count."""
MOST_CACHED = 2**40
"""Tokens in caches that a step reads; no cache holds a millionth of it."""
MOST_COUNTED = 2**53
"""From here on a number does not count any more: the next one is the same."""
SHORTEST_MS, LONGEST_MS = 1e-9, 1e13
"""Less than a cycle of a clock, and three hundred years."""
FEW_VALUES = 2**31
"""Below it a number stands for itself where rows are grouped, and the product of two is a number too."""
MOST_CELLS = 2**24
"""Numbers of cells that a table is made for, whether they are there or not."""
SPARSE = 4
"""Values a row, up to which rows are grouped by a table of all values: it takes less memory than sorting them."""
LEAST_SPREAD = 0.02
"""Relative spread below which rows of a cell are as good as equal: 4 and 5 sigma are never less than 8 and 10 %."""


CELL = (*REQUIRED, "context_tokens")
ONE_STEP = (*REQUIRED, "run", "replica", "t_s", "step")


@dataclass(frozen=True)
class CleanOptions:
    """max_ms: drop slower rows.  keep: reasons that are not to drop anything.  drop: reasons that are only marked
    otherwise (`outlier`).  most: accept that more than half of the rows is dropped."""

    max_ms: float | None = None
    keep: Sequence[str] = ()
    drop: Sequence[str] = ()
    most: bool = False


@dataclass(frozen=True, repr=False)
class Cleaned:
    """The rows that a fit may use, how many were read, how many each rule dropped or marked, and the reason by row.

    fate: for each row read (n,) the number of the rule that dropped it, counted from 1; 0 for rows that are used.
    marked: outliers that are still in.
    """

    trace: Trace
    rows_read: int
    dropped: Mapping[str, int]
    marked: Mapping[str, int] = field(default_factory=dict)
    fate: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))

    @property
    def reasons(self) -> NDArray[np.object_]:
        """Why each row read (n,) was dropped; empty for rows that are used."""
        return np.array(["", *(rule.reason for rule in RULES)], dtype=object)[self.fate]

    def __repr__(self) -> str:
        counts = ", ".join(f"{n:,} {reason}" for reason, n in self.dropped.items())
        return f"{self.trace!r}, of {self.rows_read:,} rows, dropped {counts or 'none'}"

    @property
    def rows_used(self) -> int:
        return step_count(self.trace)


@dataclass(frozen=True)
class Rule:
    """One reason. optional: it only marks unless it is asked to drop. necessary: no fit could use the rows, so that it
    cannot be switched off. compares: rows with others of their system. by_row: what a row alone can tell, wherever it
    stands; all that is looked for where rows come in any order. columns: those looked at, of rules that look at several
    rows. shares: its `find` is given what was found of the scatter, and adds to it."""

    reason: str
    meaning: str
    find: Callable[..., Mask]
    optional: bool = False
    necessary: bool = False
    compares: bool = False
    by_row: bool = False
    columns: Sequence[str] = ()
    shares: bool = False

    def hits(self, trace: Trace, used: Mask, options: CleanOptions, told: "Scatter") -> Mask:
        """Which of the rows that are still used (n,) it finds (n,). told: of the rules before."""
        given = (options, told) if self.shares else (options,)
        if self.by_row and not self.compares:
            return used & self.find(trace, *given)
        found = np.zeros(len(trace), dtype=bool)
        compared = trace.only(self.columns)
        if not (self.compares and trace.identity()):
            found[used] = self.find(compared if used.all() else compared.select(used), *given) if used.any() else False
            return found
        system, rows = trace.system_numbers(), np.flatnonzero(used)
        rows = rows[np.argsort(system[rows], kind="stable")]
        compared = compared.select(rows)
        ends = (np.flatnonzero(np.diff(system[rows], append=-1)) + 1).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            found[rows[begin:end]] = self.find(compared.part(begin, end), *given)
        return found

    def only_marks(self, options: CleanOptions) -> bool:
        return self.optional and self.reason not in options.drop


def tried(trace: Trace, options: CleanOptions, rules: "Sequence[Rule]") -> Iterator[tuple[Rule, Mask]]:
    """Each rule that finds rows, in order, with those rows (n,); what is dropped once is not looked at again."""
    used = np.ones(len(trace), dtype=bool)
    told: Scatter = []
    for rule in rules:
        if rule.reason in options.keep and not rule.necessary:
            continue
        hit = rule.hits(trace, used, options, told)
        if hit.any():
            yield rule, hit
        if not rule.only_marks(options):
            used &= ~hit


def clean(trace: Trace, options: CleanOptions | None = None) -> Cleaned:
    """Drop what cannot be a step, by `RULES`. Raises WrongUsage for unknown reasons in the options."""
    options = options or CleanOptions()
    check_reasons(options)
    if WEIGHT in trace:
        return _cleaned_before(trace)
    fate = np.zeros(len(trace), dtype=np.uint8)
    dropped: Counter[str] = Counter()
    marked: Counter[str] = Counter()
    for rule, hit in tried(trace, options, RULES):
        (marked if rule.only_marks(options) else dropped)[rule.reason] += int(np.count_nonzero(hit))
        if not rule.only_marks(options):
            fate[hit] = RULES.index(rule) + 1
    used = trace.select(fate == 0) if dropped else trace
    return Cleaned(used, len(trace), dict(dropped), dict(marked), fate)


def _cleaned_before(trace: Trace) -> Cleaned:
    """Rows of cells stand for steps that were cleaned when the cells were made; the counts are in the provenance.

    Raises BadInput where a row is no step, or stands for no number of them, and where all stand for none.
    """
    weights = np.nan_to_num(trace.floats(WEIGHT), nan=1.0, posinf=np.inf)
    bad = ~((weights >= 0) & (weights <= MOST_COUNTED))
    for rule, hit in tried(trace, CleanOptions(), [rule for rule in RULES if rule.necessary]):
        bad |= hit & rule.necessary
    if bad.any():
        raise BadInput(
            f"row {int(np.argmax(bad)) + 1} is no cell: its B, S, T_ms or {WEIGHT} is impossible ({bad.sum():,} such)",
            remedy=f"Make the cells again, or leave {WEIGHT} out where each row is one step.",
        )
    if step_count(trace) == 0:
        raise BadInput(f"{WEIGHT} is zero in every row", remedy=f"Leave {WEIGHT} out where each row is one step.")
    facts = trace.provenance.get("cells", {})
    read, dropped = facts.get("rows_read"), facts.get("dropped")
    counts = dropped.items() if isinstance(dropped, dict) else ()
    return Cleaned(
        trace,
        read if isinstance(read, int) else step_count(trace),
        {str(reason): rows for reason, rows in counts if isinstance(rows, int)},
        {},
        np.zeros(len(trace), dtype=np.uint8),
    )


def check_not_most(cleaned: Cleaned | Cells, options: CleanOptions, where: str) -> None:
    """A trace that loses more than half of its rows, or all, is not what it seems. Raises BadInput."""
    lost = cleaned.rows_read - cleaned.rows_used
    expected = cleaned.dropped.get("cold_start", 0) + cleaned.dropped.get("idle", 0)
    few = options.most or 2 * (lost - expected) <= cleaned.rows_read - expected
    if few and (cleaned.rows_used or not cleaned.rows_read):
        return
    counts = ", ".join(f"{n:,} {reason}" for reason, n in cleaned.dropped.items())
    raise BadInput(
        f"{lost:,} of {cleaned.rows_read:,} rows would be dropped ({counts})",
        where=where,
        remedy="Check --map and --unit: B is requests (>= 1), S tokens (>= B), T_ms milliseconds. --keep REASON keeps a"
        " rule's rows, --allow-drops accepts it (`latfit ingest --allow-drops --dropped FILE` shows them).",
    )


def check_reasons(options: CleanOptions) -> None:
    """Raises WrongUsage for a reason that no rule has, or that cannot be switched."""
    can_keep = list(dict.fromkeys(rule.reason for rule in RULES if not (rule.necessary or rule.optional)))
    can_drop = [rule.reason for rule in RULES if rule.optional]
    for option, reasons, known in (("--keep", options.keep, can_keep), ("--drop", options.drop, can_drop)):
        for reason in reasons:
            if reason not in known:
                raise WrongUsage(
                    f"{reason!r} cannot be chosen", where=option, remedy=f"Choose from {', '.join(known)}."
                )


def _flagged(*names: str) -> Callable[[Trace, CleanOptions], Mask]:
    def find(trace: Trace, _: CleanOptions) -> Mask:
        found = np.zeros(len(trace), dtype=bool)
        for name in names:
            if name in trace:
                found |= trace[name].astype(bool)
        return found

    return find


def _idle(trace: Trace, options: CleanOptions) -> Mask:
    B, S = trace.floats("B"), trace.floats("S")
    empty = (B == 0) & (S == 0)
    if are_window_means(trace):
        empty |= B < 1
    return np.asarray(_flagged("idle")(trace, options) | empty)


OF_WINDOWS = ("window_ms", "window_steps", "B_sd", "S_sd")


def are_window_means(trace: Trace) -> bool:
    """Whether rows are means over the steps of a window: a column tells of windows, or most rows have a fraction of a
    request. Rows of cells are not."""
    if WEIGHT in trace:
        return False
    if any(np.any(trace.floats(name) > 0) for name in OF_WINDOWS if name in trace):
        return True
    B = trace.floats("B")
    return bool(np.mean((np.rint(B) != B) & np.isfinite(B)) > 0.5) if len(B) else False


def _non_finite(trace: Trace, _: CleanOptions) -> Mask:
    return np.asarray(~np.logical_and.reduce([np.isfinite(trace.floats(name)) for name in ("B", "S", "T_ms")]))


def _no_time(trace: Trace, _: CleanOptions) -> Mask:
    return np.asarray(trace.floats("T_ms") == 0)


def _hardly_any_time(trace: Trace, _: CleanOptions) -> Mask:
    T = trace.floats("T_ms")
    return np.asarray(shortest_believable_ms(trace.floats("S"), T) > T)


def shortest_believable_ms(S: FloatArray, T_ms: FloatArray, weights: FloatArray | None = None) -> float:
    """Below this no step's time is its own: a share of the smallest median of T over octaves of S; 0 for few rows."""
    octave = np.frexp(S)[1].astype(np.int16)
    usual = []
    for size in np.flatnonzero(np.bincount(octave)):
        T = T_ms[octave == size]
        if weights is not None:
            of_them = weights[octave == size]
            usual += [weighted_quantile(T, 0.5, of_them)] if of_them.sum() >= FEW_ROWS else []
        elif len(T) >= FEW_ROWS:
            T.partition(middle := (len(T) + 1) // 2 - 1)  # a copy of some of the rows
            usual.append(T[middle])
    return TOO_FAST * float(min(usual, default=0.0))


def _bad_value(trace: Trace, _: CleanOptions) -> Mask:
    T = trace.floats("T_ms")
    return np.asarray((T < SHORTEST_MS) | (T > LONGEST_MS) | impossible_steps(trace))


def impossible_steps(trace: Trace) -> Mask:
    """Rows whose B, S and parts (n,) no step can have, whatever its time. B and S are finite."""
    B, S = trace.floats("B"), trace.floats("S")
    bad = (B < 1) | (S < B) | (S > LARGEST)
    for part, whole in (("prefill_tokens", S), ("prefill_requests", B)):
        if part in trace:
            bad |= (trace.floats(part) > whole) | (trace.floats(part) < 0)
    for cached in ("context_tokens", "prefill_context_tokens"):
        if cached in trace:
            bad |= (trace.floats(cached) < 0) | (trace.floats(cached) > MOST_CACHED)
    for counted in ("queued_requests", "step", "rep"):
        if counted in trace and trace[counted].dtype.kind == "f":
            bad |= np.abs(trace[counted]) > MOST_COUNTED
    return np.asarray(bad)


def _duplicate(trace: Trace, _: CleanOptions) -> Mask:
    """The same step twice: run, replica, time and counter agree as well as B, S and T. Never B, S and T alone."""
    if "step" not in trace:
        return np.zeros(len(trace), dtype=bool)
    of_step = _together(_places(trace, name) for name in ("run", "replica", "step") if name in trace)
    ordered = np.sort(of_step)
    again = np.isin(of_step, ordered[1:][ordered[1:] == ordered[:-1]])
    rows = np.flatnonzero(again)
    if len(rows):  # the same counter: whether all else is the same
        several = trace.only(ONE_STEP).select(rows)
        codes = [_places(several, name) for name in several.columns]
        again[rows[np.unique(np.stack(codes, axis=1), axis=0, return_index=True)[1]]] = False
    return again


Scatter = list[tuple[Trace, tuple[FloatArray, float]]]
"""Rows, and their `excess_over_cell`, as rules of one cleaning have found it."""


def _cold_start(trace: Trace, options: CleanOptions, told: Scatter) -> Mask:
    found = _flagged("warmup")(trace, options)
    if "t_s" not in trace or "rep" in trace:
        return found  # a grid marks its own warm-up, and rows without time have no first ones
    told.append((trace, excess_over_cell(trace)))
    excess, sigma = told[-1][1]
    stands_out = excess > max(np.log(COLD_RATIO), COLD_SIGMA * sigma)
    runs, T = runs_in_time(trace), trace.floats("T_ms")
    usual = float(np.median(T[:: max(len(T) // 1000, 1)])) if len(T) else 0.0
    for begin in [int(rows[0]) for rows in runs[:COLD_RUNS] if len(rows) >= 10]:
        stands_out[begin] |= T[begin] > COLD_ALONE * usual and _slow_without_equal(trace, begin)
    for rows in runs:
        first = rows[: min(COLD_ROWS, len(rows) // 10)]
        slow = stands_out[first]
        share = np.cumsum(slow) / np.arange(1, len(slow) + 1)
        ends = np.flatnonzero(slow & (share >= 0.5))
        if len(ends):
            found[first[: ends[-1] + 1]] = True
    return found


def _slow_without_equal(trace: Trace, row: int) -> bool:
    """Whether a step that is the only one of its cell takes far longer than those like it."""
    B, S, T = trace.floats("B"), trace.floats("S"), trace.floats("T_ms")
    if np.count_nonzero((B[row] == B) & (S[row] == S)) > 1:
        return False
    alike = ((S > B) == (S[row] > B[row])) & (np.maximum(B / B[row], B[row] / B) <= 2)
    alike &= np.maximum(S / S[row], S[row] / S) <= 2
    alike[row] = False
    return bool(np.count_nonzero(alike) >= FEW_ROWS and T[row] > COLD_ALONE * np.quantile(T[alike], 0.9))


def _too_slow(trace: Trace, options: CleanOptions) -> Mask:
    return trace.floats("T_ms") > (np.inf if options.max_ms is None else options.max_ms)


def _outlier(trace: Trace, _: CleanOptions, told: Scatter) -> Mask:
    known = next((excess for rows, excess in told if _same_rows(rows, trace)), None)  # unless some were cold
    excess, sigma = known or excess_over_cell(trace)
    return np.abs(excess) > OUTLIER_SIGMA * sigma


def _same_rows(one: Trace, other: Trace) -> bool:
    return all(name in one and one[name] is other[name] for name in CELL if name in other)


def excess_over_cell(trace: Trace) -> tuple[FloatArray, float]:
    """ln T minus its cell's median (n,), and the robust spread of that over cells of three rows or more.

    A cell is one B and S, and one bin of the context (a factor of 1.25) where it is known.
    """
    names = ("B", "S", "context_tokens") if "context_tokens" in trace else ("B", "S")
    # one after another: each column of many rows is as large as the trace's own
    cell = _together(_context_bins(trace) if name == "context_tokens" else _places(trace, name) for name in names)
    if int(cell.max(initial=0)) > MOST_CELLS:
        cell = _ranked(cell)
    T = trace.floats("T_ms")
    middle, size = _medians(cell, T)
    excess = np.log(T)
    excess -= middle[cell]
    repeated = (size >= 3)[cell]
    del cell
    return excess, max(_spread(excess[repeated]), LEAST_SPREAD) if repeated.any() else LEAST_SPREAD


def _context_bins(trace: Trace) -> IntArray:
    bins = np.array(trace["context_tokens"], dtype=np.float64)
    np.nan_to_num(bins, copy=False)
    bins += 1
    np.log(bins, out=bins)
    bins /= np.log(1.25)
    return np.asarray(np.floor(bins, out=bins).astype(np.int32))


def _medians(cell: IntArray, T: FloatArray) -> tuple[FloatArray, IntArray]:
    """Median of ln T and number of rows, by number of cell (0 to the largest).

    Cell and T are sorted as one whole number, the cell in front: the bits of floats above zero are ordered as they are.
    What has no room are the last bits of T, less than 2^-20 of it for up to 2^30 cells and a T that spans 12 octaves.
    """
    bits = T.view(np.uint64)
    lowest = bits.min(initial=np.uint64(1) << np.uint64(63))
    span = int(bits.max(initial=0)) - int(lowest)
    room = 64 - max(int(cell.max(initial=0)).bit_length(), 1)
    lost = np.uint64(max(span.bit_length() - room, 0))
    key = bits - lowest
    key >>= lost
    front = cell.astype(np.uint64)
    front <<= np.uint64(room)
    key |= front
    del front
    key.sort()
    size = np.bincount(cell)
    start = np.cumsum(size) - size
    there = np.flatnonzero(size)
    key &= (np.uint64(1) << np.uint64(room)) - np.uint64(1)

    def ln_T(rows: IntArray) -> FloatArray:
        return np.asarray(np.log(((key[rows] << lost) + lowest).view(np.float64)))

    begin, rows = start[there], size[there]
    middle = np.zeros(len(size))
    middle[there] = 0.5 * (ln_T(begin + (rows - 1) // 2) + ln_T(begin + rows // 2))
    return middle, size


def _spread(excess: FloatArray) -> float:
    """Robust standard deviation, in place of `excess`: the larger of what the middle half says and what the middle 80 %
    say, because a clock with a coarse tick puts most rows exactly on their cell's median."""
    low, high = np.quantile(excess, [0.1, 0.9], overwrite_input=True)
    size = np.abs(excess, out=excess)
    return max(MAD_TO_SIGMA * float(np.quantile(size, 0.5, overwrite_input=True)), float(high - low) / Q90_TO_Q10)


def runs_in_time(trace: Trace) -> list[NDArray[np.intp]]:
    """Row numbers of each run (and replica), in time order, then by counter, then as they stood."""
    run = _together((_places(trace, name) for name in ("run", "replica") if name in trace), len(trace))
    order = _grouped(run, np.arange(len(trace)))
    ends = np.flatnonzero(np.diff(run[order])) + 1
    when = [trace.floats(name) for name in ("step", "t_s") if name in trace]
    if when and not _ascend([column[order] for column in when] if len(ends) else when, ends):
        order = np.lexsort((*when, run))
    return np.split(order, ends)


def _ascend(columns: Sequence[FloatArray], ends: NDArray[np.intp]) -> bool:
    """Whether rows stand in the order of the last column, then of those before it, within parts that end at `ends`."""
    fine = np.ones(max(len(columns[0]) - 1, 0), dtype=bool)
    for column in columns:
        fine = (column[:-1] < column[1:]) | ((column[:-1] == column[1:]) & fine)
    fine[ends - 1] = True
    return bool(fine.all())


def _places(trace: Trace, name: str) -> IntArray:
    """A number for each row's value of a column (n,), from 0 on, equal and ordered as the values are."""
    column = trace[name]
    if column.dtype == object:
        code, values = trace.coded(name)
        return np.asarray(np.unique(np.array(values, dtype=np.str_), return_inverse=True)[1].ravel()[code])
    whole = column.dtype.kind in "iu" or (column.dtype.kind == "f" and bool(np.all(np.rint(column) == column)))
    if whole and len(column) and float(column.max()) - float(column.min()) < FEW_VALUES:
        return np.asarray((column - column.min()).astype(np.int64))
    return np.asarray(np.unique(column, return_inverse=True)[1].ravel())


def _together(columns: Iterable[IntArray], rows: int = 0) -> IntArray:
    """One number for each row's numbers in all columns (n,), ordered by the first, then by the next; 0 for `rows` rows
    where there is no column."""
    key: IntArray | None = None
    size = 1
    for column in columns:
        values = int(column.max(initial=0)) + 1
        if key is None:
            key, size = column.astype(np.int64), values
            continue
        if size * values >= FEW_VALUES:
            key = _ranked(key)
            size = int(key.max(initial=0)) + 1
        key *= values
        key += column
        size *= values
    return np.zeros(rows, dtype=np.int64) if key is None else key


def _ranked(key: IntArray) -> IntArray:
    """A key (n,) from 0 on as places among its values: by marking these, unless they are far apart, then by sorting."""
    values = int(key.max(initial=0)) + 1
    if values > SPARSE * len(key):
        return np.asarray(np.unique(key, return_inverse=True)[1].ravel())
    there = np.zeros(values, dtype=bool)
    there[key] = True
    return np.asarray((np.cumsum(there, dtype=np.int32) - np.int32(1))[key], dtype=np.int64)


def _grouped(key: IntArray, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """`order` sorted by a key (n,) below 2^62, rows of one key as they stood: by 16 bits at a time, which NumPy does by
    radix sort, unless they are many."""
    bits = int(key.max(initial=0)).bit_length()
    if bits > 48:
        return order[np.argsort(key[order], kind="stable")]
    for shift in range(0, max(bits, 1), 16):
        order = order[np.argsort((key[order] >> shift).astype(np.uint16), kind="stable")]
    return order


RULES: tuple[Rule, ...] = (
    Rule("dummy", "empty step that keeps data-parallel engines together", _flagged("dummy"), by_row=True),
    Rule("idle", "the engine had nothing to do, or less than one request over a window", _idle, by_row=True),
    Rule("non_finite", "B, S or T missing, infinite or not a number", _non_finite, necessary=True, by_row=True),
    Rule("zero_time", "no time at all: asynchronous scheduling", _no_time, necessary=True, by_row=True),
    Rule(
        "bad_value",
        "T below 1e-9 or above 1e13 ms, B < 1, S < B or S of 2^31 or more, a part below zero, a prefill part larger"
        " than the whole, 2^40 cached tokens or more, a counter of 2^53 or more",
        _bad_value,
        necessary=True,
        by_row=True,
    ),
    Rule(
        "zero_time",
        "absurdly little time: asynchronous scheduling",
        _hardly_any_time,
        compares=True,
        columns=("S", "T_ms"),
    ),
    Rule("duplicate", "the same step of the same run twice", _duplicate, columns=ONE_STEP),
    Rule(
        "cold_start",
        "run to warm up, or the slow first steps of a run",
        _cold_start,
        compares=True,
        by_row=True,
        shares=True,
        columns=(*CELL, "run", "replica", "t_s", "step", "rep", "warmup"),
    ),
    Rule("max_t", "slower than the limit that was asked for", _too_slow, by_row=True),
    Rule(
        "outlier",
        "far from the median of its (B,S) cell",
        _outlier,
        optional=True,
        compares=True,
        columns=CELL,
        shares=True,
    ),
)
"""Every rule, in the order in which they are tried."""
