"""Record running engines: single steps inside the engine, means over windows from outside."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.record.forward_passes import PassRecorder, is_stream
    from latfit.record.polling import MetricsRecorder, texts_beside
    from latfit.record.recorder import Buffers, Step as Step, StepRecorder as StepRecorder

__all__, __getattr__, __dir__ = face(__name__, __file__)
