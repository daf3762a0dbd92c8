"""Fit latency models to traces, and apply fits to other steps."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.fitting.bootstrap import DoubtOptions as DoubtOptions
    from latfit.fitting.checking.drift import long_run_variance as long_run_variance
    from latfit.fitting.checking.messages import keeps_out as keeps_out
    from latfit.fitting.checking.same_machine import (
        MachineCheck as MachineCheck,
        check_alike as check_alike,
        same_machine as same_machine,
    )
    from latfit.fitting.compare import (
        Change as Change,
        Compared as Compared,
        Measured as Measured,
        PhaseChange as PhaseChange,
        RegionChange as RegionChange,
        Verdict as Verdict,
        change_over_starts as change_over_starts,
        changes_between as changes_between,
        model_error_sd as model_error_sd,
    )
    from latfit.fitting.fit import fit_trace as fit_trace
    from latfit.fitting.many_fits import FitTask as FitTask, failed_fit as failed_fit, fit_all as fit_all
    from latfit.fitting.prediction import (
        evaluate as evaluate,
        mean_ms as mean_ms,
        predict as predict,
        read_columns_of as read_columns_of,
        typical_ms as typical_ms,
    )
    from latfit.fitting.problem import FitOptions as FitOptions
    from latfit.fitting.sensitivity import Sensitivity as Sensitivity, sensitivity_of as sensitivity_of

__all__, __getattr__, __dir__ = face(__name__, __file__)
