"""Compare measured serving runs with their simulation."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.validation.compare import (
        DEFINITIONS,
        JUDGED,
        Bucket,
        Figure,
        Validation,
        ValidationOptions,
        cautions_about,
        far_context_warning,
        metrics,
        not_of_machine,
        outside_warning,
        validate,
    )
    from latfit.validation.ledger import (
        Ledger,
        LedgerEntry,
        PromisedFigure,
        add_entry,
        compare_percentile,
        compare_with_plan,
        read_ledger,
    )
    from latfit.validation.live_window import TOLERANCE, Check, check_window, is_watched, watched
    from latfit.validation.machine_speed import (
        PhaseSpeed,
        RunSpeed,
        phase_speeds,
        recorded_window_speed,
        run_speed,
        window_speed,
    )
    from latfit.validation.measured import Measured, as_measured, during, not_together, starts_of
    from latfit.validation.server import ServerRun, read_server

__all__, __getattr__, __dir__ = face(__name__, __file__)
