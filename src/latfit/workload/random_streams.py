"""Independent random streams by seed, replication and use, so that policies are compared on the same load."""

from dataclasses import dataclass

from numpy.random import PCG64, Generator, SeedSequence

ARRIVALS, LENGTHS, CLASSES, THINKING, SERVICE = range(5)
"""Uses of a stream. SERVICE is followed by the number of the execution path."""


@dataclass(frozen=True)
class Streams:
    """Random streams of one replication: PCG64 with seeds spawned from (seed; replication, use)."""

    seed: int
    replication: int = 0

    def generator(self, *use: int) -> Generator:
        """Return a generator at the start of the stream of `use`, one or more whole numbers."""
        return Generator(PCG64(SeedSequence(self.seed, spawn_key=(self.replication, *use))))
