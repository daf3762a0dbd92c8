"""Independent random streams by seed, replication and use, so that policies can be compared on the same load.

Each stream is a PCG64 with a seed spawned from (seed; replication, use): what one use draws never shifts another.
"""

from dataclasses import dataclass

from numpy.random import PCG64, Generator, SeedSequence

ARRIVALS, LENGTHS, CLASSES, THINKING, SERVICE = range(5)
"""Uses. SERVICE is followed by the number of the execution path."""


@dataclass(frozen=True)
class Streams:
    """The random numbers of one replication."""

    seed: int
    replication: int = 0

    def generator(self, *use: int) -> Generator:
        """A fresh generator at the start of the stream of `use`, one or more whole numbers."""
        return Generator(PCG64(SeedSequence(self.seed, spawn_key=(self.replication, *use))))
