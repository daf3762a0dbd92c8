"""The optimal rule as a table: for each number waiting at an idle server, dispatch or wait. It solves nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DispatchTable:
    """dispatch[q] for q waiting requests, q = 0, 1, ...; beyond its end it dispatches. Solved for `rate` per ms."""

    dispatch: tuple[bool, ...]
    rate: float
    max_batch: int

    @property
    def threshold(self) -> int:
        """Smallest queue that is dispatched."""
        return self.dispatch.index(True) if True in self.dispatch else len(self.dispatch)

    @property
    def is_control_limit(self) -> bool:
        """Whether everything from the threshold on is dispatched."""
        return all(self.dispatch[self.threshold :])

    def takes(self, waiting: int) -> int:
        """How many to dispatch now; 0 to wait."""
        if waiting < len(self.dispatch) and not self.dispatch[waiting]:
            return 0
        return min(waiting, self.max_batch)
