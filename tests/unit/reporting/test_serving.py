"""What is said of a plan of serving engines, and the curves of its requests."""

import numpy as np
import pytest
from msgspec import structs

import latfit
from latfit.api.serving import EnginePlan
from latfit.planning import Stall, Stalls
from latfit.planning.serving.result import Effect, Reached
from latfit.reporting.layout import Making
from latfit.reporting.plan_figures import distribution_figure
from latfit.reporting.serving import effect_bars, serving_page, stall_text, stalls_table
from tests.conftest import ROOT
from tests.unit.reporting.test_page import Outline


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> EnginePlan:
    fit = latfit.fit(ROOT / "sample_traces" / "cpu_numpy_tiny.parquet", model="linear")
    return latfit.plan_engine(fit, "2/s", "64:16", ttft="2s", tpot="200ms", kv_blocks=2588, replicas=1)


def test_curves_are_those_of_the_simulated_requests(plan: EnginePlan) -> None:
    """The p99 on the curve is the p99 of the plan; a read plan has the same curves; limits are marked."""
    outcome, curves = plan.result.outcome, plan.result.distributions_ms
    assert outcome is not None
    for metric, times in (("ttft", outcome.ttft), ("tpot", outcome.tpot)):
        assert len(curves[metric]) == 101
        assert np.all(np.diff(curves[metric]) >= 0)
        assert curves[metric][99] == pytest.approx(times.p99, rel=1e-4)
        assert curves[metric][50] == pytest.approx(times.p50, rel=1e-4)
    assert type(plan.result).from_json(plan.to_json()).distributions_ms == curves
    ttft, tpot = distribution_figure(plan.result).axes
    for axes, limit in ((ttft, 2000.0), (tpot, 200.0)):
        assert any(line.get_xdata()[0] == limit for line in axes.get_lines())  # type: ignore[index]


def test_the_page_names_model_and_machine(plan: EnginePlan) -> None:
    page = serving_page(plan.result, Making(), subject=plan.subject)
    assert "A plan of serving engines: tiny on " in Outline(page.html).text
    assert "distributions" in [each.stem for each in page.pictures]


def test_bars_are_as_long_as_their_values() -> None:
    """A change within the interval of the figure is no effect."""
    effects = [
        Effect(change="decode 20 % faster", target="p99 TPOT", before_ms=40.0, after_ms=30.0),
        Effect(change="prefill 20 % faster", target="p99 TPOT", before_ms=40.0, after_ms=39.0),
        Effect(change="1 replica fewer", target="p99 TPOT", before_ms=40.0, after_ms=80.0),
    ]
    found = Reached(name="p99 TPOT", value_ms=40.0, limit_ms=50.0, interval=(38.0, 43.0))
    assert effect_bars(effects, [found]) == [
        ("unchanged", "40 ms", 50.0),
        ("decode 20 % faster", "30 ms", 37.5),
        ("1 replica fewer", "80 ms", 100.0),
    ]
    assert effect_bars(effects[1:2], [found]) == []


def test_the_knee_is_named_where_the_plan_has_another_budget() -> None:
    rows = [
        Stall(512, "chunked-prefill", 500, 12.0, (11.0, 13.5), 980.0, knee=True),
        Stall(8192, "chunked-prefill", 4000, 95.0, None, 1000.0, planned=True),
    ]
    found = Stalls(4000, 12, rows)
    assert stall_text(found) == (
        "95 ms without a token for 12 decoding requests during a prompt of 4,000 tokens (p99);"
        " 12 ms (90 %: 11 to 13.5 ms) with --max-num-batched-tokens 512, throughput -2 %"
    )
    assert [row[0] for row in stalls_table(found).rows] == ["512", "8,192"]
    as_long = structs.replace(rows[1], planned=False, knee=True, max_num_batched_tokens=16_384)
    more = Stalls(4000, 12, [structs.replace(rows[1], output_tokens_per_s=900.0), as_long])
    assert "16384" not in stall_text(more)  # it has more throughput and stalls as long
