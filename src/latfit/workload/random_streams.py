"""Random numbers with a place for each use, so that two policies can be run on the very same load.

Every stream is a PCG64 whose seed is spawned from (seed; replication, use): what one use draws never shifts another,
the arrivals of replication 3 are the same whatever policy serves them and however many replications or workers there
are. Comparing policies on common random numbers takes the load's own noise out of the difference.
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
