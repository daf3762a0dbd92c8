"""A load that varies: windows of recorded arrivals; its files."""

import math
from pathlib import Path

import numpy as np
import pytest

from latfit.errors import BadInput
from latfit.planning.load.uncertainty import promised_by_batches
from latfit.planning.load.varying import load_from_arrivals, read_load
from latfit.planning.plan import make_plan
from latfit.planning.request import Load, PlanOptions
from tests.unit.planning.test_plan import line, machine
from tests.unit.planning.test_support import LAW, SIXTY_FOUR


def test_windows_hold_every_arrival_once() -> None:
    arrivals = np.sort(np.random.default_rng(0).uniform(0, 3.6e6, 36_000))
    load = load_from_arrivals(arrivals, "day")
    assert load.window_ms % 6e4 == 0
    assert float(load.rates.sum() * load.window_ms) == pytest.approx(36_000, rel=0.02)


def test_a_plan_for_a_recording_is_sized_for_its_peak() -> None:
    load = Load(np.array([0.5, 3.1, 1.0]), 6e4, "recording")
    plan = make_plan(
        machine(gpu=line(4, 0.1, domain={"B": [1, 64], "S": [1, 64]})), 12.0, request=PlanOptions(load=load)
    )
    assert plan.rate_per_s == pytest.approx(3100)


class TestFiles:
    def test_seconds(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("t_s,prompt_tokens\n" + "".join(f"{i / 10},5\n" for i in range(601)))
        load = read_load(tmp_path / "a.csv", 10_000.0)
        assert len(load.rates) == 6
        assert load.rates == pytest.approx([0.01] * 5 + [0.0101])

    def test_points_in_time(self, tmp_path: Path) -> None:
        rows = "".join(f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.5000000,1,1\n" for i in range(120))
        (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
        assert float(read_load(tmp_path / "azure.csv", 30_000.0).rates.mean()) == pytest.approx(0.001, rel=0.03)

    def test_a_rate_over_time(self, tmp_path: Path) -> None:
        (tmp_path / "rates.csv").write_text("t_s,rate_per_s\n0,100\n60,500\n120,200\n")
        load = read_load(tmp_path / "rates.csv")
        assert load.rates.tolist() == [0.1, 0.5, 0.2]
        assert load.window_ms == 60_000

    @pytest.mark.parametrize(
        "content",
        [
            "a,b\n1,2\n",
            "t_s,x\n1,1\n",
            "t_s,x\n1,1\n1,1\n",
            "t_s,x\n1,1\nnone,2\n",
            "t_s,rate_per_s\n0,1\n60,-1\n",
            "t_s,rate_per_s\n0,1\n60,1\n61,1\n",
            "t_s,rate_per_s\n0,0\n60,0\n",
        ],
    )
    def test_broken_files_are_bad_input(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "bad.csv").write_text(content)
        with pytest.raises(BadInput, match=r"bad\.csv|moments"):
            read_load(tmp_path / "bad.csv")


@pytest.mark.parametrize("slower", [1.3, 2.0])
def test_slower_steps_are_a_slower_clock(slower: float) -> None:
    """Steps that take c times as long at a rate of 1/c give c times the response, and c times its interval."""
    profile = machine(gpu=line(4, 0.1, domain=SIXTY_FOUR, intervals=LAW))

    def at(slower: float) -> list[float]:
        found = promised_by_batches(profile, 2.0 / slower, 0.99, slower)
        assert found is not None
        return [(end or math.inf) / slower for end in (found.percentile_ms, *found.interval)]

    np.testing.assert_allclose(at(slower), at(1.0), rtol=1e-3)
