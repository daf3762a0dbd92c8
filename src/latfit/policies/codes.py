"""The numbers that policies, their parameters and their view of the queue go by in compiled code. It needs no numba.

A policy is a code and a float array: HEADER entries with the meanings below, then, for the optimal policy, its table.
What it sees is a float array too. Times in ms, rates per ms.
"""

GREEDY, FIXED, WINDOW, MARGINAL, CUTOFF, THREE_STAGE, OPTIMAL, SPLIT, DEADLINE = range(9)
"""Policies."""

MAIN_LARGEST, SIDE_LARGEST, THRESHOLD, PATIENCE, T_CUT, RATE, RULE, HEADER = range(8)
"""Parameters: largest batch on the main and on the side path; a number waiting from which the main path is used; how
long the oldest request may wait for others; the age at which it overflows to the side path; the arrival rate; which
marginal-cost rule."""

LITERAL, AMORTISED, TOTAL_DELAY = range(3)
"""Marginal-cost rules."""

NOW, WAITING, OLDEST, DUE, MAIN_FREE, SIDE_FREE, SIDE_WAITING, VIEW = range(8)
"""The view: the moment; how many wait; the arrival of the oldest; the earliest deadline; when a server of the main and
of the side path is next free (not above NOW: idle); how many were already sent to wait for the side path."""

WAIT, SERVE_MAIN, SERVE_SIDE, MOVE = range(4)
"""Actions: wait; start a batch on the main or on the side path, which must be idle; send requests to wait for the side
path, which serves them in that order and before anybody else."""

MAIN, SIDE = range(2)
"""Paths: the main one is the GPU, or the only one there is; the side path is the AMX."""

ANY = 1 << 60
"""A number of waiting requests that is never reached."""
