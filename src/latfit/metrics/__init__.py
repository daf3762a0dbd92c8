"""What running serving engines publish: read, requested over HTTP, compared from moment to moment."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.metrics.diagnosis import FULL, Diagnosis, diagnose, limit_shown, tpot_ms
    from latfit.metrics.interval import Interval, between, or_zero
    from latfit.metrics.server import LOCAL_PORTS, Reading, Server, Unanswered, local_engine
    from latfit.metrics.state import Buckets, ServerState, read_state

__all__, __getattr__, __dir__ = face(__name__, __file__)
