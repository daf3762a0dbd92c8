"""The record of a fit, the content of a `.fit.json` file: docs/formats.md."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from latfit.messages import Message
from latfit.model import features, fit_parts as parts
from latfit.model.correction import CORRECTION, OF_STEPS, Correction
from latfit.model.features import CONTEXT, ROUNDING
from latfit.model.prediction_intervals import PredictionIntervals, intervals_from_json
from latfit.model.registry import FAMILY
from latfit.model.step_noise import NO_LEVELS, StepNoise
from latfit.model.term_model import LatencyModel, Parameter, Steps
from latfit.records import Record
from latfit.stats import FloatArray
from latfit.units import format_percent, number

MAX_DISTANCE = 3.0  # in median distances of the held-out steps; intervals widen up to here
MAX_TESTED = 3.0  # tested distances beyond the measured range up to which there are intervals
FULL_ERROR_DISTANCE = 0.25  # of the held-out distance; the held-out error counts in full from here, in part before
MAX_BATCH = 1 << 20  # a damaged file can say that larger batches were measured
MAX_VALUE = 1e60  # of anything counted or timed; its powers are finite


class FitStatus(Enum):
    """Why a fit ended: its code in files, whether it is usable (`ok`), a sentence, and what to do (`remedy`)."""

    CONVERGED = ("converged", True, "The fit converged; all parameters are identifiable.", "")
    PARTLY_IDENTIFIED = (
        "partly_identified",
        True,
        "The fit is usable within the measured range; some parameters are not identifiable.",
        "Measure more sizes to determine them; predictions within the measured range are not affected.",
    )
    TOO_FEW_ROWS = (
        "too_few_rows",
        False,
        "There are fewer rows than free parameters.",
        "Measure more steps, or fix parameters with --fix.",
    )
    CONSTANT_LATENCY = (
        "constant_latency",
        False,
        "The latency is constant, so its dependence on B and S cannot be fitted.",
        "Check which column is T_ms and its unit.",
    )
    ONE_CELL = ("one_cell", False, "All rows have the same B and S.", "Measure other batch sizes and token counts.")
    NOT_CONVERGED = (
        "not_converged",
        True,
        "The fit is usable with caution: the search for the optimum was ended at its step limit.",
        "Hold a parameter with --fix, or give --set bounds; predictions are checked on held-out steps all the same.",
    )
    FAILED = ("failed", False, "An error ended the fit.", "Fit its steps alone with --where.")

    ok: bool
    sentence: str
    remedy: str

    def __new__(cls, code: str, ok: bool, sentence: str, remedy: str) -> "FitStatus":
        member = object.__new__(cls)
        member._value_, member.ok, member.sentence, member.remedy = code, ok, sentence, remedy
        return member

    @property
    def code(self) -> str:
        return str(self.value)


class FitResult(Record, frozen=True, tag_field="schema", tag="latfit.fit/1"):
    what: ClassVar[str] = "fit"
    made_by: ClassVar[str] = "latfit fit TRACE"

    model: str
    status: FitStatus
    parameters: Mapping[str, parts.Estimate]
    metrics: parts.Errors = parts.Errors()
    cross_validation: parts.CrossValidation = parts.CrossValidation()
    baselines: Mapping[str, parts.Baseline] = {}
    identifiability: parts.Identifiability = parts.Identifiability()
    diagnostics: parts.Diagnostics = parts.Diagnostics()
    intervals: Mapping[str, Any] = {}
    domain: Mapping[str, Sequence[int | float]] = {}  # least and largest value by column
    data: parts.DataFacts = parts.DataFacts()
    provenance: Mapping[str, Any] = {}
    warnings: Sequence[Message] = ()
    bootstrap: Mapping[str, Any] = {}
    draws: Mapping[str, Any] = {}  # see `parameter_draws`
    typical: Mapping[str, float] = {}  # see `features.typical_context`
    correction: Correction | None = None  # learned correction of the parametric model, or None
    support: Mapping[str, Sequence[float]] = {}  # measured region, see `features.support_of`

    def __repr__(self) -> str:
        n, median = self.metrics.n, format_percent(self.metrics.median_ape_pct)
        held_out = format_percent(self.cross_validation.mape_pct)
        return f"FitResult({self.model}, {self.status.code}, n={n}, median error {median}, held-out MAPE {held_out})"

    @property
    def beats_linear(self) -> bool | None:
        """Whether the held-out error is below that of the linear baseline; None if unknown."""
        line = self.baselines.get("linear", parts.Baseline())
        own, simple = self.cross_validation.mape_pct, line.cv.mape_pct
        if own is None or simple is None:
            own, simple = self.metrics.mape_pct, line.mape_pct
        if own is None or simple is None or self.model == "linear":
            return None
        return own < simple and not self.identifiability.line_as_good

    @property
    def structure(self) -> LatencyModel:
        return FAMILY[self.model]

    @property
    def theta(self) -> FloatArray:
        return np.array([self.parameters[p.name].value for p in self.structure.parameters])

    def latency_ms(self, B: FloatArray, S: FloatArray, **context: FloatArray) -> FloatArray:
        """Return the typical latency in ms (n,) of steps with B requests, S tokens, and further columns by name.

        Steps without `context_tokens` have the trace's typical context: see `assumed_context`.
        """
        steps = self.steps(B, S, **context)
        return self.corrected(self.structure.latency_ms(self.theta, steps), steps)

    def corrected(self, T: FloatArray, steps: Steps) -> FloatArray:
        """Return parametric latencies (n,), or of several parameter vectors (k, n), times the correction."""
        return T if self.correction is None else T * np.exp(self.correction.of_steps(steps))

    def step_noise(self, phase: str) -> StepNoise | None:
        """Return the noise of steps about `latency_ms` in a phase; None if unknown.

        Levels by size hold for the trace's contexts, so a model of the context goes without them.
        """
        found = self.limits.of(phase).ratios
        return replace(found, levels=NO_LEVELS) if found is not None and CONTEXT in self.columns else found

    @property
    def name(self) -> str:
        return self.model if self.correction is None else f"{self.model}{CORRECTION}"

    def steps(self, B: FloatArray, S: FloatArray, **context: FloatArray) -> Steps:
        """Return the steps (n,) as the model takes them, with the typical context if they have none."""
        given = {"B": np.asarray(B, dtype=np.float64), "S": np.asarray(S, dtype=np.float64), **context}
        return features.StepTable(features.with_typical_context(given, self.typical) if self.reads_context else given)

    @property
    def reads_context(self) -> bool:
        return CONTEXT in self.columns and CONTEXT in self.domain

    @property
    def columns(self) -> tuple[str, ...]:
        read = self.correction.columns if self.correction is not None else ()
        return tuple(dict.fromkeys([*self.structure.columns, *read]))

    @property
    def assumed_context(self) -> str | None:
        """In words, the context of steps without one; None if the latency does not depend on it."""
        if not self.reads_context or not self.typical:
            return None
        return f"at the trace's median context of {self.typical.get(CONTEXT, 0.0):,.0f} tokens a request"

    @property
    def knows_prefill(self) -> bool:
        return self.identifiability.prefill

    @cached_property
    def limits(self) -> PredictionIntervals:
        return intervals_from_json(self.intervals)

    def widening(self, B: FloatArray, S: FloatArray, **context: FloatArray) -> FloatArray:
        """Return the factor (n,) >= 1 by which limits widen outside the measured steps.

        NaN if no extrapolation could be tested, infinite too far beyond those that were.
        """
        columns, tried = {"B": B, "S": S, **context}, self.cross_validation
        tested = {"S": tried.extrapolation_S, "B": tried.extrapolation_B}
        if tried.extrapolation_context is not None and CONTEXT in context:
            tested[CONTEXT] = tried.extrapolation_context
        wider = np.ones(np.broadcast_shapes(np.shape(B), np.shape(S)))
        for column, errors in tested.items():
            wider = np.maximum(wider, self._widened(column, np.asarray(columns[column]), errors))
        unlike = tried.outside_support
        if unlike is None or not unlike.distance:
            return wider
        far = self._support_distance(**columns)
        share = np.where(far > ROUNDING, np.minimum(far / unlike.distance, MAX_DISTANCE), 0.0)
        return np.maximum(wider, (1 + unlike.p90_ape_pct / 100) ** share)

    def _widened(self, column: str, values: FloatArray, tried: parts.HeldOutErrors | None) -> FloatArray:
        measured = float(self.domain[column][1]) if column in self.domain else math.inf
        beyond, trained = values > measured, tried.trained_up_to if tried else None
        if not tried or not trained or not 0 < trained < measured:
            return np.where(beyond, np.nan, 1.0)
        span = max(math.log(measured / trained), math.log(2))
        distance = np.log(np.where(beyond, values / measured, 1.0)) / span
        power = distance + np.minimum(distance / FULL_ERROR_DISTANCE, 1.0)
        return np.asarray((1 + tried.p90_ape_pct / 100) ** np.where(distance > MAX_TESTED, np.inf, power))

    def times_outside(self, B: FloatArray, S: FloatArray, **context: FloatArray) -> dict[str, FloatArray]:
        """Return by column the ratio (n,) to the measured end: positive above, negative below, 0 inside."""
        found = {}
        for column, values in {"B": B, "S": S, **context}.items():
            if column in self.domain:
                low, high = self.domain[column]
                x = np.asarray(values, dtype=np.float64)
                times = np.where(x > high, x / max(high, 1.0), 0.0)
                found[column] = np.asarray(np.where(x < low, -low / np.maximum(x, 1.0), times))
        return found

    def how_far(self, B: FloatArray, S: FloatArray, **context: FloatArray) -> "NDArray[np.object_]":
        """Describe where each step (n,) lies farthest outside, `S 1,000× above the measured 100`; empty inside."""
        times = self.times_outside(B, S, **context)
        found = np.full(np.broadcast_shapes(np.shape(B), np.shape(S)), "", dtype=object)
        for i in np.flatnonzero(np.any(list(times.values()), axis=0)).tolist() if times else []:
            column, much = max(((name, float(each[i])) for name, each in times.items()), key=lambda item: abs(item[1]))
            low, high = self.domain[column]
            place = f"above the measured {high:,.0f}" if much > 0 else f"below the measured {low:,.0f}"
            found[i] = f"{column} {number(abs(much), 3)}× {place}"
        return found

    def farthest(self, B: FloatArray, S: FloatArray, **context: FloatArray) -> str:
        columns = {"B": B, "S": S, **context}
        times = list(self.times_outside(**columns).values())
        if not times or not np.any(times):
            return ""
        one = int(np.argmax(np.max(np.abs(times), axis=0)))
        return str(self.how_far(**{name: np.asarray(column)[one : one + 1] for name, column in columns.items()})[0])

    @property
    def largest_batch(self) -> int:
        """Largest measured batch size, at most MAX_BATCH."""
        return max(min(int(self.domain["B"][1]), MAX_BATCH), 1)

    def outside_domain(self, B: FloatArray, S: FloatArray, **context: FloatArray) -> NDArray[np.bool_]:
        """Return whether steps (n,) lie outside the measured ranges or support, or hold prefill and the data none."""
        outside = self.outside_support(B, S, **context)
        if not self.knows_prefill:
            outside = outside | self.holds_prefill(B, S, **context)
        for times in self.times_outside(B, S, **context).values():
            outside = outside | (times != 0)
        return outside

    def outside_support(self, B: FloatArray, S: FloatArray, **context: FloatArray) -> NDArray[np.bool_]:
        """Return whether steps (n,) lie outside the measured region of (B, S) for their kind."""
        return self._support_distance(B, S, **context) > ROUNDING

    def _support_distance(self, B: FloatArray, S: FloatArray, **context: FloatArray) -> FloatArray:
        shape = np.broadcast_shapes(np.shape(B), np.shape(S))
        if not self.support:
            return np.zeros(shape)
        steps = {name: np.broadcast_to(x, shape).ravel() for name, x in {"B": B, "S": S, **context}.items()}
        kinds, read = self.kinds(**steps), features.read_by(steps)
        return features.outside_by(self.support, steps["B"], steps["S"], kinds, read).reshape(shape)

    @classmethod
    def kinds(cls, B: FloatArray, S: FloatArray, **context: FloatArray) -> NDArray[np.str_]:
        requests = context.get("prefill_requests")
        return features.kinds_of(np.asarray(B), cls.holds_prefill(B, S, **context), requests)

    @staticmethod
    def holds_prefill(B: FloatArray, S: FloatArray, **context: FloatArray) -> NDArray[np.bool_]:
        """Return whether steps (n,) have more tokens per request than decoding, or name prefill tokens."""
        reported = np.asarray(context.get("prefill_tokens", 0.0)) > 0
        return np.asarray((np.asarray(S) > features.MIXED_FROM * np.asarray(B)) | reported)

    def to_json(self) -> dict[str, Any]:
        found = super().to_json()
        found["status"] = {"ok": self.status.ok, "code": self.status.code, "message": self.status.sentence}
        for scores in (found["cross_validation"], *(each["cv"] for each in found["baselines"].values())):
            scores |= scores.pop("errors", {})
        found["data"] = self.data.to_json()
        return found

    @classmethod
    def upgrade(cls, document: Mapping[str, Any]) -> Mapping[str, Any]:
        if document["model"] not in FAMILY:
            raise ValueError(f"model {document['model']!r} is not known here")
        choices = getattr(FAMILY[document["model"]], "choices", ())
        younger = {c.parameter.name: {"value": c.parameter.fixed, "fixed": True} for c in choices}
        baselines = document.get("baselines", {}).items()
        return {
            **document,
            "parameters": {**younger, **document["parameters"]},
            "status": document["status"]["code"],
            "cross_validation": _nest_errors(document.get("cross_validation", {})),
            "baselines": {name: {**each, "cv": _nest_errors(each.get("cv", {}))} for name, each in baselines},
            "data": parts.DataFacts.upgrade(document.get("data", {})),
            "warnings": [Message.upgrade(each) for each in document.get("warnings", ())],
            "correction": document.get("correction") or None,
        }

    def checked_values(self) -> Self:
        wrong = [p.name for p in self.structure.parameters if not _is_possible(p, self.parameters.get(p.name))]
        if self.status.ok and wrong:
            raise ValueError(f"parameters without a possible value: {', '.join(wrong)}")
        if self.status.ok and (missing := [name for name in ("B", "S") if name not in self.domain]):
            raise ValueError(f"the domain names no {' and no '.join(missing)}")
        for name, (low, high) in self.domain.items():
            if not 0 <= low <= high < MAX_VALUE:
                raise ValueError(f"domain of {name} is {low} to {high}")
        features.check_support(self.support)
        if self.correction is not None and not {*self.correction.nodes} <= {*OF_STEPS}:
            raise ValueError(f"no such axes: {', '.join(self.correction.nodes)}")
        if not all(0 <= tokens < MAX_VALUE for tokens in self.typical.values()):
            raise ValueError(f"typical is {dict(self.typical)}")
        for name, facts in (*self.provenance.items(), *self.data.more.items()):
            if name in ("identity", "trace", "system", "reading") and not isinstance(facts, dict):
                raise ValueError(f"{name} is no object")
        if self.draws:
            names, values = self.draws["parameters"], np.asarray(self.draws["values"], dtype=np.float64)
            if len(values) and (values.shape[1:] != (len(names),) or not np.all(np.abs(values) < MAX_VALUE)):
                raise ValueError("draws do not fit their parameters")
            if not set(names) <= {p.name for p in self.structure.parameters}:
                raise ValueError("draws are of other parameters")
        _ = self.limits  # parsing checks them
        if not self.status.ok:
            return self
        B, S = (each.ravel() for each in np.meshgrid(*(np.maximum(self.domain[column], 1.0) for column in ("B", "S"))))
        with np.errstate(all="ignore"):
            T = self.latency_ms(B, np.maximum(S, B))
        if not np.all((T > 0) & (T < MAX_VALUE)):
            raise ValueError(f"it predicts {T.min():g} to {T.max():g} ms within its measured range")
        return self


def _nest_errors(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return held-out errors, which stand beside other keys in a file, under a key of their own."""
    return {**scores, "errors": scores if "folds" in scores else None}


