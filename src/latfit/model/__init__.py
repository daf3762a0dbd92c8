"""Latency models, and the record of a fit."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.model.correction import (
        CORRECTION,
        DECIMALS,
        OF_PREFILL_ALONE,
        OF_STEPS,
        Correction,
        coordinates,
        corners_of,
        prefill_only,
    )
    from latfit.model.features import (
        CONTEXT,
        SOURCES,
        StepTable,
        decode_only,
        features_of,
        outside_by,
        read_by,
        support_of,
        typical_context,
        with_typical_context,
    )
    from latfit.model.fit_parts import (
        Baseline,
        Cliff,
        Cliffs,
        CrossValidation,
        DataFacts,
        Diagnostics,
        Drift,
        Errors,
        Estimate,
        HeldOutErrors,
        Identifiability,
        LevelChange,
    )
    from latfit.model.fit_result import (
        MAX_TESTED,
        STORED_DRAWS,
        FitResult,
        FitStatus,
        fitted_identity,
        latency_draws,
        parameter_draws,
        step_draws,
    )
    from latfit.model.formulas import CONSTANT, LINEAR
    from latfit.model.noise_draws import NoiseTable, drawn_step_ms, noise_table
    from latfit.model.registry import BUILT_IN, FAMILY, MOE, add_model as add_model, model_named
    from latfit.model.step_noise import (
        MAX_RATIO,
        Pauses,
        StepNoise,
        by_size,
        edges_between,
        noise_of,
        ratios_of,
        size_levels,
        tail_points,
    )
    from latfit.model.term_model import (
        Choice,
        Expression,
        LatencyModel,
        Parameter as Parameter,
        Separable as Separable,
        Shape,
        Steps,
        Term as Term,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
