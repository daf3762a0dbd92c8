"""The queue of a server that takes batches: Poisson arrivals, FIFO, deterministic T(b), a batch of b takes T(b).

Rules: greedy (an idle server takes what waits, up to Bmax), control limit (it first waits until `threshold` requests
are there) and fixed batch (exactly B, threshold = Bmax = B). All are one chain; without a limit on the batch, or where
the limit is never met, it is that of `batch_unlimited`, else that of `batch_limited`. The tail of the response is
light: given the service, arrivals in it are Poisson, so nothing becomes heavy-tailed by batching.

Inoue (2021) bounds the mean of the greedy queue without limit, T(b) = tau + alpha b, in closed form: with x = lambda
alpha, min(phi0, phi1), phi0 = (alpha + tau)/(2 (1 - x)) (1 + 2 lambda tau + (1 - lambda tau)/(1 + x)),
phi1 = 3 tau/(2 (1 - x)) + alpha (x + 2)/(2 (1 - x^2)).
"""

import math
from dataclasses import dataclass, replace

from scipy import optimize

from latfit.errors import WrongUsage
from latfit.queueing.batch_limited import solve_limited
from latfit.queueing.batch_positions import response_tail
from latfit.queueing.batch_unlimited import solve_unlimited
from latfit.queueing.law import ResponseLaw, positive, stable
from latfit.queueing.service import ServiceTimes

SOURCE = "embedded Markov chain, exact"


@dataclass(frozen=True)
class BatchLaw(ResponseLaw):
    """Also: the mean batch, the share of time the server works (near 1 already at moderate load: not a measure of
    headroom, `utilisation` is), and the threshold of the rule."""

    mean_batch: float = math.nan
    busy_share: float = math.nan
    threshold: int = 1


def batch_queue(rate: float, times: ServiceTimes, threshold: int = 1) -> BatchLaw:
    """Exact law of the response in ms. threshold 1 is greedy; rate per ms below `times.rate_limit()`."""
    rate, limit = checked_load(rate, times, threshold), times.rate_limit()
    chain = solve_unlimited(rate, times, threshold)
    law = BatchLaw(
        mean_ms=math.nan,
        tail=lambda t: 1.0,
        utilisation=rate / limit,
        rate_limit=limit,
        conditions=_conditions(times, threshold),
        source=SOURCE,
        threshold=threshold,
    )
    if chain is None:
        limited = solve_limited(rate, times, threshold)
        return replace(
            law,
            mean_ms=limited.mean_ms,
            tail=response_tail(limited),
            mean_batch=limited.mean_batch,
            busy_share=limited.busy_share,
        )
    residual, idle = chain.residuals(chain.T, times), chain.idle(times)
    return replace(
        law,
        mean_ms=chain.mean_ms,
        tail=lambda t: residual.tail(t) + idle.tail(t),
        mean_batch=chain.mean_batch,
        busy_share=chain.busy_share,
    )


def batch_mean(rate: float, times: ServiceTimes, threshold: int = 1) -> float:
    """Mean response in ms of `batch_queue`, without the cost of its tail."""
    rate = checked_load(rate, times, threshold)
    chain = solve_unlimited(rate, times, threshold)
    return chain.mean_ms if chain is not None else solve_limited(rate, times, threshold).mean_ms


def fixed_batch_queue(rate: float, times: ServiceTimes, batch: int) -> BatchLaw:
    """Wait for exactly `batch` requests, then serve them. At low load the wait, (batch - 1)/(2 rate) on average, is
    without bound: the rule is bad exactly where the machine is idle. rate < batch / T(batch)."""
    return batch_queue(rate, replace(times, max_batch=batch), batch)


def inoue_bound(rate: float, tau_ms: float, alpha_ms: float) -> float:
    """Upper bound in ms on the mean response of the greedy queue without limit, T(b) = tau + alpha b (Inoue 2021)."""
    rate, tau = positive(rate, "rate"), positive(tau_ms, "launch cost", "in ms")
    alpha = positive(alpha_ms, "slope", "in ms a request")
    stable(rate, 1 / alpha, "the batch queue")
    x = rate * alpha
    phi0 = (alpha + tau) / (2 * (1 - x)) * (1 + 2 * rate * tau + (1 - rate * tau) / (1 + x))
    phi1 = 1.5 * tau / (1 - x) + alpha / 2 * (x + 2) / (1 - x * x)
    return min(phi0, phi1)


def tail_decay(rate: float, times: ServiceTimes) -> float:
    """theta per ms with P(wait > t) ~ c e^(-theta t) for the queue with a largest batch: e^(theta T(Bmax)) =
    (1 + theta/rate)^Bmax. The queue length thins out by 1 + theta/rate a request."""
    if times.max_batch is None:
        raise WrongUsage("no largest batch", where="max_batch", remedy="Without a limit the tail is lighter than e^-t.")
    rate = positive(rate, "rate")
    stable(rate, times.rate_limit(), "the batch queue")
    T, B = times(times.max_batch), times.max_batch

    def excess(theta: float) -> float:
        return theta * T - B * math.log1p(theta / rate)

    high = 1 / T
    while excess(high) < 0:
        high *= 2
    low = high / 2
    while excess(low) >= 0:
        low /= 2
    root: float = optimize.brentq(excess, low, high, xtol=1e-15)
    return root


def checked_load(rate: float, times: ServiceTimes, threshold: int) -> float:
    """`rate`, if the queue is stable at it and batches can reach the threshold. Raises SlaOutOfReach, WrongUsage."""
    rate = positive(rate, "rate")
    if threshold < 1 or (times.max_batch is not None and threshold > times.max_batch):
        raise WrongUsage(
            f"threshold {threshold} is not between 1 and the largest batch",
            where="threshold",
            remedy="Give a threshold that a batch can reach.",
        )
    stable(rate, times.rate_limit(), "the batch queue", _cap_hint(rate, times))
    return rate


def _cap_hint(rate: float, times: ServiceTimes) -> str:
    if times.max_batch is None or rate < times.rate_limit():
        return ""
    best = times.best_batch()
    if best == times.max_batch:
        return ""
    return f"Batches of at most {best} would carry {best / times(best) * 1e3:,.6g}/s."


def _conditions(times: ServiceTimes, threshold: int) -> str:
    rule = "greedy" if threshold == 1 else f"waits for {threshold}"
    size = "any batch" if times.max_batch is None else f"batches up to {times.max_batch}"
    return f"Poisson arrivals, FIFO, one server, {size}, {rule}, deterministic T(b)"
