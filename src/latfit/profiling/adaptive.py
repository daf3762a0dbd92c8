"""Adaptive design: measure the cells that determine a fit first.

Greedy D-optimality per ms of cost (Atkinson, Donev & Tobias 2007, section 12) for a polynomial in ln B, ln S, cached
tokens and phases.
"""

from collections.abc import Sequence

import numpy as np

from latfit.profiling.shapes import StepShape

RIDGE = 1e-9


def order_by_information(cells: Sequence[StepShape], cost_ms: Sequence[float]) -> list[int]:
    B, S = (np.log([float(getattr(cell, name)) for cell in cells]) for name in ("B", "S"))
    cached = np.log1p([float(cell.context_tokens) for cell in cells])
    phases = [np.array([float(cell.phase == phase) for cell in cells]) for phase in ("prefill", "mixed")]
    columns = [np.ones(len(cells)), B, S, B**2, S**2, B * S, cached, *phases]
    slopes = np.column_stack([column / np.linalg.norm(column) for column in columns if np.any(column)])
    cost = np.array(cost_ms) + np.median(cost_ms)  # every visit has a cost besides its steps
    covariance = np.eye(slopes.shape[1]) / RIDGE
    order: list[int] = []
    for _ in cells:
        score = np.log1p(np.einsum("ij,jk,ik->i", slopes, covariance, slopes)) / cost
        score[order] = -1.0
        order.append(int(np.argmax(score)))
        step = covariance @ slopes[order[-1]]
        covariance = covariance - np.outer(step, step) / (1 + float(slopes[order[-1]] @ step))
    return order
