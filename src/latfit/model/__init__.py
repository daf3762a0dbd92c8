"""Latency models, and the record of a fit."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.model.correction import (
        CORRECTION as CORRECTION,
        DECIMALS as DECIMALS,
        OF_PREFILL_ALONE as OF_PREFILL_ALONE,
        OF_STEPS as OF_STEPS,
        Correction as Correction,
        coordinates as coordinates,
        corners_of as corners_of,
        prefill_only as prefill_only,
    )
    from latfit.model.features import (
        CONTEXT as CONTEXT,
        SOURCES as SOURCES,
        StepTable as StepTable,
        decode_only as decode_only,
        features_of as features_of,
        outside_by as outside_by,
        read_by as read_by,
        support_of as support_of,
        typical_context as typical_context,
        with_typical_context as with_typical_context,
    )
    from latfit.model.fit_parts import (
        Baseline as Baseline,
        Cliff as Cliff,
        Cliffs as Cliffs,
        CrossValidation as CrossValidation,
        DataFacts as DataFacts,
        Diagnostics as Diagnostics,
        Drift as Drift,
        Errors as Errors,
        Estimate as Estimate,
        HeldOutErrors as HeldOutErrors,
        Identifiability as Identifiability,
        LevelChange as LevelChange,
    )
    from latfit.model.fit_result import (
        MAX_TESTED as MAX_TESTED,
        STORED_DRAWS as STORED_DRAWS,
        FitResult as FitResult,
        FitStatus as FitStatus,
        fitted_identity as fitted_identity,
        latency_draws as latency_draws,
        parameter_draws as parameter_draws,
    )
    from latfit.model.formulas import CONSTANT as CONSTANT, LINEAR as LINEAR
    from latfit.model.noise_draws import (
        NoiseTable as NoiseTable,
        drawn_step_ms as drawn_step_ms,
        noise_table as noise_table,
    )
    from latfit.model.registry import (
        BUILT_IN as BUILT_IN,
        FAMILY as FAMILY,
        MOE as MOE,
        add_model as add_model,
        model_named as model_named,
    )
    from latfit.model.step_noise import (
        MAX_RATIO as MAX_RATIO,
        Pauses as Pauses,
        StepNoise as StepNoise,
        by_size as by_size,
        edges_between as edges_between,
        noise_of as noise_of,
        ratios_of as ratios_of,
        size_levels as size_levels,
        tail_points as tail_points,
    )
    from latfit.model.term_model import (
        Choice as Choice,
        Expression as Expression,
        LatencyModel as LatencyModel,
        Parameter as Parameter,
        Separable as Separable,
        Shape as Shape,
        Steps as Steps,
        Term as Term,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
