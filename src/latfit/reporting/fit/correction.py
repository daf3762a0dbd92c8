"""How much of a prediction is formula and how much is correction, as tables: by phase, and where it is largest.

The correction of a step is e^g - 1 in percent, its share of the formula. Steps of the trace are counted at the node of
the table that they are nearest to, so that nodes that no step is near are not shown; without a trace all are.
"""

import numpy as np

from latfit.model import (
    CONTEXT,
    OF_PREFILL_ALONE,
    Correction,
    FitResult,
    coordinates,
    corners_of,
    features_of,
    prefill_only,
)
from latfit.reporting.fit.tables import Table
from latfit.reporting.format import count
from latfit.stats import FloatArray
from latfit.trace import Trace, phases
from latfit.units import format_percent, number

LARGEST = 8
"""Places that are shown."""

REQUESTS = OF_PREFILL_ALONE[0]
_AXES = {
    "decode_requests": "decode requests",
    "prefill_tokens": "prefill tokens",
    "decode_context": "context per decode request",
    "prefill_length": "length per prefill request",
    "prefill_requests": "prefill requests",
}


def correction_tables(fit: FitResult, trace: Trace | None) -> list[Table]:
    """What a fit's correction does to its formula; nothing where it has none."""
    if fit.correction is None:
        return []
    if trace is None or (CONTEXT in fit.correction.columns and CONTEXT in fit.domain and CONTEXT not in trace):
        found = [_largest(each, each.values.ravel(), np.zeros(each.values.size)) for each in fit.correction.all]
        return [table for table in found if table.rows]
    features = features_of({name: trace.floats(name) for name in fit.domain if name in trace and name != "T_ms"})
    g, only = fit.correction.log_factor(features), prefill_only(features)
    own = [np.ones(len(g), dtype=bool)] if fit.correction.alone is None else [~only, only]
    found = [_by_phase(g, trace)]
    for table, rows in zip(fit.correction.all, own, strict=True):
        corners, shares = corners_of(table.nodes, coordinates(table.nodes, features))
        nearest = corners[np.arange(len(g)), np.argmax(shares, axis=1)][rows]
        steps = np.bincount(nearest, minlength=table.values.size).astype(np.float64)
        mean = np.bincount(nearest, g[rows], table.values.size) / np.maximum(steps, 1)
        found.append(_largest(table, mean, steps))
    return [table for table in found if table.rows]


def _by_phase(g: FloatArray, trace: Trace) -> Table:
    named, size = phases(trace).astype(str), 100 * np.abs(np.expm1(g))
    rows = [
        (
            name,
            count(int(inside.sum())),
            *(format_percent(float(np.quantile(size[inside], q))) for q in (0.5, 0.9, 1.0)),
        )
        for name, inside in ((name, named == name) for name in np.unique(named))
    ]
    return Table(
        "How much the correction changes the formula",
        ("steps", "number", "median", "p90", "largest"),
        rows,
        note="The rest of a prediction is the formula's; far from measured steps it is all of it.",
    )


def _largest(correction: Correction, g: FloatArray, steps: FloatArray) -> Table:
    """The nodes where it is largest. g, steps: mean correction and number of steps by node (m,)."""
    order = np.argsort(-np.abs(g), kind="stable")[:LARGEST]
    at = np.meshgrid(*(np.expm1(x) for x in correction.nodes.values()), indexing="ij")
    rows = [
        (
            *(number(float(each.ravel()[node])) for each in at),
            count(int(steps[node])) if steps.any() else "",
            f"{100 * np.expm1(g[node]):+.1f} %",
        )
        for node in order
        if abs(g[node]) > 0
    ]
    where = " in steps that are nothing but prefill" if REQUESTS in correction.nodes else ""
    return Table(
        f"Where the correction is largest{where}",
        (*(_AXES[name] for name in correction.nodes), "steps", "correction"),
        rows,
    ).without_empty()
