"""The tables say what the results say, in words where a number would mislead."""

import re
from dataclasses import replace

import pytest
from msgspec import structs

from latfit.messages import Message as LatfitWarning
from latfit.model.fit_parts import Baseline, CrossValidation, DataFacts
from latfit.model.fit_result import FitResult, FitStatus
from latfit.model.registry import FAMILY
from latfit.planning.plan import make_plan
from latfit.reporting import format
from latfit.reporting.fit import tables
from latfit.reporting.fit.page import ReportInput
from latfit.reporting.plan.tables import key_numbers, thresholds_table
from tests.unit.reporting.conftest import held_out, machine, two_paths


def column(table: tables.Table, name: str) -> dict[str, str]:
    """{first cell: cell under `name`}."""
    index = list(table.columns).index(name)
    return {row[0]: row[index] for row in table.rows}


class TestParameters:
    def test_value_interval_unit_and_meaning(self, fit: FitResult) -> None:
        table = tables.parameters(fit)
        assert column(table, "value")["P_max"] == "60"
        assert column(table, "95 % interval")["P_max"] == "54 to 66"
        assert column(table, "unit")["P_max"] == "tokens/ms"
        assert "peak rate" in column(table, "meaning")["P_max"]

    def test_what_the_data_do_not_determine_has_no_number(self, fit: FitResult) -> None:
        table = tables.parameters(fit)
        assert column(table, "value")["tau_S"] == "not identified"
        assert column(table, "95 % interval")["tau_S"] == "none"

    def test_what_was_fixed_says_so(self, fit: FitResult) -> None:
        assert column(tables.parameters(fit), "value")["w_1"] == "1 (fixed)"

    def test_an_interval_that_is_not_there(self, fit: FitResult) -> None:
        open_ended = {**fit.parameters, "tau_0": structs.replace(fit.parameters["tau_0"], high=None)}
        table = tables.parameters(replace(fit, parameters=open_ended))
        assert column(table, "95 % interval")["tau_0"] == "none"


class TestTrust:
    def test_error_beside_the_simple_models(self, fit: FitResult) -> None:
        table = tables.trust(machine(cpu=fit))
        row = dict(zip(table.columns, table.rows[0], strict=True))
        assert row["cross-validated MAPE"] == "4.4 %"
        assert (row["linear baseline"], row["constant"]) == ("12 %", "80 %")
        assert row["verdict"] == "better than the linear baseline"

    def test_sentence(self, fit: FitResult) -> None:
        n = f"{fit.metrics.n:,}"
        said = tables.trust_sentence(fit)
        assert said == f"Held-out error 4.4 % ({n} steps); linear baseline 12 %, constant 80 %."

    def test_phases_in_which_the_line_is_better_are_part_of_the_verdict(self, fit: FitResult) -> None:
        own = structs.replace(held_out(4.0, 3.1), by_phase={"decode": 5.0, "prefill": 3.0})
        line = structs.replace(held_out(12.0, 9.0), by_phase={"decode": 4.5, "prefill": 20.0})
        linear = structs.replace(fit.baselines["linear"], cv=CrossValidation("cells", line))
        lost = replace(
            fit, cross_validation=CrossValidation("cells", own), baselines={**fit.baselines, "linear": linear}
        )
        assert tables.trust_sentence(lost).endswith("Worse than the linear baseline for decode steps.")
        assert [(row[0], *row[2:]) for row in tables.phases(lost).rows] == [
            ("decode", "5 %", "4.5 %"),
            ("prefill", "3 %", "20 %"),
        ]

    def test_a_line_that_does_as_well_is_said(self, fit: FitResult) -> None:
        worse = CrossValidation("cells", held_out(12.5, 3.1))
        assert tables.verdict(replace(fit, cross_validation=worse)) == "no better than the linear baseline"
        warned = replace(fit, warnings=[LatfitWarning("line_as_good", "", "")])
        assert tables.verdict(warned) == "no better than the linear baseline"

    def test_without_cross_validation_the_errors_are_marked_as_seen(self, fit: FitResult) -> None:
        seen = replace(fit, cross_validation=CrossValidation(), baselines={"linear": Baseline(mape_pct=11.0)})
        row = tables.trust(machine(cpu=seen)).rows[0]
        assert "(in-sample)" in row[4]
        assert row[5] == "11 % (in-sample)"
        assert row[6] == "unknown"
        assert "fitted steps" in tables.trust_sentence(seen)

    def test_an_unusable_fit(self, fit: FitResult) -> None:
        assert tables.verdict(replace(fit, status=FitStatus.ONE_CELL)) == "not usable"
        assert FitStatus.ONE_CELL.sentence in tables.trust_sentence(replace(fit, status=FitStatus.ONE_CELL))


