"""A schedule of replicas as KEDA reads it, and prefill on replicas of its own: YAML by PyYAML, the day by a clock."""

import json
from typing import Any

import pytest

import latfit
from latfit.errors import WrongUsage
from tests.unit.exporting.parsers import read_yaml, read_yamls
from tests.unit.exporting.plans import VLLM, of_requests, with_pair, with_schedule

HOUR = 3600.0
DAY = [[0.0, 1], [6 * HOUR - 120, 2], [8 * HOUR - 120, 3], [20 * HOUR, 2], [22 * HOUR + 90.5, 1]]
SCALED_OBJECT: dict[str, Any] = {
    "apiVersion": "keda.sh/v1alpha1",
    "kind": "ScaledObject",
    "metadata": {"name": str},
    "spec": {
        "scaleTargetRef": {"name": str},
        "minReplicaCount": int,
        "maxReplicaCount": int,
        "advanced": {
            "horizontalPodAutoscalerConfig": {
                "behavior": {
                    "scaleUp": {"policies": [{"type": str, "value": int, "periodSeconds": int}]},
                    "scaleDown": {"stabilizationWindowSeconds": int},
                }
            }
        },
        "triggers": [{"type": str, "metadata": {"timezone": str, "start": str, "end": str, "desiredReplicas": str}}],
    },
}
"""Fields and types of the resource that are used, as its reference states them (keda.sh/docs: ScaledObject, cron)."""


def has_shape(found: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        return found.keys() == shape.keys() and all(has_shape(found[key], shape[key]) for key in shape)
    if isinstance(shape, list):
        return bool(found) and all(has_shape(each, shape[0]) for each in found)
    return type(found) is shape if isinstance(shape, type) else bool(found == shape)


def minute_of(cron: str) -> int:
    minute, hour, *rest = cron.split()
    assert rest == ["*", "*", "*"]
    assert 0 <= int(minute) < 60
    assert 0 <= int(hour) < 24
    return 60 * int(hour) + int(minute)


def replicas_at(spec: dict[str, Any], minute: int) -> int:
    """KEDA's rule: a trigger is on where its next end comes before its next start; the largest counts."""
    counts = [int(spec["minReplicaCount"])]
    for each in spec["triggers"]:
        start, end = (minute_of(each["metadata"][name]) for name in ("start", "end"))
        assert start != end
        if (end - minute - 1) % 1440 < (start - minute - 1) % 1440:
            counts.append(int(each["metadata"]["desiredReplicas"]))
    return min(max(counts), int(spec["maxReplicaCount"]))


def scheduled(plan: dict[str, Any], begins: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(
        latfit.export(plan, "kubernetes", model="m", begins=begins).files["vllm-schedule.yaml"]
    )
    return found


class TestSchedule:
    @pytest.mark.parametrize(("begins", "first"), [(None, 0), ("06:30 Europe/Berlin", 390), ("23:59", 1439)])
    def test_every_minute_has_the_replicas_that_the_plan_asks_for(self, begins: str | None, first: int) -> None:
        found = scheduled(with_schedule(DAY, 24 * HOUR), begins)
        assert has_shape(found, SCALED_OBJECT)
        spec = found["spec"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 3)
        for minute in range(1440):
            asked = {max(n for at, n in _in_force(minute + part)) for part in (0.0, 0.999)}
            given = replicas_at(spec, (first + minute) % 1440)
            assert given >= max(asked) or minute >= 1438, f"minute {minute}"
            assert given in asked, f"minute {minute}: {given} instead of {asked}"

    def test_hours_that_were_not_recorded_have_the_whole_loads_replicas(self) -> None:
        files = latfit.export(with_schedule([[0.0, 1], [HOUR, 2]], 6 * HOUR), "kubernetes", model="m").files
        spec = read_yaml(files["vllm-schedule.yaml"])["spec"]
        assert [replicas_at(spec, 60 * hour + 30) for hour in (0, 3, 7, 20)] == [1, 2, 3, 3]
        assert "Only 6 h were recorded" in " ".join(files["vllm-schedule.yaml"].split())

    def test_more_than_a_day_is_told(self) -> None:
        plan = with_schedule([[0.0, 1], [30 * HOUR, 2]], 48 * HOUR)
        files = latfit.export(plan, "kubernetes", model="m").files
        assert "longer than a day" in files["vllm-kubernetes.yaml"].replace("\n# ", " ")
        with pytest.raises(WrongUsage, match="longer than a day"):
            latfit.export(plan, "kubernetes", model="m", begins="06:00")

    @pytest.mark.parametrize("begins", ["", "25:00", "6", "06:00 Nowhere/Town", "06:00 UTC; rm", "06:00 ../etc"])
    def test_a_time_that_is_none(self, begins: str) -> None:
        with pytest.raises(WrongUsage, match="no time of a day"):
            scheduled(with_schedule(DAY, 24 * HOUR), begins)

    def test_a_time_without_a_schedule_has_no_effect(self) -> None:
        with pytest.raises(WrongUsage, match="the plan has no schedule"):
            latfit.export(of_requests(), "kubernetes", model="m", begins="06:00")


def _in_force(minute: float) -> list[list[float]]:
    return [[at for at in DAY if at[0] <= minute * 60.0][-1]]


class TestPrefillApart:
    def test_two_deployments_that_hand_over_keys_and_values(self) -> None:
        found = latfit.export(with_pair(), "kubernetes", model="org/model")
        parts = {
            (each["kind"], each["metadata"]["labels"]["llm-d.ai/role"]): each
            for each in read_yamls(found.files["vllm-prefill-apart.yaml"])
        }
        assert set(parts) == {(kind, role) for kind in ("Deployment", "Service") for role in ("prefill", "decode")}
        for role, side, count in (("prefill", "kv_producer", 1), ("decode", "kv_consumer", 2)):
            spec = parts["Deployment", role]["spec"]
            (container,) = spec["template"]["spec"]["containers"]
            words = dict(word.split("=", 1) for word in container["args"] if word.startswith("--"))
            assert spec["replicas"] == count
            assert json.loads(words["--kv-transfer-config"]) == {"kv_connector": "NixlConnector", "kv_role": side}
            assert words["--max-num-seqs"] == "128"
            assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
            chosen = spec["selector"]["matchLabels"]
            assert chosen.items() <= spec["template"]["metadata"]["labels"].items()
            assert parts["Service", role]["spec"]["selector"] == chosen
        assert found.settings["prefill_replicas"] == 1
        assert found.settings["decode_replicas"] == 2
        assert found.settings["max_num_seqs"] == VLLM["max_num_seqs"]
        assert "2 ms and 1 µs a token" in found.files["vllm-prefill-apart.yaml"].replace("\n# ", " ")
