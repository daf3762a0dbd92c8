"""Small stories of every engine and order, told by hand; unless said otherwise a step takes 10 ms whatever is in it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from latfit.errors import BadInput, WrongUsage
from latfit.simulation.engine.run import EngineRun, serve
from latfit.simulation.engine.settings import EngineSettings, Order, Speculation
from latfit.simulation.engine.step_cost import linear_costs
from latfit.workload.requests import Requests, make_requests

TEN = linear_costs(10.0, 0.0, 0.0)
BY_TOKEN = linear_costs(0.0, 0.0, 1.0)
"""1 ms a token: a step's time tells what was in it."""

PLAIN = EngineSettings(kv_blocks=1001, asynchronous=False, padded_graphs=False)


def told(requests: Requests, settings: EngineSettings, costs: Any = TEN) -> EngineRun:
    return serve(requests, costs, settings)


def test_prefill_is_cut_into_chunks() -> None:
    """Prompt 10, budget 4: chunks of 4, 4, 2; the first token ends the third step."""
    run = told(make_requests([0.0], [10], [1]), replace(PLAIN, max_num_batched_tokens=4, max_num_seqs=4), BY_TOKEN)
    assert run.counters.steps == 3
    assert run.first_ms[0] == 10.0


def test_a_long_prefill_leaves_room_for_others() -> None:
    """Threshold 4: a prompt of 8 takes two steps, and a prompt of 3 beside it one."""
    settings = replace(PLAIN, long_prefill_token_threshold=4)
    run = told(make_requests([0.0, 0.0], [8, 3], [1, 1]), settings)
    assert run.first_ms.tolist() == [20.0, 10.0]


def test_swapping_costs_time_instead_of_tokens() -> None:
    settings = replace(PLAIN, kv_blocks=3, block_size=4, swap_ms_per_token=0.5)
    run = told(make_requests([0.0, 0.0], [4, 4], [3, 3]), settings)
    assert run.counters.preemptions == 1
    assert run.counters.prefill_tokens == 8
    # Out in the second step, in again in the fourth: 4 tokens at 0.5 ms each way.
    assert run.last_ms.tolist() == [32.0, 54.0]


def test_continuous_batching_stops_decoding_to_prefill() -> None:
    """The second request comes in the first one's decoding."""
    run = told(make_requests([0.0, 15.0], [4, 4], [4, 1]), replace(PLAIN, batching="continuous"))
    assert run.first_ms.tolist() == [10.0, 30.0]
    assert run.last_ms[0] == 50.0


def test_selective_batching_prefills_whole_prompts_beside_decoding() -> None:
    requests = make_requests([0.0, 15.0], [4, 300], [4, 1])
    run = told(requests, replace(PLAIN, batching="selective", max_num_batched_tokens=256))
    assert run.first_ms.tolist() == [10.0, 30.0]
    assert run.last_ms[0] == 40.0


def test_static_batches_are_padded() -> None:
    """Prompts 100, 500, 50 in one batch: 650 of 1,500 prompt tokens are of use, 43.3 %."""
    settings = replace(PLAIN, batching="static", start_at=3)
    run = told(make_requests([0.0, 1.0, 2.0], [100, 500, 50], [1, 1, 1]), settings)
    assert run.counters.prefill_tokens == 1500
    assert 650 / run.counters.computed_tokens == pytest.approx(0.43333, abs=1e-5)
    assert run.first_ms.tolist() == [12.0, 12.0, 12.0]


ONE = replace(PLAIN, max_num_seqs=1, max_num_batched_tokens=64)
"""One request at a time: the order of ends is the order of service."""


def served_order(order: Order, **columns: Any) -> list[int]:
    """Five requests that wait together behind a first one."""
    rest: dict[str, Any] = {name: [0, *values] for name, values in columns.items()}
    output = rest.pop("output_tokens", [1] * 6)
    output[0] = 1
    deadlines = rest.pop("deadline_ms", [np.inf] * 6)
    deadlines[0] = 1.0
    arrivals = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    requests = make_requests(arrivals, 4, output, deadline_ms=deadlines, **rest)
    run = told(requests, replace(ONE, order=order))
    return [int(i) for i in np.argsort(run.last_ms, kind="stable")[1:]]


