"""Results as tables, figures and pages."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.reporting import style as style
    from latfit.reporting.fit import page as page, tables as tables
    from latfit.reporting.fit.figures import fit_figure as fit_figure, write_coverage as write_coverage
    from latfit.reporting.fit.tables import what_is_known as what_is_known
    from latfit.reporting.layout import (
        PAGE_NAME as PAGE_NAME,
        Making as Making,
        Rendered as Rendered,
        answer_page as answer_page,
        write_page as write_page,
    )
    from latfit.reporting.plan.figures import plan_figure as plan_figure, serving_figure as serving_figure
    from latfit.reporting.plan.serving import (
        serving_page as serving_page,
        serving_summary as serving_summary,
        serving_tables as serving_tables,
        stall_text as stall_text,
    )
    from latfit.reporting.plan.tables import (
        PlanSummary as PlanSummary,
        describe_speculation as describe_speculation,
        plan_summary as plan_summary,
        plan_tables as plan_tables,
        upgrade_table as upgrade_table,
    )
    from latfit.reporting.running import (
        BINDING as BINDING,
        REMEDY as REMEDY,
        describe_machine as describe_machine,
        load_line as load_line,
        what_if_lines as what_if_lines,
        window_lines as window_lines,
    )
    from latfit.reporting.simulation.brief import (
        distinct as distinct,
        engine_numbers as engine_numbers,
        engines_verdict as engines_verdict,
        policies_verdict as policies_verdict,
        policy_numbers as policy_numbers,
        replay_table as replay_table,
        would_carry as would_carry,
    )
    from latfit.reporting.simulation.figures import (
        engine_figure as engine_figure,
        runs_figure as runs_figure,
        validation_figure as validation_figure,
    )
    from latfit.reporting.simulation.tables import (
        brief_validation_table as brief_validation_table,
        clocks_table as clocks_table,
        engine_tables as engine_tables,
        ledger_lines as ledger_lines,
        ledger_table as ledger_table,
        policy_tables as policy_tables,
        validation_table as validation_table,
        with_interval as with_interval,
    )
    from latfit.reporting.steps import (
        ceilings_table as ceilings_table,
        changes_table as changes_table,
        comparison_basis as comparison_basis,
        comparison_sentence as comparison_sentence,
        comparison_table as comparison_table,
        coverage_table as coverage_table,
        data_line as data_line,
        estimates as estimates,
        estimates_table as estimates_table,
        evaluation_table as evaluation_table,
        fits_table as fits_table,
        host_line as host_line,
        machine_table as machine_table,
        path_facts as path_facts,
        paths_table as paths_table,
        prediction_table as prediction_table,
        regions_table as regions_table,
        requests_line as requests_line,
        sensitivity_table as sensitivity_table,
    )
    from latfit.reporting.table import (
        Card as Card,
        CommandLine as CommandLine,
        KeyNumber as KeyNumber,
        Table as Table,
        Verdict as Verdict,
        card_html as card_html,
        table_text as table_text,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
