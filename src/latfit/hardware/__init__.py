"""Execution paths by name, measured (a fit) or nominal, and how long their batches take."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.hardware.ceiling import Ceiling as Ceiling, beside_the_fit as beside_the_fit
    from latfit.hardware.nominal import Nominal as Nominal, parse_nominal as parse_nominal
    from latfit.hardware.path_latency import (
        CERTAIN as CERTAIN,
        BatchEstimate as BatchEstimate,
        PathLatency as PathLatency,
        phase_of as phase_of,
        step_columns as step_columns,
        step_draws as step_draws,
    )
    from latfit.hardware.profile import (
        CPU_PATHS as CPU_PATHS,
        GPU_PATHS as GPU_PATHS,
        ExecutionPath as ExecutionPath,
        HardwareProfile as HardwareProfile,
        add_path as add_path,
        change_hardware as change_hardware,
        nominal_path as nominal_path,
        path_label as path_label,
        replacement as replacement,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