def test_orders() -> None:
    lengths = [5, 3, 4, 1, 2]
    assert served_order(Order("fcfs"), output_tokens=lengths) == [1, 2, 3, 4, 5]
    assert served_order(Order("sjf"), output_tokens=lengths) == [4, 5, 2, 3, 1]
    assert served_order(Order("slo"), deadline_ms=[500.0, 90.0, 300.0, np.inf, 20.0]) == [5, 2, 3, 1, 4]
    assert served_order(Order("priority"), class_id=[2, 1, 0, 1, 0]) == [3, 5, 2, 4, 1]
    assert served_order(Order("fair"), user_id=[1, 1, 1, 2, 3]) == [1, 4, 5, 2, 3]


def test_ageing_lets_a_low_class_through() -> None:
    """A level is worth 1.5 ms of waiting: class 1 of arrival 1 counts as 2.5, before class 0 of arrival 3."""
    assert served_order(Order("priority", ageing_ms=1.5), class_id=[1, 1, 0, 0, 0]) == [1, 3, 2, 4, 5]


def test_the_switch_goes_by_load() -> None:
    """Three or more wait: by class, then the shortest; fewer: the earliest deadline."""
    order = served_order(
        Order("switch", switch_at=3),
        class_id=[1, 1, 0, 0, 0],
        output_tokens=[1, 2, 9, 5, 7],
        deadline_ms=[50.0, 20.0, 90.0, 80.0, 70.0],
    )
    assert order == [4, 5, 3, 2, 1]


def test_speculation_makes_the_expected_number_of_tokens() -> None:
    """Two drafts, each accepted with 0.6 after the other: 1 + 0.6 + 0.36 = 1.96 tokens a step of decoding."""
    requests = make_requests([0.0] * 50, 4, 201)
    settings = replace(PLAIN, speculation=Speculation(2, 0.6, 0.5))
    run = told(requests, settings)
    c = run.counters
    steps_of_decoding = c.drafted_tokens / 2
    made = (c.generated_tokens - 50) / steps_of_decoding
    # The variance of the tokens of a step is under 0.75; the last step of a request may cut some off.
    assert made == pytest.approx(1.96, abs=4 * np.sqrt(0.75 / steps_of_decoding) + 2 / 100)
    all_accepted = told(requests, replace(settings, speculation=Speculation(3, 1.0)))
    assert all_accepted.counters.steps == 1 + 50


def test_the_last_token_of_a_prompt_has_no_draft() -> None:
    """256 tokens of a prompt of 257, the last one, and four tokens in one step."""
    settings = replace(PLAIN, max_num_seqs=8, max_num_batched_tokens=256, speculation=Speculation(3, 1.0))
    counters = told(make_requests([0.0], [257], [5]), settings).counters
    assert (counters.steps, counters.drafted_tokens) == (3, 3)


def test_a_draft_costs_its_time() -> None:
    run = told(make_requests([0.0], [4], [3]), replace(PLAIN, speculation=Speculation(1, 0.0, 2.5)))
    assert run.last_ms[0] == 10.0 + 2 * 12.5


def test_cached_prefixes_are_not_computed() -> None:
    run = told(make_requests([0.0], [100], [1]), replace(PLAIN, cached_share=0.5), BY_TOKEN)
    assert run.first_ms[0] == 100 - 48  # whole blocks of 16


def test_a_request_that_never_fits_is_refused_before_the_run() -> None:
    with pytest.raises(BadInput, match="request 2 has 9,000"):
        told(make_requests([0.0, 1.0], [5, 9000], [1, 9000]), PLAIN)
    exactly = make_requests([0.0], [15_990], [11])
    assert told(exactly, replace(PLAIN, max_num_batched_tokens=16_384)).last_ms[0] == 110.0


@pytest.mark.parametrize(
    "change",
    [
        {"batching": "whim"},
        {"max_num_seqs": 0},
        {"kv_blocks": 1},
        {"max_num_batched_tokens": 100},
        {"cached_share": 1.0},
        {"batching": "static", "order": Order("sjf")},
    ],
)
def test_settings_that_mean_nothing_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WrongUsage):
        replace(PLAIN, **change)
    with pytest.raises(WrongUsage):
        Order("whim")
    with pytest.raises(WrongUsage):
        Speculation(acceptance=1.5)


def test_no_request_at_all() -> None:
    with pytest.raises(BadInput, match="no request"):
        told(make_requests([]), PLAIN)
