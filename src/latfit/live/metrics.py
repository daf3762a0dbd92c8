"""Collectors of `prometheus_client` (extra `live`): `REGISTRY.register(RouterMetrics(router))`.

Counters and gauges are read when a registry asks for them.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from latfit.live.router import Router
from latfit.live.waiting import Request

if TYPE_CHECKING:
    from prometheus_client import Metric

    from latfit.live.learner import Learner

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RouterMetrics:
    """Requests, batches, state and response times of a router from now on."""

    def __init__(self, router: Router) -> None:
        from prometheus_client import Histogram

        self._router = router
        what = "From arrival to output, by the path that served"
        self._response = Histogram("latfit_response_seconds", what, ["path"], buckets=BUCKETS_S, registry=None)
        for path in router.paths:
            self._response.labels(path.name)  # shown before its first request
        router.listeners.append(self._observe)

    def collect(self) -> Iterator["Metric"]:
        """Yield the current metrics."""
        router, paths = self._router, self._router.paths
        yield _counter("requests_submitted", "Requests taken", router.submitted)
        yield _counter("requests_refused", "Requests refused: the queue was full, or every path down", router.refused)
        yield _counter("requests_done", "Requests that ended with their output", router.done)
        yield _counter("requests_failed", "Requests that ended with an error", router.failed)
        yield _counter("requests_cancelled", "Requests that their senders gave up", router.cancelled)
        yield _gauge("requests_waiting", "Requests that wait for a path", router.waiting)
        yield _gauge("batches_running", "Batches that run", router.running)
        yield _counter("path_batches", "Batches begun", {path.name: path.batches for path in paths})
        failed = {path.name: path.failed_batches for path in paths}
        yield _counter("path_failed_batches", "Batches that ended with an error", failed)
        busy_s = {path.name: path.busy_ms / 1000 for path in paths}
        yield _counter("path_busy_seconds", "Time of batches that have ended", busy_s)
        yield _gauge("path_up", "Whether a path is given batches", router.up())
        yield from self._response.collect()

    def _observe(self, request: Request) -> None:
        if request.path and request.served:
            self._response.labels(request.path).observe((request.ended_ms - request.arrived_ms) / 1000)


class LearnerMetrics:
    """Factors of the paths' times, thresholds in use, and the state of the promise of a learner."""

    def __init__(self, learner: "Learner") -> None:
        self._learner = learner

    def collect(self) -> Iterator["Metric"]:
        """Yield the current metrics."""
        seen = self._learner.snapshot()
        for name, what in (
            ("in_use", "Times of batches by which the router decides, over the planned ones"),
            ("measured", "Times of the last batches over the planned ones"),
            ("low", "Lower end of the 99 % interval of what was measured"),
            ("high", "Upper end of the 99 % interval of what was measured"),
        ):
            yield _gauge(f"path_time_factor_{name}", what, {path.name: getattr(path, name) for path in seen.paths})
        yield _counter("switches", "New times that the router adopted", seen.switched)
        settings = {name: value for name, value in seen.settings.items() if isinstance(value, int | float)}
        yield _gauge("policy_setting", "Thresholds of the policy in use", settings, "setting")
        if seen.promise is not None:
            yield _counter("promises_kept", "Requests answered in time", seen.promise.kept)
            yield _counter("promises_broken", "Requests answered late, or with an error", seen.promise.broken)
            yield _gauge("promise_alarm", "Whether the promise is taken to be broken", seen.promise.alarm)
            yield _counter("promise_alarms", "Alarms so far", seen.promise.alarms)
            yield _gauge("promise_evidence", "Evidence against the promise; an alarm at 1", seen.promise.evidence)


def _counter(name: str, what: str, value: float | Mapping[str, float]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return _family(CounterMetricFamily, name, what, value, "path")


def _gauge(name: str, what: str, value: float | Mapping[str, float], label: str = "path") -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return _family(GaugeMetricFamily, name, what, value, label)


def _family(kind: Any, name: str, what: str, value: float | Mapping[str, float], label: str) -> Any:
    """Return a metric with one value, or one for each label."""
    if not isinstance(value, Mapping):
        return kind(f"latfit_{name}", what, value=value)
    family = kind(f"latfit_{name}", what, labels=[label])
    for key, each in value.items():
        family.add_metric([key], float(each))
    return family
