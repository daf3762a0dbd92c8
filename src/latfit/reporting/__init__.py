"""Results as tables, figures and pages."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.reporting import style
    from latfit.reporting.fit import page, tables
    from latfit.reporting.fit.figures import fit_figure, write_coverage
    from latfit.reporting.fit.tables import what_is_known
    from latfit.reporting.layout import PAGE_NAME, Making, Rendered, answer_page, write_page
    from latfit.reporting.plan.figures import plan_figure, serving_figure
    from latfit.reporting.plan.serving import serving_page, serving_summary, serving_tables, stall_text
    from latfit.reporting.plan.tables import PlanSummary, describe_speculation, plan_summary, plan_tables, upgrade_table
    from latfit.reporting.running import BINDING, REMEDY, describe_machine, load_line, what_if_lines, window_lines
    from latfit.reporting.simulation.brief import (
        distinct,
        engine_numbers,
        engines_verdict,
        policies_verdict,
        policy_numbers,
        replay_table,
        would_carry,
    )
    from latfit.reporting.simulation.figures import engine_figure, runs_figure, validation_figure
    from latfit.reporting.simulation.tables import (
        brief_validation_table,
        clocks_table,
        engine_tables,
        ledger_lines,
        ledger_table,
        policy_tables,
        validation_table,
        with_interval,
    )
    from latfit.reporting.steps import (
        ceilings_table,
        changes_table,
        comparison_basis,
        comparison_sentence,
        comparison_table,
        coverage_table,
        data_line,
        estimates,
        estimates_table,
        evaluation_table,
        fits_table,
        host_line,
        machine_table,
        path_facts,
        paths_table,
        prediction_table,
        regions_table,
        requests_line,
        sensitivity_table,
    )
    from latfit.reporting.table import Card, CommandLine, KeyNumber, Table, Verdict, card_html, table_text

__all__, __getattr__, __dir__ = face(__name__, __file__)
