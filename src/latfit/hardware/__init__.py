"""Execution paths by name, measured (a fit) or nominal, and how long their batches take."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.hardware.ceiling import Ceiling, beside_the_fit
    from latfit.hardware.nominal import Nominal, parse_nominal
    from latfit.hardware.path_latency import CERTAIN, BatchEstimate, PathLatency, phase_of, step_columns
    from latfit.hardware.profile import (
        CPU_PATHS,
        GPU_PATHS,
        ExecutionPath,
        HardwareProfile,
        add_path,
        change_hardware,
        nominal_path,
        path_label,
        replacement,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
