"""The whole event log of small stories, one or more a policy, worked out by hand.

The GPU takes 10 + b ms for b requests, four at the most; the AMX 4 b ms, two at the most.
"""

from collections.abc import Sequence

from latfit.policies import policy as policies
from latfit.policies.policy import DispatchTable, Limits, Policy
from latfit.simulation.policies.replication import event_log
from latfit.simulation.policies.service import System, bucketed, linear_path
from latfit.workload.load import RecordedLoad
from latfit.workload.requests import make_requests

GPU, AMX = linear_path("gpu", 10, 1, 4), linear_path("amx", 0, 4, 2)
BOTH, ALONE = System(GPU, AMX), System(GPU)
FOUR, PAIR = Limits(4), Limits(4, 2)


def story(
    policy: Policy,
    arrivals: Sequence[float],
    system: System = ALONE,
    *,
    class_id: object = 0,
    deadline_ms: object = float("inf"),
) -> list[str]:
    """The log without the arrivals, as `11 starts gpu 1+2`."""
    load = RecordedLoad(make_requests(arrivals, class_id=class_id, deadline_ms=deadline_ms))
    log = event_log(policy, system, load, len(arrivals))
    assert [each.at_ms for each in log if each.what == "arrives"] == list(arrivals)
    return [
        f"{each.at_ms:g} {each.what} {each.path} {'+'.join(map(str, each.requests))}"
        for each in log
        if each.what != "arrives"
    ]


def test_gpu_only_takes_all_that_wait() -> None:
    assert story(policies.gpu_only(FOUR), [0, 1, 2, 12, 13]) == [
        "0 starts gpu 0",
        "11 ends gpu 0",
        "11 starts gpu 1+2",
        "23 ends gpu 1+2",
        "23 starts gpu 3+4",
        "35 ends gpu 3+4",
    ]


def test_fixed_waits_for_exactly_two() -> None:
    """The last of five waits for ever."""
    assert story(policies.fixed(2, FOUR), [0, 1, 2, 12, 13]) == [
        "1 starts gpu 0+1",
        "13 ends gpu 0+1",
        "13 starts gpu 2+3",
        "25 ends gpu 2+3",
    ]


def test_window_ends_when_full_or_over() -> None:
    assert story(policies.window(5.0, Limits(2)), [0, 20, 21, 21.5]) == [
        "5 starts gpu 0",
        "16 ends gpu 0",
        "21 starts gpu 1+2",
        "33 ends gpu 1+2",
        "33 starts gpu 3",
        "44 ends gpu 3",
    ]


def test_marginal_cost_waits_while_it_pays() -> None:
    """T(1)/1 - T(2)/2 = 5 ms saved against 2 ms to the next; T(2)/2 - T(3)/3 = 1.67."""
    assert story(policies.marginal_cost(0.5, FOUR), [0, 3]) == ["3 starts gpu 0+1", "15 ends gpu 0+1"]


def test_cutoff_gives_aged_requests_to_the_side_path() -> None:
    assert story(policies.cutoff(4.0, PAIR), [0, 1, 2], BOTH) == [
        "0 starts gpu 0",
        "5 starts amx 1",
        "9 ends amx 1",
        "9 starts amx 2",
        "11 ends gpu 0",
        "13 ends amx 2",
    ]


def test_three_stages() -> None:
    """Few go to the idle AMX, three start the GPU, and the last one goes to the AMX once that is free."""
    assert story(policies.three_stage(3, 6.0, PAIR), [0, 1, 2, 5, 5.5, 5.6, 5.8], BOTH) == [
        "0 starts amx 0",
        "4 ends amx 0",
        "4 starts amx 1+2",
        "5.6 starts gpu 3+4+5",
        "12 ends amx 1+2",
        "12 starts amx 6",
        "16 ends amx 6",
        "18.6 ends gpu 3+4+5",
    ]


def test_optimal_goes_by_its_table() -> None:
    policy = policies.optimal(DispatchTable((0, 0, 2), 0.5, 4), FOUR)
    assert story(policy, [0, 3, 4]) == ["3 starts gpu 0+1", "15 ends gpu 0+1"]


def test_split_where_the_sum_of_delays_is_least() -> None:
    """Of three, 0 + 3 cost 39 ms, 1 + 2 cost 28, 2 + 1 cost 27."""
    assert story(policies.split(PAIR), [0, 0, 0], BOTH) == [
        "0 starts amx 0+1",
        "0 starts gpu 2",
        "8 ends amx 0+1",
        "11 ends gpu 2",
    ]


def test_deadline_waits_as_long_as_it_can() -> None:
    """Two wait; a third could still be taken until 30 - T(3) = 17."""
    assert story(policies.deadline(FOUR), [0, 5], deadline_ms=30.0) == ["17 starts gpu 0+1", "29 ends gpu 0+1"]


def test_urgent_classes_first() -> None:
    starts = [line for line in story(policies.gpu_only(Limits(1)), [0, 1, 2], class_id=[1, 1, 0]) if "starts" in line]
    assert starts == ["0 starts gpu 0", "11 starts gpu 2", "22 starts gpu 1"]


def test_buckets_pad_a_batch() -> None:
    system = System(bucketed(GPU, [1, 4]))
    assert story(policies.gpu_only(FOUR), [0, 1, 2], system)[2:] == ["11 starts gpu 1+2", "25 ends gpu 1+2"]
