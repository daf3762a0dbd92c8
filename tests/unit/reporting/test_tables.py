"""The tables say what the results say, in words where a number would mislead."""

import math

import pytest
from msgspec import structs

from latfit.model.fit_parts import CrossValidation
from latfit.model.fit_result import FitResult
from latfit.planning.plan import make_plan
from latfit.planning.result import Plan
from latfit.reporting import fit_tables as tables
from latfit.reporting.page import ReportInput
from latfit.reporting.plan_tables import key_numbers, step_tables, thresholds_table
from latfit.reporting.simulation_tables import with_interval
from latfit.reporting.table import Table, make_table, table_html
from tests.unit.reporting.conftest import held_out, machine, two_paths


def column(table: Table, name: str) -> dict[str, str]:
    """{first cell: cell under `name`}."""
    index = list(table.columns).index(name)
    return {row[0]: row[index] for row in table.rows}


class TestParameters:
    def test_value_interval_unit_and_meaning(self, fit: FitResult) -> None:
        open_ended = {**fit.parameters, "tau_0": structs.replace(fit.parameters["tau_0"], high=None)}
        table = tables.parameters(structs.replace(fit, parameters=open_ended))
        assert column(table, "value")["P_max"] == "60"
        assert column(table, "95 % interval")["P_max"] == "54 to 66"
        assert column(table, "95 % interval")["tau_0"] == "none"
        assert column(table, "unit")["P_max"] == "tokens/ms"
        assert "peak rate" in column(table, "meaning")["P_max"]
        assert column(table, "value")["w_1"] == "1 (fixed)"

    def test_what_the_data_do_not_determine_has_no_number(self, fit: FitResult) -> None:
        table = tables.parameters(fit)
        assert "tau_S" not in column(table, "value")
        assert table.note == "Not identified by these steps: tau_S."


def test_a_request_without_an_answer_has_no_unlimited_time() -> None:
    assert with_interval(math.inf, None) == "no answer"
    assert with_interval(36.0, (32.0, math.inf)) == "36 ms (32 ms or more)"


class TestTrust:
    def test_sentence(self, fit: FitResult) -> None:
        n = f"{fit.metrics.n:,}"
        said = tables.trust_sentence(fit)
        assert said == f"Held-out error 4.4 % ({n} steps); linear baseline 12 %, constant 80 %."

    def test_phases_in_which_the_line_is_better_are_part_of_the_verdict(self, fit: FitResult) -> None:
        own = structs.replace(held_out(4.0, 3.1), by_phase={"decode": 5.0, "prefill": 3.0})
        line = structs.replace(held_out(12.0, 9.0), by_phase={"decode": 4.5, "prefill": 20.0})
        linear = structs.replace(fit.baselines["linear"], cv=CrossValidation("cells", line))
        lost = structs.replace(
            fit, cross_validation=CrossValidation("cells", own), baselines={**fit.baselines, "linear": linear}
        )
        assert tables.trust_sentence(lost).endswith("Worse than the linear baseline for decode steps.")
        assert [(row[0], *row[2:]) for row in tables.phases(lost).rows] == [
            ("decode", "5 %", "4.5 %"),
            ("prefill", "3 %", "20 %"),
        ]


class TestPlanTables:
    @pytest.fixture
    def plan(self, one_path: ReportInput) -> Plan:
        assert one_path.plan is not None
        return one_path.plan

    def test_inverse_rows_are_the_plan(self, plan: Plan) -> None:
        at_batch, at_tokens, *_ = step_tables(plan)
        assert [(row[0], row[2]) for row in at_batch.rows] == [(f"{row.B}", f"{row.S_max:,}") for row in plan.S_at_B]
        assert [(row[0], row[2]) for row in at_tokens.rows] == [(f"{row.S:,}", f"{row.B_max:,}") for row in plan.B_at_S]
        marked = {S for S, note in column(at_tokens, "note").items() if note}
        assert marked == {f"{row.S:,}" for row in plan.B_at_S if row.extrapolated} != set()

    def test_a_single_path_is_named_once(self, plan: Plan) -> None:
        table = step_tables(plan)[0]
        assert "path" not in table.columns
        assert table.caption.endswith("on cpu")

    def test_what_two_paths_decide_is_left_out_for_one(self, plan: Plan) -> None:
        assert [row[0] for row in thresholds_table(plan).rows] == ["knee"]

    def test_every_threshold_comes_with_its_reason(self) -> None:
        plan = two_paths().plan
        assert plan is not None
        table = thresholds_table(plan)
        assert [*column(table, "value")][:2] == ["B1", "B1 in tokens"]
        assert all(column(table, "why").values())

    def test_key_numbers_are_thresholds_the_largest_step_and_the_setting_for_requests(self) -> None:
        plan = two_paths().plan
        assert plan is not None
        assert "path" in step_tables(plan)[0].columns
        found = {item.label: item.value for item in key_numbers(plan)}
        assert found["B1"] == str(plan.B1_idle.value)
        assert found["B2"] == str(plan.B2.value)
        assert found["Prefill"] == f"{max(row.S_max or 0 for row in plan.S_at_B):,}"
        assert plan.settings is not None
        assert found["Mixed"] == f"{plan.settings.max_num_seqs:,} + {plan.settings.chunk_tokens:,}"

    def test_a_hopeless_sla_has_no_numbers(self, fit: FitResult) -> None:
        plan = make_plan(machine(cpu=fit), 1.0)
        assert [item.label for item in key_numbers(plan)] == []
        assert [table for table in step_tables(plan) if table.rows] == []


class TestChecks:
    @pytest.fixture
    def tested(self, fit: FitResult) -> FitResult:
        return structs.replace(
            fit,
            cross_validation=CrossValidation("cells", held_out(4.4, 3.1), by_region=held_out(53.0, 5.0)),
        )

    def test_harder_held_out_rows_and_rows_used(self, tested: FitResult) -> None:
        assert column(tables.errors(tested), "MAPE")["held out: a region of B and S"] == "53 %"
        used = tables.rows_used(tested)
        n = tested.data.rows_used or 0
        dropped = {"dropped: cold_start": "10", "dropped: zero_time": "2"}
        assert column(used, "number") == {"read": str(n + 12), **dropped, "used": str(n)}
        assert used.rows[-1][2] == "B 1 to 64, S 1 to 2,048"


def test_a_table_escapes_its_cells_and_drops_empty_columns() -> None:
    found = make_table("<b>", [{"a": 1.0, "b": None}], ("x", lambda row: row["a"], str), ("y", lambda row: row["b"]))
    assert found.columns == ["x"]
    assert "&lt;b&gt;" in table_html(found)


def test_provenance_is_flattened_and_cut() -> None:
    facts = {"cpu": {"model": "X", "flags": ["a", "b"]}, "none": None, "long": "y" * 5000, "zero": 0}
    found = column(tables.provenance(facts), "value")
    assert found["cpu.flags"] == "a, b"
    assert found["zero"] == "0"
    assert "none" not in found
    assert len(found["long"]) <= 600
