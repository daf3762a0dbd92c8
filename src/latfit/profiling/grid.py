"""Which cells to measure: the default grid for a budget, and the grid that a user writes down.

The default grid spans decode steps, prefill of one request and of several, and decode beside a prefill chunk, on a
logarithmic scale. Two pilot steps tell what a cell costs: time = floor + flops / rate. The largest grid whose cells can
all be visited three times within the budget is taken.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from latfit.errors import WrongUsage
from latfit.profiling.devices.device import Device
from latfit.profiling.result import Limit
from latfit.profiling.sampler import SAMPLES_PER_VISIT, VISITS_AT_LEAST
from latfit.profiling.shapes import GIB, ModelShape, StepShape, step_bytes, step_flops

DEFAULT_CONTEXT = 256
MAX_CELLS = 2000

# (largest B, largest S, steps per doubling), from the richest to the poorest
LEVELS = ((128, 1024, 2), (128, 1024, 1), (64, 512, 2), (64, 512, 1), (32, 256, 1), (16, 128, 1), (4, 32, 1))

_STEPS_PER_CELL = VISITS_AT_LEAST * (SAMPLES_PER_VISIT + 1) + 2


@dataclass(frozen=True)
class StepCost:
    """An estimate of a step's time in ms: `floor_ms` + flops / `flops_per_ms`."""

    floor_ms: float
    flops_per_ms: float

    def step_ms(self, shape: ModelShape, cell: StepShape) -> float:
        return self.floor_ms + step_flops(shape, cell) / self.flops_per_ms


def pilot(device: Device, shape: ModelShape, context: int = DEFAULT_CONTEXT) -> StepCost:
    """Time one decode token and 64 prompt tokens, each twice after a warm-up step. Raises DeviceOutOfMemory."""
    small, large = StepShape(1, context), StepShape(prefill=(64,))
    floor_ms, busy_ms = (_quickest_ms(device, cell) for cell in (small, large))
    more_flops = step_flops(shape, large) - step_flops(shape, small)
    return StepCost(floor_ms, more_flops / max(busy_ms - floor_ms, 0.01 * busy_ms))


def _quickest_ms(device: Device, cell: StepShape) -> float:
    device.prepare(cell)
    return min(device.step_ms() for _ in range(3))


def grid_cost_s(shape: ModelShape, cells: Iterable[StepShape], cost: StepCost) -> float:
    """Return the seconds for the fewest visits that can finish every cell."""
    return sum(cost.step_ms(shape, cell) for cell in cells) * _STEPS_PER_CELL / 1e3


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
        if grid_cost_s(shape, cells, cost) <= budget_s:
            return cells
    return cells


def default_cells(
    most_B: int,
    most_S: int,
    density: int = 1,
    contexts: Sequence[int] = (DEFAULT_CONTEXT,),
    histories: Sequence[int] = (0,),
) -> list[StepShape]:
    """Return decode, prefill and mixed cells on a logarithmic scale with `density` (1 or 2) steps per doubling.

    Cells with decode requests come once for each context, a single chunk once for each history, other chunks with the
    first history.
    """
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
    """Return first, 2 first, 4 first, ... up to last; with density 2 also one and a half times each."""
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
    """Return the cells of a grid such as `B=1,2,4,8;S=1,16,64,256`: every pair with S >= B.

    S = B is a decode step; otherwise one request prefills S - B + 1 tokens beside B - 1 that decode. Raises WrongUsage
    for anything else.
    """
    axes: dict[str, list[int]] = {}
    for part in text.replace(" ", "").strip(";").split(";"):
        match = re.fullmatch(r"([BS])=(\d+(?:,\d+)*),?", part)
        if not match or match.group(1) in axes:
            raise _bad_grid(text, f"{part!r} is not one list of whole numbers for B or for S")
        axes[match.group(1)] = sorted({int(number) for number in match.group(2).split(",")})
    if len(axes) != 2:
        raise _bad_grid(text, f"it has no values for {'S' if 'B' in axes else 'B'}")
    if min(axes["B"] + axes["S"]) < 1 or max(axes["B"] + axes["S"]) > 2**22:
        raise _bad_grid(text, f"B and S lie between 1 and {2**22}")
    pairs = [(B, S) for B in axes["B"] for S in axes["S"] if S >= B]
    if not pairs:
        raise _bad_grid(text, "no pair has S >= B, and every request computes at least one token")
    depths = [(context, before) for context in contexts for before in histories]
    cells = {_grid_cell(B, S, *depth): None for depth in depths for B, S in pairs}
    if len(cells) > MAX_CELLS:
        raise _bad_grid(text, f"it has {len(cells)} cells, more than {MAX_CELLS}")
    return list(cells)


def _grid_cell(B: int, S: int, context: int, history: int) -> StepShape:
    if S == B:
        return StepShape(B, context)
    return StepShape(B - 1, context if B > 1 else 0, (S - B + 1,), (history,))


def _bad_grid(text: str, found: str) -> WrongUsage:
    return WrongUsage(
        f"{text!r}: {found}",
        where="--grid",
        remedy="Write it like 'B=1,2,4,8;S=1,16,64,256'; pairs with S < B are left out.",
    )


def parse_contexts(text: str, option: str = "--context") -> tuple[int, ...]:
    """Return numbers of cached tokens, from `256` or `128,512`. Raises WrongUsage."""
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise WrongUsage(f"{text!r} is not a list of whole numbers", where=option, remedy="Write it like 128,512.")
    values = tuple(dict.fromkeys(int(number) for number in text.split(",")))
    if max(values) > 2**22:
        raise WrongUsage(f"{max(values)} cached tokens are too many", where=option, remedy=f"At most {2**22}.")
    return values


def parse_cpus(text: str | None) -> tuple[int, ...]:
    """Return CPU numbers from `0,2-5`; none for None. Raises WrongUsage."""
    found: set[int] = set()
    for part in (text or "").split(",") if text is not None else ():
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if not match:
            raise WrongUsage(f"{text!r} is no list of CPUs", where="--pin", remedy="Write it like 0,2-5.")
        found.update(range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1))
    return tuple(sorted(found))


def split_by_memory(
    shape: ModelShape, cells: Iterable[StepShape], free_bytes: int | None
) -> tuple[list[StepShape], list[Limit]]:
    """Return the cells that fit in nine tenths of the free memory, and a limit for each other one."""
    fitting, limits = [], []
    for cell in cells:
        needed = step_bytes(shape, cell)
        if free_bytes is None or needed <= 0.9 * free_bytes:
            fitting.append(cell)
        else:
            message = f"needs {needed / GIB:.2f} GiB beside the weights, {free_bytes / GIB:.2f} GiB are free"
            limits.append(Limit(cell, "does_not_fit", message))
    return fitting, limits
