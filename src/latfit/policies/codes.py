"""Numbers of policies, of their parameters and of their view of the queue in compiled code. Times in ms, rates per ms.

A policy is a code and a float array: HEADER entries, then, for the optimal policy, its table.
"""

GREEDY, FIXED, WINDOW, MARGINAL, CUTOFF, THREE_STAGE, OPTIMAL, SPLIT, DEADLINE = range(9)
"""Policies."""

MAIN_LARGEST, SIDE_LARGEST, THRESHOLD, PATIENCE, T_CUT, RATE, RULE, HEADER = range(8)
"""Parameters: largest batch on the main and on the side path; a number waiting from which the main path is used; how
long the oldest request may wait for others; the age from which it may overflow to the side path; the arrival rate;
which marginal-cost rule."""

LITERAL, AMORTISED, TOTAL_DELAY = range(3)
"""Marginal-cost rules."""

NOW, WAITING, OLDEST, AGED, DUE, VIEW = range(6)
"""The view: the moment; how many wait; the arrival of the oldest; how many have waited for T_CUT, counted up to
MOST_AGED; the earliest deadline. Behind them stands when each server is next free (not above NOW: idle): first those of
the main path, then as many places for the side path, infinite where there is no server."""

MOST_AGED = 256
"""Bounds the count of aged requests: a long queue must not make decisions slow."""

WAIT, SERVE_MAIN, SERVE_SIDE = range(3)
"""Actions: wait; start a batch on the main or on the side path, which must have an idle server."""

MAIN, SIDE = range(2)
"""Paths: the main one is the GPU, or the only one there is; the side path is the AMX."""

ANY = 1 << 60
"""A number of waiting requests that is never reached."""
