"""Results as tables, figures and pages: one module a subject."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.reporting import (
        brief,
        fit_figures,
        fit_tables,
        layout,
        page,
        plan_figures,
        plan_tables,
        running,
        serving,
        simulation_figures,
        simulation_tables,
        steps,
        style,
        table,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
