"""A running engine under a load of our own: started, loaded, recorded, and started again with other settings."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.tuning.load import Answered, send_load, until_answered, warm_up
    from latfit.tuning.process import TRACE_DIR, Engine, recording, start_engine
    from latfit.tuning.result import MAX_OTHER_CPUS, Run, Tuning

__all__, __getattr__, __dir__ = face(__name__, __file__)