def _is_possible(parameter: Parameter, found: parts.Estimate | None) -> bool:
    """Return whether a value is known, finite and not negative, as costs and rates are."""
    return found is not None and 0 <= found.value < MAX_VALUE and (found.value > 0 or not parameter.positive)


STORED_DRAWS = 200  # parameter vectors that a fit stores


def parameter_draws(fit: FitResult, n: int = STORED_DRAWS, seed: int = 0) -> FloatArray | None:
    """Return stored parameter vectors (n, p), permuted by the seed and repeated; None for a fit without draws."""
    names, values = fit.draws.get("parameters", ()), np.asarray(fit.draws.get("values", ()), dtype=np.float64)
    if n < 1 or len(values) == 0 or not np.all(np.isfinite(fit.theta)):
        return None
    order = np.random.default_rng(seed).permutation(len(values))
    drawn = np.tile(fit.theta, (n, 1))
    columns = [p.name for p in fit.structure.parameters]
    drawn[:, [columns.index(name) for name in names]] = values[np.resize(order, n)]
    return drawn


def latency_draws(fit: FitResult, draws: FloatArray, B: FloatArray, S: FloatArray, **context: FloatArray) -> FloatArray:
    """Return the typical latency in ms (n, m) of m steps for each of n parameter vectors (n, p)."""
    steps = fit.steps(B, S, **context)
    return fit.corrected(fit.structure.latency_ms(draws.T[:, :, None], steps), steps)


def step_draws(
    fit: FitResult, steps: Mapping[str, FloatArray], n: int = STORED_DRAWS, seed: int = 0
) -> FloatArray | None:
    """Return the typical latency in ms (n, m) of m steps on n curves that the data allow; None without draws."""
    draws = parameter_draws(fit, n, seed)
    return None if draws is None else latency_draws(fit, draws, **steps)


def fitted_identity(fit: FitResult) -> dict[str, str]:
    """Return the known facts of the measured system: hardware, model, ..."""
    from latfit.trace import Trace, identity_of

    if "identity" in fit.provenance:
        return dict(fit.provenance["identity"])
    known = identity_of(Trace({}, fit.provenance.get("trace", {})))
    return {**known, **{name: str(value) for name, value in fit.data.more.get("system", {}).items()}}
