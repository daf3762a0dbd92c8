"""Cautions about fits: each where it is due, none where all is well."""

import numpy as np
import pytest

from latfit.model.fit_result import FitResult, FitStatus
from latfit.simulation.engine.run import EngineRun, serve
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import linear_costs
from latfit.validation.compare import cautions_about
from latfit.workload.requests import make_requests

LIMITS = EngineSettings(kv_blocks=101)
"""1,600 tokens."""


@pytest.fixture(scope="module")
def run() -> EngineRun:
    """Steps of 20 requests."""
    return serve(make_requests(np.zeros(20), 8, 8), linear_costs(1.0, 0.0, 0.0), LIMITS)


def fit(model: str = "context", B: float = 64.0, context: float = 1600.0, S: float = 200.0) -> FitResult:
    domain = {"B": [1.0, B], "S": [1.0, S], "context_tokens": [0.0, context]}
    return FitResult(model, FitStatus.CONVERGED, {}, domain=domain)


@pytest.mark.parametrize(
    ("fits", "codes"),
    [
        ((fit(), fit()), []),
        ((fit("roofline"), None), ["check_model"]),
        ((fit("linear"), None), ["check_model"]),
        ((fit(), fit("saturation")), ["check_model"]),
        ((fit(), fit(context=9000.0)), ["outside_measured"]),
        ((fit(B=16.0), fit(B=19.0)), ["outside_measured"]),
        ((fit(B=16.0), fit(B=20.0)), []),
        ((fit(S=159.0), fit(S=100.0)), ["outside_measured"]),  # 20 prompts of 8 tokens share the first step
        ((fit(S=159.0), fit(S=160.0)), []),
        ((fit(context=100.0), fit(context=150.0)), ["outside_measured"]),  # 20 requests of 12 cached tokens
        ((fit(context=100.0), fit(context=170.0)), []),
    ],
)
def test_cautions(run: EngineRun, fits: tuple[FitResult, FitResult | None], codes: list[str]) -> None:
    assert [each.code for each in cautions_about(*fits, run, LIMITS)] == codes
