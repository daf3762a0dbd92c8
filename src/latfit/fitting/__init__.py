"""Fit latency models to traces, and apply fits to other steps."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.fitting.bootstrap import DoubtOptions
    from latfit.fitting.checking.drift import long_run_variance
    from latfit.fitting.checking.messages import keeps_out
    from latfit.fitting.checking.same_machine import MachineCheck, check_alike, same_machine
    from latfit.fitting.compare import (
        Change,
        Compared,
        Measured,
        PhaseChange,
        RegionChange,
        Verdict,
        change_over_starts,
        changes_between,
        model_error_sd,
    )
    from latfit.fitting.fit import fit_trace
    from latfit.fitting.many_fits import FitTask, failed_fit, fit_all
    from latfit.fitting.prediction import evaluate, mean_ms, predict, read_columns_of, typical_ms
    from latfit.fitting.problem import FitOptions
    from latfit.fitting.sensitivity import Sensitivity, sensitivity_of

__all__, __getattr__, __dir__ = face(__name__, __file__)