class TestPlanTables:
    def test_inverse_rows_are_the_plan(self, one_path: ReportInput) -> None:
        plan = one_path.plans[0]
        table = tables.tokens_at_batch(plan)
        assert [row[0] for row in table.rows] == [f"{row.B}" for row in plan.S_at_B]
        assert [row[2] for row in table.rows] == [f"{row.S_max:,}" for row in plan.S_at_B]
        table = tables.batch_at_tokens(plan)
        assert [row[0] for row in table.rows] == [f"{row.S:,}" for row in plan.B_at_S]
        assert [row[2] for row in table.rows] == [f"{row.B_max:,}" for row in plan.B_at_S]

    def test_batches_of_any_size_are_one_row(self) -> None:
        plan = two_paths().plans[0]
        whole = [structs.replace(row, S=S, B_min=1, B_max=S) for S, row in zip((1, 2, 4), plan.B_at_S, strict=False)]
        last = structs.replace(whole[-1], S=8, B_max=5)
        inverse = structs.replace(plan.inverse, B_at_S=[*whole, last])
        table = tables.batch_at_tokens(structs.replace(plan, inverse=inverse))
        assert [list(row) for row in table.rows] == [["1 to 4", "1", "S"], ["8", "1", "5"]]

    def test_extrapolation_is_marked_row_by_row(self, one_path: ReportInput) -> None:
        plan = one_path.plans[0]
        marked = column(tables.batch_at_tokens(plan), "note")
        assert {S for S, note in marked.items() if note} == {f"{row.S:,}" for row in plan.B_at_S if row.extrapolated}
        assert any(marked.values())

    def test_a_single_path_is_named_once(self, one_path: ReportInput) -> None:
        table = tables.tokens_at_batch(one_path.plans[0])
        assert "path" not in table.columns
        assert table.caption.endswith("on cpu")
        assert "path" in tables.tokens_at_batch(two_paths().plans[0]).columns

    def test_what_is_not_known_comes_with_its_reason(self, one_path: ReportInput) -> None:
        table = thresholds_table(one_path.plans[0], explained=True)
        assert list(column(table, "value")) == ["knee"]
        assert table.note.count("Not known:") == 2
        for name in ("B1 (batch from", "B1 in tokens (", "B2 (batch that", "T_cut (queueing timeout"):
            assert name in table.note
        assert all(column(table, "why").values())

    def test_known_thresholds_are_key_numbers(self) -> None:
        plan = two_paths().plans[0]
        found = {item.label: item.value for item in key_numbers(plan)}
        assert found["B1"] == str(plan.B1_idle.value)
        assert found["B2"] == str(plan.B2.value)

    def test_largest_step_and_the_setting_for_requests(self) -> None:
        plan = two_paths().plans[0]
        found = {item.label: item.value for item in key_numbers(plan)}
        assert found["Largest step"] == f"{max(row.S_max or 0 for row in plan.S_at_B):,}"
        assert plan.settings is not None
        assert found["Requests at once"] == f"{plan.settings.max_num_seqs:,}"

    def test_a_hopeless_sla_has_no_numbers(self, fit: FitResult) -> None:
        plan = make_plan(machine(cpu=fit), 1.0)
        assert tables.step_numbers(plan) == []
        assert tables.tokens_at_batch(plan).rows == []


class TestRows:
    def test_read_dropped_and_used(self, fit: FitResult) -> None:
        numbers = column(tables.rows_used(fit), "number")
        n = fit.data.rows_used or 0
        assert numbers == {"read": str(n + 12), "dropped: cold_start": "10", "dropped: zero_time": "2", "used": str(n)}
        assert "warm up" in column(tables.rows_used(fit), "meaning")["dropped: cold_start"]
        assert column(tables.rows_used(fit), "meaning")["used"] == "B 1 to 64, S 1 to 2,048"

    def test_nothing_known_but_the_count(self, fit: FitResult) -> None:
        table = tables.rows_used(replace(fit, data=DataFacts(), domain={}))
        assert [list(row) for row in table.rows] == [["used", f"{fit.metrics.n:,}"]]


@pytest.mark.parametrize("model", sorted(FAMILY))
def test_every_letter_of_a_formula_is_explained(model: str) -> None:
    """Those that are no parameters: by their meaning, or because everyone knows the function."""
    names = set(re.findall(r"[A-Za-z]\w*", FAMILY[model].formula))
    open_names = names - {p.name for p in FAMILY[model].parameters} - {"T", "exp", "max", "min"}
    told = {part.split(":")[0] for part in tables.symbols(FAMILY[model].formula).split("; ")} - {""}
    assert told == open_names


def test_provenance_is_flattened_and_cut() -> None:
    facts = {"cpu": {"model": "X", "flags": ["a", "b"]}, "none": None, "long": "y" * 5000, "zero": 0}
    found = column(tables.provenance(facts), "value")
    assert found["cpu.flags"] == "a, b"
    assert found["zero"] == "0"
    assert "none" not in found
    assert len(found["long"]) <= 600


def test_errors_list_model_baselines_and_phases(fit: FitResult) -> None:
    table = tables.errors(fit)
    assert [row[0] for row in table.rows] == ["saturation", "linear baseline", "constant", "saturation, decode steps"]
    assert column(table, "CV MAPE") == {
        "saturation": "4.4 %",
        "linear baseline": "12 %",
        "constant": "80 %",
        "saturation, decode steps": "–",
    }


def test_a_bare_fit_gives_every_table(fit: FitResult) -> None:
    bare = FitResult("saturation", fit.status, fit.parameters)
    profile = machine(cpu=bare)
    for table in (tables.trust(profile), tables.parameters(bare), tables.errors(bare), tables.rows_used(bare)):
        assert table.rows
    assert "unknown" in tables.trust_sentence(bare)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (0.25, "0.25"),
        (5000, "5,000"),
        (10_000, "10k"),
        (46_500, "46.5k"),
        (32_768, "32,768"),
        (2.5e6, "2.5M"),
    ],
)
def test_axis_labels_are_short_and_exact(value: float, text: str) -> None:
    assert format.shorthand(value) == text


@pytest.mark.parametrize(
    ("name", "stem"), [("cpu", "cpu"), ("../../etc/passwd", "etc-passwd"), ("", "path"), ("a b/ü", "a-b")]
)
def test_file_stems_stay_in_their_folder(name: str, stem: str) -> None:
    assert format.file_stem(name) == stem
