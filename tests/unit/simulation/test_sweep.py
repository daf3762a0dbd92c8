"""Sweeps: the same table whatever the number of workers and the backend, and no point computed twice."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from latfit.errors import BadInput, WrongUsage
from latfit.files import dumps
from latfit.policies import policy as policies
from latfit.policies.policy import Limits
from latfit.simulation import points as module
from latfit.simulation.points import Running
from latfit.simulation.policies.result import SimResult
from latfit.simulation.policies.run import Options, Point, sweep
from latfit.simulation.policies.service import System, linear_path, table_path
from latfit.workload.arrivals import Poisson
from latfit.workload.load import OpenLoad

SYSTEM = System(linear_path("gpu", 8, 0.05, 64), table_path("amx", [2.0], exponential=True))
MADE = (policies.gpu_only(Limits(64)), policies.cutoff(3.0, Limits(64, 1)), policies.fixed(8, Limits(64)))
OPTIONS = Options(120_000, replications=2)


def points(rates: tuple[float, ...] = (0.1, 0.4)) -> list[Point]:
    return [
        Point(policy, SYSTEM, OpenLoad(Poisson(rate)), OPTIONS, {"asked_rate": rate})
        for rate in rates
        for policy in MADE
    ]


def test_the_same_whatever_the_workers() -> None:
    assert documents(sweep(points(), Running(workers=1))) == documents(sweep(points(), Running(workers=7)))


def test_the_same_on_dask() -> None:
    pytest.importorskip("distributed")
    there = sweep(points((0.3,)), Running(backend="dask", workers=1))
    assert documents(there) == documents(sweep(points((0.3,))))


def documents(results: list[SimResult]) -> list[str]:
    return [dumps(each.to_json()) for each in results]


def test_one_file_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sweep.parquet"
    first = sweep(points((0.1,)), out=out)
    computed: list[str] = []
    original = module.run_point

    def counted(point: Point, *more: Any) -> Any:
        computed.append(point.key)
        return original(point, *more)

    monkeypatch.setattr(module, "run_point", counted)
    seen: list[tuple[float, int]] = []
    both = sweep(points(), out=out, resume=True, progress=lambda done, total: seen.append((done, total)))
    assert len(computed) == 3
    assert list(seen[-1]) == [6, 6]
    assert documents(both[:3]) == documents(first)
    table = pq.read_table(out)
    assert table.num_rows == 6
    assert b"latfit.sweep/1" in table.schema.metadata[b"latfit"]
    assert table.column("asked_rate").to_pylist() == [0.1] * 3 + [0.4] * 3
    assert table.column("key").to_pylist() == [point.key for point in points()]


def test_what_was_computed_is_kept_when_a_point_fails(tmp_path: Path) -> None:
    out = tmp_path / "sweep.parquet"
    broken = Point(MADE[1], System(SYSTEM.main), OpenLoad(Poisson(0.1)), OPTIONS)
    with pytest.raises(WrongUsage, match="two execution paths"):
        sweep([*points((0.1,)), broken], Running(workers=1), out=out)
    assert pq.read_table(out).num_rows == 3


def test_keys_tell_what_a_result_depends_on() -> None:
    base = points()[0]
    others = [
        Point(policies.gpu_only(Limits(63)), SYSTEM, base.load, OPTIONS),
        Point(base.policy, System(linear_path("gpu", 8, 0.051, 64)), base.load, OPTIONS),
        Point(base.policy, SYSTEM, OpenLoad(Poisson(0.11)), OPTIONS),
        Point(base.policy, SYSTEM, base.load, Options(2000, replications=2, seed=1)),
    ]
    assert len({base.key, *(other.key for other in others)}) == 5
    assert base.key == points()[0].key


class TestBadInput:
    def test_nothing_to_do(self) -> None:
        with pytest.raises(WrongUsage):
            sweep([])

    @pytest.mark.parametrize("running", [{"backend": "spark"}, {"scheduler": "tcp://x:1"}, {"workers": 0}])
    def test_running(self, running: dict[str, object]) -> None:
        with pytest.raises(WrongUsage):
            Running(**running)  # type: ignore[arg-type]

    def test_another_file(self, tmp_path: Path) -> None:
        out = tmp_path / "sweep.parquet"
        out.write_text("t_s,prompt_tokens\n")
        with pytest.raises(BadInput, match="not a table of a sweep"):
            sweep(points((0.1,)), out=out, resume=True)

    @pytest.mark.parametrize(
        "document", [None, "", "{", "[]", "{}", '"x"', "9" * 400, "[" * 100_000, '{"policy": NaN}', '{"policy": 1e400}']
    )
    def test_a_row_that_is_no_simulation(self, document: str | None, tmp_path: Path) -> None:
        out = tmp_path / "sweep.parquet"
        keys = [point.key for point in points((0.1,))]
        pq.write_table(pa.table({"key": keys, "document": pa.array([document] * 3, pa.string())}), out)
        with pytest.raises(BadInput, match="not a table of a sweep"):
            sweep(points((0.1,)), out=out, resume=True)
