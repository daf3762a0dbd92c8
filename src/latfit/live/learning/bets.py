"""Bets on whether the times of batches have moved: two kinds, each fair or worse as long as they have not.

Let r be a batch's ln time less the one in use. That times are no slower (faster: the same with -r) can mean two things:

The median. r is above MARGIN with probability 1/2 at most, whatever went before. The sign of r - MARGIN is bet on with
a share f of a purse: (1 + f) where it is positive, (1 - f) where not, for three f. This holds whatever the distribution
and whatever the dependence, and nothing else can be bet on so: where times scatter as an exponential does, twice the
time has 68 % above, and a sign is worth 0.07 nats.

The earlier batches. r is distributed as those of the batches before it, since the times in use were taken, all
independent. Then the rank of r among them is uniform, and independent of the ranks before it (Vovk, Nouretdinov &
Gammerman 2003 bet on such ranks): with u the share of them, r included, that are at r - MARGIN or above, P(u <= x) <=
x, and a bet g(u) that decreases in u with integral 1 is fair or worse, whatever the distribution, heavy tails included.
The earlier ones are moved up where their median is below the time in use, which only makes u larger. Where times
scatter as an exponential does, twice the time has u^0.55 uniform; g = 0.55 u^-0.45 would be worth 0.22 nats a batch,
the most that is possible. The bet taken is such a power, cut off at 1.8, so that 20 batches alone, as extreme as they
like, are not enough; that leaves 0.12. A line from 1.75 to 0.25 is worth as much for faster, where short times cannot
be extreme in this sense. Ranks among n earlier batches tell m new ones as well as n m / (n + m) among endless ones
would.

One gambler begins at each batch with 1. Those of one bet have M <- (M + 1) g together, E[M_t] <= t, and the mean number
of batches until M first reaches c is at least c: an e-detector (Shin, Ramdas & Rinaldo 2024). So is a mean of several,
here with the weights below. With c = 2 RUN_LENGTH for each direction the mean number of batches between false alarms is
RUN_LENGTH at the least. Where batches depend on each other the bets on signs alone are fair, as far as the median given
those before holds.
"""

import math

MARGIN = math.log(1.1)
RUN_LENGTH = 1_000_000.0
STAKES = (0.1, 0.25, 0.5)
WON, LOST = tuple(1 + f for f in STAKES), tuple(1 - f for f in STAKES)

POWER, CUT = 0.6, 0.08
SCALE = 1 / (CUT**POWER + (1 - CUT**POWER) / POWER)
"""Of the bet SCALE max(u, CUT)^(POWER - 1), so that its integral is 1; it is 1.8 at the most."""
STEEPEST = SCALE * CUT ** (POWER - 1)

SLANT = 0.75
CLIMB_WEIGHT, LINE_WEIGHT = 3.0, 2.0
"""Of bets on ranks, beside 1 for each of the three on signs."""

ENOUGH = 2 * RUN_LENGTH * (len(STAKES) + CLIMB_WEIGHT + LINE_WEIGHT)
"""Of the purses of one direction together, by their weights."""

BIN, ROW = 0.01, 20
HALF = ROW * ROW
"""Ranks are taken by bins of ln time; so many on either side of 0, kept in rows."""


class Earlier:
    """Batches since the times in use were taken, by how far off they were."""

    __slots__ = ("_below", "_bins", "_middle", "_rows", "count")

    def __init__(self) -> None:
        self._bins, self._rows = [0] * (2 * HALF), [0] * (2 * ROW)
        self.count = self._below = 0
        self._middle = HALF  # the bin of the median, and how many are below it

    def ranks(self, excess: float) -> tuple[float, float]:
        """u for slower and for faster; those in the same bin count as more extreme."""
        median, room = (self._middle - HALF) * BIN, self.count + 1
        slower = room - self._under(_bin(excess - MARGIN + min(median, 0.0)))
        faster = 1 + self._under(_bin(excess + MARGIN + max(median, 0.0)) + 1)
        return slower / room, faster / room

    def add(self, excess: float) -> None:
        found = _bin(excess)
        self._bins[found] += 1
        self._rows[found // ROW] += 1
        self._below += found < self._middle
        self.count += 1
        while 2 * self._below > self.count:
            self._middle -= 1
            self._below -= self._bins[self._middle]
        while 2 * (self._below + self._bins[self._middle]) < self.count:
            self._below += self._bins[self._middle]
            self._middle += 1

    def _under(self, end: int) -> int:
        """How many are in bins before this one."""
        row = end // ROW
        return sum(self._rows[:row]) + sum(self._bins[row * ROW : end])


def _bin(excess: float) -> int:
    return min(max(int(excess / BIN + HALF), 0), 2 * HALF - 1)


class Bets:
    """On one direction. purse: of all gamblers together."""

    __slots__ = ("_a", "_b", "_by_ranks", "_by_signs", "_c", "_climb", "_line", "_ranks", "_signs", "purse")

    def __init__(self) -> None:
        self._a = self._b = self._c = self._climb = self._line = self.purse = 0.0
        self._by_signs = self._by_ranks = 0.0
        self._signs = self._ranks = 0

    def bet(self, won: bool, u: float) -> bool:
        """Whether r was beyond MARGIN, and its rank; True where the purse is enough."""
        a, b, c = WON if won else LOST
        climb = SCALE * u ** (POWER - 1) if u > CUT else STEEPEST
        self._a, self._b, self._c = (self._a + 1) * a, (self._b + 1) * b, (self._c + 1) * c
        self._climb, self._line = (self._climb + 1) * climb, (self._line + 1) * (1 + SLANT * (1 - 2 * u))
        # what one bet of either kind has gained since it was last worth nothing (the restart of Page's CUSUM 1954)
        self._by_signs, self._signs = (self._by_signs * b, self._signs + 1) if self._by_signs > 1 else (b, 1)
        self._by_ranks, self._ranks = (self._by_ranks * climb, self._ranks + 1) if self._by_ranks > 1 else (climb, 1)
        self.purse = self._of_signs() + CLIMB_WEIGHT * self._climb + LINE_WEIGHT * self._line
        return self.purse >= ENOUGH

    def _of_signs(self) -> float:
        return self._a + self._b + self._c

    @property
    def since(self) -> int:
        """Batches since the bets that gained most last began to gain."""
        return self._signs if 2 * self._of_signs() > self.purse else self._ranks
