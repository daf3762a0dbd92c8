"""Collectors of `prometheus_client` (extra `live`): `REGISTRY.register(RouterMetrics(router))`."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from latfit.live.router import Router
from latfit.live.waiting import Request

if TYPE_CHECKING:
    from prometheus_client import Metric

    from latfit.live.learner import Learner

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Row = tuple[str, str, float | Mapping[str, float]]
"""Name, which ends in `_total` for a counter, description, and a value or one by label."""


class RouterMetrics:
    """Requests, batches, state and response times of a router."""

    def __init__(self, router: Router) -> None:
        from prometheus_client import Histogram

        self._router = router
        what = "From arrival to output, by the path that served"
        self._response = Histogram("latfit_response_seconds", what, ["path"], buckets=BUCKETS_S, registry=None)
        for path in router.paths:
            self._response.labels(path.name)  # shown before its first request
        router.listeners.append(self._observe)

    def collect(self) -> Iterator["Metric"]:
        router, paths = self._router, self._router.paths
        failed = {path.name: path.failed_batches for path in paths}
        busy_s = {path.name: path.busy_ms / 1000 for path in paths}
        yield from _families(
            ("requests_submitted_total", "Requests taken", router.submitted),
            ("requests_refused_total", "Requests refused: the queue was full, or every path down", router.refused),
            ("requests_done_total", "Requests that ended with their output", router.done),
            ("requests_failed_total", "Requests that ended with an error", router.failed),
            ("requests_cancelled_total", "Requests that their senders gave up", router.cancelled),
            ("requests_waiting", "Requests that wait for a path", router.waiting),
            ("batches_running", "Batches that run", router.running),
            ("path_batches_total", "Batches begun", {path.name: path.batches for path in paths}),
            ("path_failed_batches_total", "Batches that ended with an error", failed),
            ("path_busy_seconds_total", "Time of batches that have ended", busy_s),
            ("path_up", "Whether a path is given batches", router.up()),
        )
        yield from self._response.collect()

    def _observe(self, request: Request) -> None:
        if request.path and request.served:
            self._response.labels(request.path).observe((request.ended_ms - request.arrived_ms) / 1000)


class LearnerMetrics:
    """Factors of the paths' times, thresholds in use, and the promise."""

    def __init__(self, learner: "Learner") -> None:
        self._learner = learner

    def collect(self) -> Iterator["Metric"]:
        learner = self._learner
        estimates = {name: times.estimate() for name, times in learner.times.items()}
        in_use = {name: math.exp(times.ln_factor) for name, times in learner.times.items()}
        measured, low, high = (
            {name: math.exp(median + side * half_width) for name, (median, half_width) in estimates.items()}
            for side in (0, -1, 1)
        )
        yield from _families(
            ("path_time_factor_in_use", "Times of batches in use over the planned ones", in_use),
            ("path_time_factor_measured", "Times of the last batches over the planned ones", measured),
            ("path_time_factor_low", "Lower end of the 99 % interval of what was measured", low),
            ("path_time_factor_high", "Upper end of the 99 % interval of what was measured", high),
            ("switches_total", "New times that the router adopted", learner.switched),
        )
        settings = learner.router.policy.settings
        numbers = {name: value for name, value in settings.items() if isinstance(value, int | float)}
        yield from _families(("policy_setting", "Thresholds of the policy in use", numbers), label="setting")
        if (monitor := learner.monitor) is not None:
            evidence = max(math.log(monitor.evidence), 0.0) / math.log(monitor.needed)
            yield from _families(
                ("promises_kept_total", "Requests answered in time", monitor.kept),
                ("promises_broken_total", "Requests answered late, or with an error", monitor.broken),
                ("promise_alarm", "Whether the promise is taken to be broken", monitor.alarm),
                ("promise_alarms_total", "Alarms so far", monitor.alarms),
                ("promise_evidence", "Evidence against the promise; an alarm at 1", evidence),
            )


def _families(*rows: Row, label: str = "path") -> Iterator["Metric"]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, what, value in rows:
        kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"latfit_{name}", what, labels=[label] if isinstance(value, Mapping) else [])
        for key, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
            family.add_metric([] if key is None else [key], float(each))
        yield family
