"""Cells count every row once, in any order, within the errors they state; here, on file systems and on a cluster."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from latfit import dask_cluster
from latfit.errors import BadInput, WrongUsage
from latfit.stats import FloatArray
from latfit.trace import cells as module
from latfit.trace.cells import MAX_BINS, Cells, compress, count_steps, merge, weighted_rows
from latfit.trace.clean import CleanOptions, clean
from latfit.trace.parquet import write_trace
from latfit.trace.read import Reading
from latfit.trace.table import WEIGHT, Trace

KEEP_FAST = CleanOptions(keep=("zero_time",))


def cells_of(B: FloatArray, S: FloatArray, T: FloatArray, context: FloatArray | None = None) -> Cells:
    columns = {"B": B, "S": S, "T_ms": T} | ({} if context is None else {"context_tokens": context})
    return count_steps(Trace(columns))


def random_steps(rows: int, seed: int = 0) -> dict[str, FloatArray]:
    rng = np.random.default_rng(seed)
    B = rng.integers(1, 40, rows).astype(float)
    S = np.where(rng.random(rows) < 0.3, B + rng.integers(0, 5000, rows), B)
    T = (3 + 0.02 * S) * np.exp(rng.normal(0, 0.1, rows))
    return {"B": B, "S": S, "T": T, "context": B * rng.integers(10, 4000, rows)}


def assert_same(one: Cells, other: Cells) -> None:
    """The same bins, with the same sums up to rounding."""
    assert (one.level, one.rows_read, one.dropped) == (other.level, other.rows_read, other.dropped)
    assert list(one.labels) == list(other.labels)
    for name in one.bins.columns:
        np.testing.assert_allclose(one.bins[name], other.bins[name], rtol=1e-9, atol=1e-9)


def assert_equal(one: Trace, other: Trace) -> None:
    """The same weighted rows, up to rounding."""
    assert set(one.columns) == set(other.columns)
    for name in one.columns:
        if one[name].dtype == object:
            assert one[name].tolist() == other[name].tolist()
        else:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-9)


def write(folder: Path, columns: dict[str, Any], files: int = 4, seed: int = 0) -> Path:
    """A folder of so many Parquet files with the rows in random order."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    rows = np.random.default_rng(seed).permutation(len(table))
    for i, part in enumerate(np.array_split(rows, files)):
        pq.write_table(table.take(pa.array(part)), folder / f"part-{i}.parquet", row_group_size=500)
    return folder


def labelled(rows: int = 6000) -> dict[str, Any]:
    steps = random_steps(rows)
    phase = np.where(steps["S"] > steps["B"], "mixed", "decode")
    return {"B": steps["B"], "S": steps["S"], "T_ms": steps["T"], "context_tokens": steps["context"], "phase": phase}


class TestMerging:
    @settings(max_examples=25)
    @given(st.lists(st.integers(0, 3000), max_size=6), st.integers(0, 99), st.sampled_from([MAX_BINS, 700]))
    def test_any_split_in_any_order_gives_the_same_cells(self, cuts: list[int], seed: int, limit: int) -> None:
        steps = random_steps(3000)
        rng = np.random.default_rng(seed)
        parts = [
            cells_of(*(column[part] for column in steps.values()))
            for part in np.split(rng.permutation(3000), sorted(cuts))
        ]
        parts = [parts[i] for i in rng.permutation(len(parts))]
        whole, chained = merge([cells_of(*steps.values())], limit), count_steps(Trace({}))
        for part in parts:
            chained = merge([part, chained], limit)
        assert (whole.level > 0) == (limit == 700)
        assert_same(merge(parts, limit), whole)
        assert_same(chained, whole)

    @settings(max_examples=30)
    @given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=300))
    def test_every_step_is_counted_and_moments_are_those_of_the_steps(self, times: list[float]) -> None:
        T = np.array(times)
        rows = weighted_rows(cells_of(np.ones(len(T)), np.ones(len(T)), T))
        assert rows[WEIGHT].sum() == len(T)
        mean = np.average(np.log(rows["T_ms"]), weights=rows[WEIGHT])
        assert mean == pytest.approx(np.log(T).mean(), abs=1e-10)
        variance = np.average((np.log(rows["T_ms"]) - mean) ** 2, weights=rows[WEIGHT])
        assert variance == pytest.approx(np.log(T).var(), rel=0.04, abs=1e-11)


