"""The optimal rule as a table: for each number waiting at an idle server, how many to serve. It solves nothing."""

from dataclasses import dataclass

from latfit.errors import WrongUsage


@dataclass(frozen=True)
class DispatchTable:
    """batches[q] of q waiting requests are served, 0 to wait, q = 0, 1, ...; beyond its end as many as at its end, the
    batch for long queues. Solved for `rate` per ms and batches up to `max_batch`."""

    batches: tuple[int, ...]
    rate: float
    max_batch: int

    def __post_init__(self) -> None:
        fits = all(0 <= b <= min(q, self.max_batch) for q, b in enumerate(self.batches))
        if not fits or not self.batches or self.batches[-1] < 1:
            raise WrongUsage(
                "an entry is above what waits or the largest batch, or the last one serves nobody",
                where="dispatch table",
                remedy="Give a batch of 0 to q for each number q waiting, at the end one above 0.",
            )

    @property
    def threshold(self) -> int:
        """Smallest queue that is served."""
        return next(q for q, b in enumerate(self.batches) if b)

    @property
    def is_control_limit(self) -> bool:
        """Whether all that wait are served, up to the largest batch, from the threshold on."""
        return all(self.takes(q) == min(q, self.max_batch) for q in range(self.threshold, self._end))

    @property
    def _end(self) -> int:
        """Beyond it nothing changes."""
        return max(len(self.batches), self.max_batch) + 1

    def takes(self, waiting: int) -> int:
        """How many to serve now; 0 to wait."""
        return self.batches[min(waiting, len(self.batches) - 1)]
