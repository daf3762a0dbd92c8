"""Record running engines: single steps inside the engine, means over windows from outside."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.record.forward_passes import PassRecorder as PassRecorder, is_stream as is_stream
    from latfit.record.polling import MetricsRecorder as MetricsRecorder, texts_beside as texts_beside
    from latfit.record.recorder import Buffers as Buffers, Step as Step, StepRecorder as StepRecorder

__all__, __getattr__, __dir__ = face(__name__, __file__)
