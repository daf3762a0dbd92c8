"""How a plan names the traces of its fits."""

from dataclasses import replace

import pytest

from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.model.fit_parts import DataFacts
from latfit.planning.fit_quality import trace_name
from tests.conftest import planted_trace


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (DataFacts(source="runs/a.parquet"), "a.parquet"),
        (DataFacts(source="runs/a.parquet, runs/b.parquet", sources=["runs/a.parquet", "runs/b.parquet"]),
         "a.parquet and 1 more"),
        (DataFacts(), "fit"),
    ],
)  # fmt: skip
def test_a_fit_of_several_traces_says_how_many(facts: DataFacts, name: str) -> None:
    fit = fit_trace(planted_trace(0.05, repeats=2), FitOptions("linear"))
    assert trace_name(replace(fit, data=facts)) == name
