"""What to measure: a request, and its cells, the default grid for a budget or a grid that a user writes.

Two pilot steps give the cost of a cell: time = floor + flops / rate. The adaptive design measures first the cells that
determine a fit: greedy D-optimality per ms of cost (Atkinson, Donev & Tobias 2007, section 12) for a polynomial in
ln B, ln S, cached tokens and phases.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latfit.errors import WrongUsage, refuse
from latfit.profiling.devices.device import PRECISIONS, Device
from latfit.profiling.sampler import SAMPLES_PER_VISIT, VISITS_AT_LEAST
from latfit.profiling.shapes import PARTS, ModelShape, StepShape, step_flops

DEVICES = ("auto", "numpy", "openvino", "torch-cpu", "torch-cuda")
DESIGNS = ("grid", "adaptive")
MAX_PROCESSES = 16
DEFAULT_CONTEXT = 256
MAX_CELLS = 2000
MAX_TOKENS = 2**22
# (largest B, largest S, steps per doubling), from the richest to the poorest
LEVELS = ((128, 1024, 2), (128, 1024, 1), (64, 512, 2), (64, 512, 1), (32, 256, 1), (16, 128, 1), (4, 32, 1))
RIDGE = 1e-9  # of the adaptive design: the information before its first cell
_STEPS_PER_CELL = VISITS_AT_LEAST * (SAMPLES_PER_VISIT + 1) + 2


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure, and for how long: the options of `latfit profile`, parsed."""

    device: str = "auto"
    isa: str = "auto"
    model: str = "tiny"
    layers: int | None = None
    grid: str | None = None  # as in `parse_grid`; without it the budget decides
    contexts: tuple[int, ...] = (DEFAULT_CONTEXT,)
    threads: int | None = None
    budget_ms: float = 60_000.0
    precision: float = 0.03  # stop when the 95 % interval of every median is within this share
    seed: int = 0
    dtype: str = "auto"
    design: str = "grid"
    part: str = "step"
    histories: tuple[int, ...] = (0,)
    processes: int | None = None  # that take turns; None: up to three, as memory and budget allow
    pin: tuple[int, ...] = ()
    graphs: bool = True

    def check(self) -> None:
        for option, value, known in (
            ("--device", self.device, DEVICES),
            ("--dtype", self.dtype, ("auto", *PRECISIONS)),
            ("--set design", self.design, DESIGNS),
            ("--set kernel", self.part, PARTS),
        ):
            refuse(value not in known, f"{value!r} is not known", option, f"Choose one of {', '.join(known)}.")
        no_share = not 0 < self.precision < 1
        refuse(no_share, f"{self.precision} is no relative precision", "--precision", "Write 0.03 for ±3 %.")
        few = self.threads is not None and self.threads < 1
        refuse(few, f"{self.threads} threads is too few", "--threads", "Ask for 1 or more.")
        wrong = self.processes is not None and not 1 <= self.processes <= MAX_PROCESSES
        refuse(wrong, f"{self.processes} processes", "--processes", f"Ask for 1 to {MAX_PROCESSES}.")
        if self.grid is not None:
            parse_grid(self.grid, self.contexts)


@dataclass(frozen=True)
class StepCost:
    floor_ms: float
    flops_per_ms: float

    def step_ms(self, shape: ModelShape, cell: StepShape) -> float:
        return self.floor_ms + step_flops(shape, cell) / self.flops_per_ms


def time_pilot(device: Device, shape: ModelShape, context: int = DEFAULT_CONTEXT) -> StepCost:
    cells, quickest_ms = (StepShape(1, context), StepShape(prefill=(64,))), []
    for cell in cells:
        device.prepare(cell)
        quickest_ms.append(min(float(device.step_ms()) for _ in range(3)))
    floor_ms, busy_ms = quickest_ms
    more_flops = step_flops(shape, cells[1]) - step_flops(shape, cells[0])
    return StepCost(floor_ms, more_flops / max(busy_ms - floor_ms, 0.01 * busy_ms))


