"""Drift of the residuals: whether the machine changed during a run, by how much, and when.

For a series x_1..x_n with mean m let S_k = sum_{i<=k} (x_i - m). Without a change max_k |S_k| / (sigma sqrt n) tends to
the largest excursion of a Brownian bridge, whose law is Kolmogorov's (CUSUM test; Csörgő & Horváth 1997). The change is
dated where |S_k| is largest, and its size is the difference of the means on both sides.

sigma^2 is the long-run variance: neighbours in time share their noise. The series is whitened by its lag-one
correlation rho, what remains is added up with falling (Bartlett) weights, and the sum divided by (1 - rho)^2 (Andrews &
Monahan 1992). It is taken after each side's own line is removed, or a large change would hide itself, and so would a
steady rise; that lowers rho, five times as much as the removal of one mean does in simulation, (1 + 3 rho)/n, which is
put back. A single heavy outlier is no change: the series is clipped at three robust standard deviations about its
median, or a tick of the clock if that is more.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from latfit.fitting.checking.autocorrelation import TimeOrder, clipped
from latfit.fitting.data import FitData
from latfit.model import Drift, LevelChange
from latfit.stats import FloatArray

LEAST_ROWS = 50
CERTAIN = 0.01
LEAST_SHIFT = 0.02
_SHRINKS = 5.0
_LEAST_PART = 0.3


@dataclass(frozen=True)
class ChangePoint:
    """index: first element after the change.  shift: mean after minus mean before.  p_value: of there being none."""

    index: int
    shift: float
    p_value: float


def change_point(series: FloatArray, tick: FloatArray | float = 0.0) -> ChangePoint | None:
    """The most likely change of level in a series (n,) in time order, of which a clock cannot tell ticks (n,); None
    where it does not vary or is short."""
    n = len(series)
    if n < LEAST_ROWS:
        return None
    x = clipped(series, tick=tick)
    if float(np.ptp(x)) < 1e-12:
        return None
    sums = np.cumsum(x - x.mean())
    index = int(np.argmax(np.abs(sums[:-1]))) + 1
    before, after = float(x[:index].mean()), float(x[index:].mean())
    rest = np.concatenate([_without_line(x[:index]), _without_line(x[index:])])
    sigma = math.sqrt(long_run_variance(rest))
    if sigma <= 0:
        return ChangePoint(index, after - before, 0.0)
    from scipy.special import kolmogorov

    excursion = float(np.abs(sums[index - 1])) / (sigma * math.sqrt(n))
    return ChangePoint(index, after - before, float(kolmogorov(excursion)))


def _without_line(series: FloatArray) -> FloatArray:
    """The series (n,) without its mean and its trend."""
    time = np.arange(len(series)) - (len(series) - 1) / 2
    level = series - series.mean()
    return np.asarray(level - time * (float(time @ level) / max(float(time @ time), 1.0)))


def long_run_variance(series: FloatArray) -> float:
    """n times the variance of the mean of an autocorrelated series (n,) of mean zero."""
    n = len(series)
    square = float(series @ series)
    if square <= 0:
        return 0.0
    rho = float(series[1:] @ series[:-1]) / square
    rho = min(max(rho + _SHRINKS * (1 + 3 * rho) / n, -0.97), 0.97)
    rest = series[1:] - rho * series[:-1]
    variance = float(rest @ rest) / n
    lags = max(1, int(4 * (n / 100) ** (2 / 9)))
    total = variance
    for k in range(1, min(lags, n - 2) + 1):
        total += 2 * (1 - k / (lags + 1)) * float(rest[k:] @ rest[:-k]) / n
    return max(total, _LEAST_PART * variance) / (1 - rho) ** 2


def drift(data: FitData, log_ratio: FloatArray) -> Drift:
    """The `drift` of the diagnostics from ln(observed/predicted) (n,) of rows: runs whose level changes by
    2 % or more, each with the time of the change, at 1 % over all runs together (Bonferroni); `variance_share`: what
    part of the residuals' variance within runs these changes are.

    Without times the change is dated by its row, where the rows' order is one of time (see `autocorrelation`).
    """
    order = TimeOrder.of(data) if data.times is None else TimeOrder(data.runs, tick=data.tick)
    series = order.series(np.arange(len(data)), log_ratio)
    if not series.rows:
        return Drift(reason="the trace has no column t_s, and its rows are sorted or not single steps")
    long = [i for i, rows in enumerate(series.rows) if len(rows) >= LEAST_ROWS]
    if not long:
        return Drift(reason=f"no run has {LEAST_ROWS} rows")
    found: dict[str, LevelChange] = {}
    moved = 0.0
    for i in long:
        rows, change = series.rows[i], change_point(series.values[i], series.ticks[i])
        if change is None or change.p_value * len(long) > CERTAIN or abs(change.shift) < math.log1p(LEAST_SHIFT):
            continue
        at = rows[change.index]
        moved += change.index * (1 - change.index / len(rows)) * change.shift**2
        name = f"run {i + 1}" if data.run is None else str(data.run[at])
        found[name] = LevelChange(
            math.expm1(change.shift),
            change.p_value,
            t_s=None if data.times is None else float(data.times[at]),
            row=int(at) + 1 if data.times is None else None,
        )
    told = zip(series.values, series.ticks, strict=True)
    parts = [clipped(values, tick=tick) for values, tick in told if len(values)]
    spread = sum(len(part) * float(np.var(part)) for part in parts)
    return Drift(
        found,
        runs_tested=len(long),
        variance_share=min(moved / spread, 1.0) if spread > 0 else 0.0,
        test="CUSUM, long-run variance",
        sentence=_sentence(found),
    )


def _sentence(found: Mapping[str, LevelChange]) -> str:
    if not found:
        return "No run changes its level by 2 % or more."
    name, worst = max(found.items(), key=lambda item: abs(item[1].relative_shift))
    more = f" ({len(found)} runs change)" if len(found) > 1 else ""
    faster = "slower" if worst.relative_shift > 0 else "faster"
    size = abs(worst.relative_shift) * 100
    when = f"t = {worst.t_s:.1f} s" if worst.t_s is not None else f"row {worst.row:,}"
    return f"Steps of {name or 'the run'} are {size:.0f} % {faster} from {when} on{more}."
