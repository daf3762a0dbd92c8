"""Cleaning: each rule finds what was planted and leaves ordinary rows alone; what is switched off stays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.errors import BadInput, WrongUsage
from latfit.trace.clean import RULES, CleanOptions, check_usable, clean
from latfit.trace.read import CleanTrace, Reading, ingest
from latfit.trace.table import Trace
from tests.conftest import ROOT


def serving_log(rows: int = 2000, seed: int = 0, run: str = "a") -> Trace:
    """Decode steps in time order with 5 % log-normal noise: T = 8 + 0.1 B."""
    rng = np.random.default_rng(seed)
    B = rng.integers(1, 9, rows).astype(float)
    T = (8 + 0.1 * B) * np.exp(rng.normal(0, 0.05, rows))
    return Trace(
        {
            "B": B,
            "S": B,
            "T_ms": T,
            "t_s": np.cumsum(T) / 1e3,
            "step": np.arange(rows, dtype=float),
            "run": np.array([run] * rows, dtype=object),
        }
    )


def changed(trace: Trace, rows: slice | list[int], factor: float) -> Trace:
    T = trace["T_ms"].copy()
    T[rows] *= factor
    return trace.with_columns(T_ms=T)


def test_ordinary_rows_all_stay() -> None:
    for seed in range(5):
        cleaned = clean(serving_log(seed=seed))
        assert cleaned.dropped == {}
        assert cleaned.rows_used == 2000


class TestColdStart:
    def test_the_planted_beginning_is_found_exactly(self) -> None:
        cleaned = clean(changed(serving_log(), slice(0, 7), 4))
        assert cleaned.dropped == {"cold_start": 7}
        assert cleaned.trace["step"][0] == 7

    def test_in_each_run_by_itself(self) -> None:
        first, second = serving_log(run="a"), serving_log(seed=1, run="b")
        both = Trace(
            {
                name: np.concatenate([changed(first, slice(0, 3), 5)[name], changed(second, slice(0, 5), 5)[name]])
                for name in first.columns
            }
        )
        assert clean(both).dropped == {"cold_start": 8}

    def test_slow_steps_in_the_middle_are_no_cold_start(self) -> None:
        assert clean(changed(serving_log(), slice(500, 507), 4)).dropped == {}

    def test_without_time_nothing_is_first(self) -> None:
        trace = changed(serving_log(), slice(0, 7), 4)
        untimed = Trace({name: column for name, column in trace.columns.items() if name != "t_s"})
        assert clean(untimed).dropped == {}


class TestOtherRules:
    def test_asynchronous_steps(self) -> None:
        assert clean(changed(serving_log(), slice(100, 400), 1e-3)).dropped == {"zero_time": 300}
        assert clean(changed(serving_log(), slice(100, 400), 0)).dropped == {"zero_time": 300}

    def test_a_quick_system_beside_a_slow_one_loses_nothing(self) -> None:
        """A GPU's steps of 8 ms beside a CPU's of 800: each system is compared with itself alone."""
        gpu, cpu = serving_log(run="gpu"), changed(serving_log(3000, seed=1, run="cpu"), slice(None), 100)
        both = Trace({name: np.concatenate([cpu[name], gpu[name]]) for name in gpu.columns})
        assert clean(both).dropped.get("zero_time", 0) > 0, "as one system they are absurd"
        labelled = both.with_columns(path=both["run"])
        assert clean(labelled).dropped == {}
        assert clean(changed(labelled, slice(3100, 3400), 1e-3)).dropped == {"zero_time": 300}

    def test_dummy_and_idle(self) -> None:
        trace = serving_log()
        flags = np.arange(len(trace)) < 5
        nothing = np.where(np.arange(len(trace)) >= 1990, 0.0, trace["B"])
        marked = trace.with_columns(dummy=flags, B=nothing, S=nothing)
        assert clean(marked).dropped == {"idle": 15}

    def test_a_duplicate_agrees_in_run_time_and_counter(self) -> None:
        trace = serving_log()
        twice = Trace({name: np.concatenate([column, column[10:30]]) for name, column in trace.columns.items()})
        assert clean(twice).dropped == {"duplicate": 20}

    @pytest.mark.parametrize(
        "other",
        [{"hardware": ["A100", "H100"]}, {"rep": [0.0, 1.0]}, {"step": [np.nan, np.nan]}],
        ids=["system", "repetition", "no counter"],
    )
    def test_rows_that_only_look_alike_are_no_duplicates(self, other: dict[str, Any]) -> None:
        alike = {"step": [0.0, 0.0], "B": [1.0, 1.0], "S": [1.0, 1.0], "T_ms": [10.0, 10.0]}
        assert clean(Trace({name: np.array(values) for name, values in (alike | other).items()})).dropped == {}

    def test_columns_that_contradict_each_other(self) -> None:
        trace = serving_log(20).with_columns(prefill_tokens=np.where(np.arange(20) < 4, 100.0, 0.0))
        assert clean(trace).dropped == {"bad_value": 4}

    def test_outliers_are_marked_and_dropped_on_request_only(self) -> None:
        trace = changed(serving_log(), [700, 800, 900], 3)
        cleaned = clean(trace)
        assert (cleaned.dropped, cleaned.marked) == ({}, {"outlier": 3})
        assert clean(trace, CleanOptions(drop=("outlier",))).dropped == {"outlier": 3}


class TestChoices:
    def test_a_kept_reason_drops_nothing(self) -> None:
        trace = changed(serving_log(), slice(0, 7), 4)
        assert clean(trace, CleanOptions(keep=("cold_start",))).dropped == {}

    @pytest.mark.parametrize(
        ("option", "reason"), [("keep", "nonsense"), ("keep", "non_finite"), ("drop", "cold_start")]
    )
    def test_what_cannot_be_chosen(self, option: str, reason: str) -> None:
        with pytest.raises(WrongUsage, match="cannot be chosen"):
            CleanOptions(**{option: (reason,)})  # type: ignore[arg-type]

    def test_reasons_by_row_add_up(self) -> None:
        trace = changed(changed(serving_log(), slice(0, 7), 4), slice(100, 110), 0)
        cleaned = clean(trace)
        for reason, n in cleaned.dropped.items():
            assert int((cleaned.reasons == reason).sum()) == n
        assert int((cleaned.reasons == "").sum()) == cleaned.rows_used

    def test_more_than_half_is_an_error_unless_accepted(self) -> None:
        cleaned = clean(changed(serving_log(), slice(0, 1200), 0))
        with pytest.raises(BadInput, match="1,200 of 2,000"):
            check_usable(cleaned, CleanOptions())
        check_usable(cleaned, CleanOptions(most=True))


class TestTokensPerRequest:
    """S read as tokens per request instead of tokens per step."""

    def ingested(self, wrong: int, folder: Path, **options: Any) -> CleanTrace:
        lines = [f"{b},{16 if i < wrong else 16 * b},{9 + b / 10}" for i, b in enumerate([32] * 300)]
        (folder / "t.csv").write_text("\n".join(["B,S,T_ms", *lines]))
        return ingest(folder / "t.csv", Reading(cleaning=CleanOptions(**options)))

    def test_is_an_error_with_its_likely_cause(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="20 of 300 rows have fewer tokens than requests") as caught:
            self.ingested(20, tmp_path)
        assert "tokens per request" in caught.value.remedy

    def test_a_few_rows_are_dropped(self, tmp_path: Path) -> None:
        assert self.ingested(2, tmp_path).dropped == {"bad_value": 2}


def test_every_reason_is_documented() -> None:
    page = (ROOT / "docs" / "formats.md").read_text()
    assert [rule.reason for rule in RULES if f"`{rule.reason}`" not in page] == []
