"""The library's verbs and what they return; `import latfit` shows them, and the commands call them.

A verb takes data (a path, a DataFrame, an Arrow table, "20ms", "500/s") and returns an `Answer`.
"""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.api.catalogue import add_to_catalog, catalog
    from latfit.api.comparisons import Comparison as Comparison, compare as compare, compare_runs
    from latfit.api.engines import EngineSimulation, engine_settings_of, simulate_engine as simulate_engine
    from latfit.api.fits import (
        Fit as Fit,
        PhaseFits,
        as_fit,
        fit as fit,
        fit_each as fit_each,
        fit_phases,
        predict_steps,
    )
    from latfit.api.hardware import Hardware as Hardware
    from latfit.api.measuring import Profile as Profile, profile as profile
    from latfit.api.plans import Plan as Plan, plan as plan, speculate, step_budget as step_budget
    from latfit.api.predictions import Evaluation as Evaluation, Predicted
    from latfit.api.quantities import values_of
    from latfit.api.reading import read as read
    from latfit.api.reports import Report as Report, export as export, report as report
    from latfit.api.running.examination import (
        Examination,
        Snapshot,
        block_of,
        examine_machine,
        examine_server,
        watch_server,
    )
    from latfit.api.running.fronts import Replay, replay as replay, serve
    from latfit.api.running.recording import Recorded, fit_recording, record_passes, record_server
    from latfit.api.serving import EnginePlan, plan_engine as plan_engine
    from latfit.api.simulations import PolicySimulation, Simulation as Simulation, simulate as simulate, simulate_study
    from latfit.api.tuning import Tuned, tune as tune
    from latfit.api.validations import (
        LedgerAnswer,
        Validation as Validation,
        add_to_ledger,
        ledger,
        validate as validate,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
