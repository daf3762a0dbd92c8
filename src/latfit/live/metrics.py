"""What a router did, for Prometheus: counters and gauges read when they are asked for, histograms of responses by path.

`RouterMetrics` and `LearnerMetrics` are collectors of `prometheus_client` (extra `live`):
`REGISTRY.register(RouterMetrics(router))`.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from latfit.live.router import Router
from latfit.live.waiting import Request

if TYPE_CHECKING:
    from prometheus_client import Metric

    from latfit.live.learner import Learner

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper ends; one without an end follows."""


class RouterMetrics:
    """Listens to a router from now on. Raises ImportError, when asked, where prometheus_client is not installed."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._counts = {path.name: [0] * (len(BUCKETS_S) + 1) for path in router.paths}
        self._sums = {path.name: 0.0 for path in router.paths}
        router.listeners.append(self._ended)

    def collect(self) -> Iterator["Metric"]:
        """The metrics as they are now, as a registry asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        router = self._router
        for name, what in (
            ("submitted", "Requests taken"),
            ("refused", "Requests refused: the queue was full, or every path down"),
            ("done", "Requests that ended with their output"),
            ("failed", "Requests that ended with an error"),
            ("cancelled", "Requests that their senders gave up"),
        ):
            yield CounterMetricFamily(f"latfit_requests_{name}", what, value=getattr(router, name))
        yield GaugeMetricFamily("latfit_requests_waiting", "Requests that wait for a path", value=router.waiting)
        yield GaugeMetricFamily("latfit_batches_running", "Batches that run", value=router.running)
        for name, what in (
            ("batches", "Batches begun"),
            ("failed_batches", "Batches that ended with an error"),
        ):
            family = CounterMetricFamily(f"latfit_path_{name}", what, labels=["path"])
            for path in router.paths:
                family.add_metric([path.name], getattr(path, name))
            yield family
        busy = CounterMetricFamily("latfit_path_busy_seconds", "Time of batches that have ended", labels=["path"])
        for path in router.paths:
            busy.add_metric([path.name], path.busy_ms / 1000)
        yield busy
        up = GaugeMetricFamily("latfit_path_up", "Whether a path is given batches", labels=["path"])
        for name, there in router.up().items():
            up.add_metric([name], float(there))
        yield up
        response = HistogramMetricFamily(
            "latfit_response_seconds", "From arrival to output, by the path that served", labels=["path"]
        )
        for server, counts in self._counts.items():
            response.add_metric([server], _cumulative(counts), self._sums[server])
        yield response

    def _ended(self, request: Request) -> None:
        if not request.path or not request.served:
            return
        took_s = (request.ended_ms - request.arrived_ms) / 1000
        self._counts[request.path][bisect_left(BUCKETS_S, took_s)] += 1
        self._sums[request.path] += took_s


class LearnerMetrics:
    """What a learner thinks, read when it is asked for: `REGISTRY.register(LearnerMetrics(learner))`."""

    def __init__(self, learner: "Learner") -> None:
        self._learner = learner

    def collect(self) -> Iterator["Metric"]:
        """The metrics as they are now, as a registry asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        seen = self._learner.snapshot()
        for name, what in (
            ("in_use", "Times of batches by which the router decides, over the planned ones"),
            ("measured", "Times of the last batches over the planned ones"),
            ("low", "Lower end of the 99 % interval of what was measured"),
            ("high", "Upper end of the 99 % interval of what was measured"),
        ):
            family = GaugeMetricFamily(f"latfit_path_time_factor_{name}", what, labels=["path"])
            for path in seen.paths:
                family.add_metric([path.name], getattr(path, name))
            yield family
        yield CounterMetricFamily("latfit_switches", "New times that the router adopted", value=seen.switched)
        settings = GaugeMetricFamily("latfit_policy_setting", "Thresholds of the policy in use", labels=["setting"])
        for name, value in seen.settings.items():
            if isinstance(value, int | float):
                settings.add_metric([name], value)
        yield settings
        if seen.promise is not None:
            yield CounterMetricFamily("latfit_promises_kept", "Requests answered in time", value=seen.promise.kept)
            yield CounterMetricFamily(
                "latfit_promises_broken", "Requests answered late, or with an error", value=seen.promise.broken
            )
            yield GaugeMetricFamily(
                "latfit_promise_alarm", "Whether the promise is taken to be broken", value=seen.promise.alarm
            )
            yield CounterMetricFamily("latfit_promise_alarms", "Alarms so far", value=seen.promise.alarms)
            yield GaugeMetricFamily(
                "latfit_promise_evidence", "Evidence against the promise; an alarm at 1", value=seen.promise.evidence
            )


def _cumulative(counts: list[int]) -> list[Any]:
    """(upper end, requests up to it), as Prometheus has them."""
    found, total = [], 0
    for end, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
        total += count
        found.append((end, float(total)))
    return found
