"""A running engine under a load of our own: started, loaded, recorded, and started again with other settings."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.tuning.beside import TRACE_DIR as TRACE_DIR, recording as recording, steps_in as steps_in
    from latfit.tuning.load import Answered as Answered, send_load as send_load, until_answered as until_answered
    from latfit.tuning.process import Engine as Engine, start_engine as start_engine

__all__, __getattr__, __dir__ = face(__name__, __file__)
