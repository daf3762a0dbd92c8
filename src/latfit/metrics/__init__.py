"""What running serving engines publish: read, requested over HTTP, compared from moment to moment."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.metrics.diagnosis import (
        FULL as FULL,
        Diagnosis as Diagnosis,
        diagnose as diagnose,
        limit_shown as limit_shown,
        tpot_ms as tpot_ms,
    )
    from latfit.metrics.interval import Interval as Interval, between as between
    from latfit.metrics.server import (
        LOCAL_PORTS as LOCAL_PORTS,
        Reading as Reading,
        Server as Server,
        Unanswered as Unanswered,
        local_engine as local_engine,
    )
    from latfit.metrics.state import Buckets as Buckets, ServerState as ServerState, read_state as read_state

__all__, __getattr__, __dir__ = face(__name__, __file__)