def grid_for_budget(
    shape: ModelShape,
    cost: StepCost,
    budget_s: float,
    contexts: Sequence[int] = (DEFAULT_CONTEXT,),
    histories: Sequence[int] = (0,),
) -> list[StepShape]:
    """Return the richest default grid that can be visited three times within the budget, else the poorest."""
    for level in LEVELS:
        cells = default_cells(*level, contexts=contexts, histories=histories)
        if sum(cost.step_ms(shape, cell) for cell in cells) * _STEPS_PER_CELL <= 1e3 * budget_s:
            return cells
    return cells


def default_cells(
    most_B: int,
    most_S: int,
    density: int = 1,
    contexts: Sequence[int] = (DEFAULT_CONTEXT,),
    histories: Sequence[int] = (0,),
) -> list[StepShape]:
    """Return decode, prefill and mixed cells with `density` (1 or 2) steps per doubling."""
    cells = [StepShape(B, context) for context in contexts for B in _scale(1, most_B, density)]
    cells += [StepShape(prefill=(S,), history=(before,)) for before in histories for S in _scale(16, most_S, density)]
    before = histories[0]
    for B in _scale(4, most_B // 2, density)[:: 2 * density]:
        chunked = _scale(16 * B, most_S, density)[::2]
        cells += [StepShape(prefill=(S // B,) * B, history=(before,) * B) for S in chunked]
        for context in contexts:
            chunks = _scale(2 * B, most_S, density)[::2]
            cells += [StepShape(B - 1, context, (S - B + 1,), (before,)) for S in chunks]
    return cells


def _scale(first: int, last: int, density: int) -> list[int]:
    """Return first, 2 first, 4 first, ... up to last; with density 2 also 1.5 times each."""
    values = []
    while first <= last:
        values.append(first)
        if density == 2 and first % 2 == 0 and first * 3 // 2 <= last:
            values.append(first * 3 // 2)
        first *= 2
    return values


def parse_grid(
    text: str, contexts: Sequence[int] = (DEFAULT_CONTEXT,), histories: Sequence[int] = (0,)
) -> list[StepShape]:
    """Return the cells of `B=1,2,4;S=1,16,64`: every pair with S >= B. Raises WrongUsage.

    S = B is a decode step; otherwise one request prefills S - B + 1 tokens while B - 1 decode.
    """
    remedy = "Write it like 'B=1,2,4,8;S=1,16,64,256'; pairs with S < B are left out."
    parts = re.fullmatch(r"([BS])=([\d,]+);([BS])=([\d,]+);*", text.replace(" ", ""), re.ASCII)
    if not parts or parts[1] == parts[3]:
        raise WrongUsage(f"{text!r} is not a list for B and one for S", where="--grid", remedy=remedy)
    axes = {parts[place]: sorted(parse_contexts(parts[place + 1].rstrip(","), "--grid", remedy)) for place in (1, 3)}
    pairs = [(B, S) for B in axes["B"] for S in axes["S"] if S >= B >= 1]
    none = not pairs or min(axes["B"] + axes["S"]) < 1
    found = f"{text!r}: no pair has S >= B, and every request computes at least one token"
    refuse(none, found, "--grid", remedy)
    cells = {
        StepShape(B, context) if S == B else StepShape(B - 1, context if B > 1 else 0, (S - B + 1,), (before,)): None
        for context in contexts
        for before in histories
        for B, S in pairs
    }
    refuse(len(cells) > MAX_CELLS, f"{len(cells)} cells, more than {MAX_CELLS}", "--grid", remedy)
    return list(cells)


def parse_contexts(text: str, option: str = "--context", remedy: str = "Write it like 128,512.") -> tuple[int, ...]:
    """Return the numbers of `128,512`, up to MAX_TOKENS. Raises WrongUsage."""
    is_list = re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text, re.ASCII)
    refuse(not is_list, f"{text!r} is not a list of whole numbers", option, remedy)
    values = tuple(dict.fromkeys(int(number) for number in text.split(",")))
    refuse(max(values) > MAX_TOKENS, f"{max(values)} tokens are too many, at most {MAX_TOKENS}", option, remedy)
    return values


def parse_cpus(text: str | None) -> tuple[int, ...]:
    found: set[int] = set()
    for part in () if text is None else text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise WrongUsage(f"{text!r} is no list of CPUs", where="--pin", remedy="Write it like 0,2-5.")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


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