class TestCells:
    def test_times_beside_periods_are_of_the_steps_with_a_period(self) -> None:
        period = np.array([4.0, np.nan, 8.0, 0.0])
        bins = count_steps(
            Trace({"B": np.ones(4), "S": np.ones(4), "T_ms": np.array([3.0, 5, 6, 7]), "period_ms": period})
        ).bins
        assert [float(bins[name].sum()) for name in ("steps", "timed", "sum_T", "sum_period")] == [4, 2, 9, 12]

    def test_small_traces_come_back_as_they_were(self) -> None:
        B, S, T = np.array([1.0, 3, 70_001]), np.array([1.0, 65_535, 100_003]), np.array([0.1, 2.0, 300.0])
        context = np.array([0.0, np.nan, 12345.0])
        rows = weighted_rows(cells_of(B, S, T, context))
        order = np.argsort(rows["T_ms"])
        for name, column in (("B", B), ("S", S), ("T_ms", T), ("context_tokens", context), (WEIGHT, np.ones(3))):
            np.testing.assert_allclose(rows[name][order], column, rtol=1e-12)

    def test_coarser_cells_keep_counts_means_and_decode_apart(self) -> None:
        steps = random_steps(20_000)
        for limit in (8000, 4000):
            cells = merge([cells_of(*steps.values())], limit)
            rows = weighted_rows(cells)
            assert cells.level > 0
            assert len(cells.bins) <= limit
            assert rows[WEIGHT].sum() == 20_000
            for name in ("B", "S"):
                assert rows[WEIGHT] @ rows[name] == pytest.approx(steps[name].sum(), rel=1e-12)
            assert rows[WEIGHT] @ rows["context_tokens"] == pytest.approx(steps["context"].sum(), rel=1e-12)
            decode = rows["S"] == rows["B"]
            assert rows[WEIGHT][decode].sum() == np.count_nonzero(steps["S"] == steps["B"])
            assert np.all(rows["S"] >= rows["B"])


class TestFolder:
    def test_shuffled_files_give_the_same_cells_and_every_row_counts_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        columns = labelled()
        one = compress(write(tmp_path / "one", columns, 3, seed=1), Reading(cleaning=KEEP_FAST))
        monkeypatch.setattr(module, "BATCH_ROWS", 64)
        other = compress(write(tmp_path / "other" / "deeper", columns, 7, seed=2).parent, Reading(cleaning=KEEP_FAST))
        assert_equal(one, other)
        assert one.provenance["cells"]["rows_read"] == one.provenance["cells"]["rows_used"] == one[WEIGHT].sum() == 6000
        decode = one["phase"] == "decode"
        assert one[WEIGHT][decode].sum() == np.count_nonzero(columns["phase"] == "decode")

    def test_rules_are_those_of_cleaning(self, tmp_path: Path) -> None:
        rows = [(1, 1, 5.0)] * 30 + [
            (1, 1, np.nan),
            (0, 0, 5),
            (1, 1, 0),
            (0, 1, 5),
            (4, 2, 5),
            (1, 1, 0.01),
            (1, 1, -3),
        ]
        B, S, T = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        flags = np.arange(len(T)) == 3
        columns = {"B": B, "S": S, "T_ms": T, "dummy": flags, "warmup": np.roll(flags, 1)}
        options = CleanOptions(max_ms=300)
        found = compress(write(tmp_path / "rows", columns), Reading(cleaning=options)).provenance["cells"]
        assert found["dropped"] == dict(clean(Trace(columns), options).dropped)
        assert found["rows_used"] + sum(found["dropped"].values()) == found["rows_read"] == len(T)

    @pytest.mark.parametrize("delimiter", [",", ";"])
    def test_a_text_table_gives_the_cells_of_its_rows(self, delimiter: str, tmp_path: Path) -> None:
        table = pa.table(labelled(2000))
        options = arrow_csv.WriteOptions(delimiter=delimiter)
        arrow_csv.write_csv(table, tmp_path / "rows.csv", options)
        pq.write_table(table, tmp_path / "rows.parquet")
        assert_equal(compress(tmp_path / "rows.csv"), compress(tmp_path / "rows.parquet"))

    def test_columns_units_filters_and_nulls(self, tmp_path: Path) -> None:
        table = {
            "batch": pa.array([1, 2, None, 4] * 5, pa.int32()),
            "tokens": [1, 2, 3, 4] * 5,
            "seconds": [0.001, 0.002, 0.003, 0.004] * 5,
            "tp": pa.array([4, 8, 8, 8] * 5),
            "path": pa.array(["gpu", None, "gpu", ""] * 5).dictionary_encode(),
        }
        scan = Reading({"B": "batch", "S": "tokens", "T_ms": "seconds"}, "s", where="tp == 8 and S > 1")
        found = compress(write(tmp_path / "rows", table, 2), scan)
        assert (found.provenance["cells"]["rows_read"], found.provenance["cells"]["dropped"]) == (15, {"non_finite": 5})
        assert sorted(found["T_ms"].tolist()) == pytest.approx([2, 4])
        assert set(found["tp"]) == {"8"}
        assert set(found.columns) == {"B", "S", "T_ms", WEIGHT, "tp"}
        with pytest.raises(BadInput, match="no row"):
            compress(tmp_path / "rows", Reading(scan.column_map, where="tp == 3"))

    def test_too_many_cells_are_made_coarser_and_said_so(self, tmp_path: Path) -> None:
        found = compress(write(tmp_path / "rows", labelled()), limit=1000)
        assert found.provenance["cells"]["counters"] < 2000
        assert "1,000" in found.provenance["cells"]["coarser"]
        assert found.provenance["cells"]["rows_used"] == 6000


class TestBadFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write(tmp_path / "rows", labelled(1000), 2)

    def spoilt(self, folder: Path, kind: str) -> str:
        whole = (folder / "part-0.parquet").read_bytes()
        target = folder / "spoilt.parquet"
        if kind == "foreign":
            target.write_text("no table\n")
        elif kind == "empty":
            target.write_bytes(b"")
        elif kind == "truncated":
            target.write_bytes(whole[: len(whole) // 2])
        elif kind == "damaged":
            target.write_bytes(whole[:200] + bytes(len(whole) - 1200) + whole[-1000:])
        else:
            pq.write_table(pa.table({"B": [1], "S": [1]}), target)
        return str(target)

    @pytest.mark.parametrize("kind", ["foreign", "empty", "truncated", "damaged", "columns"])
    def test_the_file_is_named_or_left_out_and_counted(self, folder: Path, kind: str) -> None:
        before = compress(folder)
        target = self.spoilt(folder, kind)
        with pytest.raises(BadInput) as caught:
            compress(folder)
        assert caught.value.where == target
        found = compress(folder, skip_unreadable=True)
        assert [bad["file"] for bad in found.provenance["cells"]["unreadable"]] == [target]
        assert found.provenance["cells"]["rows_used"] == before.provenance["cells"]["rows_used"]
        assert found.provenance["cells"]["files"] == 2

    @pytest.mark.parametrize(
        ("content", "found"), [(b"", "the file is empty"), (b"B,S,T_ms\n1,1,2\n", "no Parquet file")]
    )
    def test_a_table_of_another_kind_is_named_as_such(self, folder: Path, content: bytes, found: str) -> None:
        (folder / "a.csv").write_bytes(content)
        with pytest.raises(BadInput, match=found) as caught:
            compress(folder)
        assert caught.value.where == str(folder / "a.csv")

    def test_what_a_fit_writes_into_the_folder_is_no_trace(self, folder: Path) -> None:
        before = compress(folder)
        write_trace(folder / "trace.cells.parquet", before)
        (folder / "hardware.json").write_text("{}")
        assert_equal(compress(folder), before)

    def test_places_without_rows(self, tmp_path: Path) -> None:
        for place in (tmp_path, tmp_path / "missing", "nonsense://host/rows"):
            with pytest.raises(BadInput):
                compress(place)
        pq.write_table(pa.table({"B": [1.0], "S": [1.0], "T_ms": [1.0]}).slice(0, 0), tmp_path / "none.parquet")
        with pytest.raises(BadInput, match="no row"):
            compress(tmp_path)

    def test_options_that_cannot_be(self, folder: Path) -> None:
        with pytest.raises(WrongUsage):
            compress(folder, Reading(unit="parsec"))
        with pytest.raises(BadInput, match="dropped"):
            compress(folder, Reading(cleaning=CleanOptions(max_ms=3)))
        many = write(
            folder / "many",
            {"B": [1] * 300, "S": [1] * 300, "T_ms": [1.0] * 300, "path": list(map(str, range(300)))},
            1,
        )
        with pytest.raises(BadInput, match="path"):
            compress(many)


@pytest.fixture(scope="module")
def workers() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
    ) as running:
        yield running


class TestCluster:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write(tmp_path / "rows", labelled(), 6)

    def test_two_processes_give_the_cells_of_one(self, workers: Any, folder: Path) -> None:
        seen: list[tuple[int, int]] = []
        address = workers.scheduler_address
        found = on_dask(folder, address, progress=lambda done, total: seen.append((done, total)))
        assert_equal(found, compress(folder))
        assert seen[-1] == (6000, 6000)

    @pytest.mark.nightly
    def test_no_scheduler_is_an_error(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("distributed")
        monkeypatch.setattr(dask_cluster, "PATIENCE_S", 2.0)
        with pytest.raises(WrongUsage, match="no scheduler"):
            on_dask(folder, "tcp://127.0.0.1:9")

    def test_without_dask_the_extra_is_named(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "distributed", None)
        with pytest.raises(WrongUsage, match="not installed") as caught:
            on_dask(folder, "tcp://127.0.0.1:9")
        assert "latfit[dask]" in caught.value.remedy


def on_dask(folder: Path, address: str | None, **options: Any) -> Trace:
    return compress(folder, backend="dask", scheduler=address, **options)
