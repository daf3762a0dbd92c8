"""What the scan of a log keeps between two blocks of bytes, and the rows it writes: arrays of records, which compiled
code can hold. Nothing is compiled here: who only asks which formats there are waits for no compiler."""

import numpy as np

from latfit.trace.table import Array

SLACK_BYTES = 512
"""Bytes behind the last line that the scan may look at."""

NO_TIME = -1
MOST_STREAMS = 1024
MOST_RUNS = 1 << 16
MOST_RANKS = 1024
LABEL_BYTES = 64
PREFIXES = 8
PREFIX_WORDS = 32

STREAM = np.dtype(
    [
        ("key", np.int64),  # hash of its name and process
        ("highest_step", np.int64),
        ("shift_s", np.int64),  # added to its clock, which has no year and may be set back
        ("start_s", np.int64),
        ("latest_s", np.int64),
        ("label_bytes", np.int32),
        ("rank", np.int32),  # data-parallel rank; -1 where the name has none
        ("run", np.int32),  # place in `runs`; -1 before its first step
        ("seen_zero", np.bool_),
        ("restarted", np.bool_),  # a start-up line came since its last step
        ("leap", np.bool_),  # 29 February was seen in the year that its clock is in
        ("timed", np.bool_),
    ],
    align=True,
)
"""One engine process that writes steps."""

RUN = np.dtype([("capacity", np.int64), ("stream", np.int32)], align=True)
"""One engine start: the tokens that its KV cache holds (0: not said), and whose it is."""

CAPACITY = np.dtype([("tokens", np.int64), ("used", np.bool_)], align=True)

PREFIX = np.dtype(
    [
        ("words", np.int64, (PREFIX_WORDS,)),  # its bytes, blank where its time is and behind its end
        ("masks", np.int64, (PREFIX_WORDS,)),  # all ones but there
        ("clock", np.int64, (2,)),  # the bytes of its time: the first eight, and the last eight
        ("time", np.int64),
        ("clock_at", np.int32),  # where its time begins; -1 where it has none
        ("size", np.int32),
        ("stream", np.int32),
    ],
    align=True,
)
"""The beginning of a recent step's line, up to `Iteration(`, and what it means. But for the time, most lines repeat
one."""

STATE = np.dtype(
    [
        *((name, np.int64) for name in ("lines", "steps", "cut", "streams_seen", "runs_seen", "oldest", "latest")),
        *((name, np.int64) for name in ("dummies", "with_time", "with_usage", "with_encoders")),  # steps
        ("prefixes", PREFIX, (PREFIXES,)),
        ("streams", STREAM, (MOST_STREAMS,)),
        ("labels", np.uint8, (MOST_STREAMS, LABEL_BYTES)),
        ("capacities", CAPACITY, (MOST_RANKS + 1,)),  # by rank; the last is for lines without a rank
        ("runs", RUN, (MOST_RUNS,)),
    ],
    align=True,
)

ROW = np.dtype(
    [
        ("S", np.int64),
        ("T_ms", np.float64),
        ("t_s", np.float64),
        ("prefill_tokens", np.int64),
        ("step", np.int64),
        ("kv_usage", np.float64),
        ("B", np.int32),
        ("prefill_requests", np.int32),
        ("encoder_inputs", np.int32),
        ("encoder_embeddings", np.int32),
        ("run", np.int32),  # place in `runs`
        ("phase", np.uint8),  # place in PHASE_NAMES
        ("dummy", np.bool_),
    ],
    align=True,
)
"""One step."""

PHASE_NAMES = ("", "decode", "prefill", "mixed")
"""The first is that of an empty step."""

TOO_MANY_STREAMS, TOO_MANY_RUNS = -1, -2


def new_state() -> Array:
    """(1,) of STATE: nothing seen yet."""
    state = np.zeros(1, dtype=STATE)
    state["prefixes"]["size"] = -1
    return state
