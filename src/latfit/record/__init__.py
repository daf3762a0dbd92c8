"""Recording steps while an engine runs: rows go into buffers in the engine's thread, files are written beside it."""

from latfit.record.recorder import Buffers, Step, StepRecorder

__all__ = ["Buffers", "Step", "StepRecorder"]
