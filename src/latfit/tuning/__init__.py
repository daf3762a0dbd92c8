"""A running engine under a load of our own: started, loaded, recorded, and started again with other settings."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.tuning.load import (
        Answered as Answered,
        send_load as send_load,
        until_answered as until_answered,
        warm_up as warm_up,
    )
    from latfit.tuning.process import (
        TRACE_DIR as TRACE_DIR,
        Engine as Engine,
        recording as recording,
        start_engine as start_engine,
    )
    from latfit.tuning.result import MAX_OTHER_CPUS as MAX_OTHER_CPUS, Run as Run, Tuning as Tuning

__all__, __getattr__, __dir__ = face(__name__, __file__)
