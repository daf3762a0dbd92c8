"""Compare measured serving runs with their simulation."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.validation.compare import (
        DEFINITIONS as DEFINITIONS,
        JUDGED as JUDGED,
        Bucket as Bucket,
        Figure as Figure,
        Validation as Validation,
        ValidationOptions as ValidationOptions,
        cautions_about as cautions_about,
        far_context_warning as far_context_warning,
        metrics as metrics,
        not_of_machine as not_of_machine,
        outside_warning as outside_warning,
        validate as validate,
    )
    from latfit.validation.ledger import (
        Ledger as Ledger,
        LedgerEntry as LedgerEntry,
        PromisedFigure as PromisedFigure,
        add_entry as add_entry,
        compare_percentile as compare_percentile,
        compare_with_plan as compare_with_plan,
        read_ledger as read_ledger,
    )
    from latfit.validation.live_window import (
        TOLERANCE as TOLERANCE,
        Check as Check,
        check_window as check_window,
        is_watched as is_watched,
        watched as watched,
    )
    from latfit.validation.machine_speed import (
        PhaseSpeed as PhaseSpeed,
        RunSpeed as RunSpeed,
        phase_speeds as phase_speeds,
        recorded_window_speed as recorded_window_speed,
        run_speed as run_speed,
        window_speed as window_speed,
    )
    from latfit.validation.measured import (
        Measured as Measured,
        as_measured as as_measured,
        during as during,
        not_together as not_together,
        starts_of as starts_of,
    )
    from latfit.validation.server import ServerRun as ServerRun, read_server as read_server

__all__, __getattr__, __dir__ = face(__name__, __file__)
