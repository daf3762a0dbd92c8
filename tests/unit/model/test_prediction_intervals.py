"""One rule for the limits of a phase: each case of what a trace may have told apart."""

import pytest

from latfit.model.prediction_intervals import intervals_from_json


def limits(**phases: float | None) -> object:
    return intervals_from_json(
        {
            "ratio_quantiles": {"0.5": 1.0, "0.95": 1.1},
            "lower_quantiles": {"0.95": 0.9},
            "by_phase": {
                name.replace("_", " "): {
                    "ratio_quantiles": {"0.5": 1.0, "0.95": factor},
                    "lower_quantiles": {"0.95": None if factor is None else 1 / factor},
                }
                for name, factor in phases.items()
            },
        }
    )


@pytest.mark.parametrize(
    ("known", "asked", "factor"),
    [
        ({"decode": 1.02, "prefill": 1.3, "mixed": 1.2}, "decode", 1.02),
        ({"decode": 1.02, "prefill": 1.3, "mixed": 1.2}, "mixed", 1.2),
        ({"decode": 1.02, "prefill_or_mixed": 1.3}, "mixed", 1.3),
        ({"decode": 1.02, "prefill_or_mixed": 1.3}, "prefill", 1.3),
        ({"decode": 1.02, "prefill": 1.3}, "mixed", 1.3),
        ({"decode": 1.02, "mixed": 1.2}, "prefill", 1.2),
        ({"decode": 1.02, "prefill": 1.3, "mixed": 1.4}, "prefill or mixed", 1.4),
        ({"decode": 1.02, "prefill": 1.3}, "prefill or mixed", 1.3),
        ({"decode": 1.02}, "mixed", 1.1),
        ({}, "decode", 1.1),
        ({"decode": None, "prefill": 1.3}, "decode", None),
        ({"prefill": 1.3, "mixed": None}, "prefill or mixed", None),
    ],
)
def test_a_phase_takes_the_limits_of_what_holds_the_same(
    known: dict[str, float | None], asked: str, factor: float | None
) -> None:
    found = limits(**known)
    assert found.pooled_factor(asked, 0.95) == factor  # type: ignore[attr-defined]
    if factor is not None and factor != 1.1:
        assert found.pooled_factor(asked, 0.95, "lower") == pytest.approx(1 / factor)  # type: ignore[attr-defined]


def test_a_level_that_a_phase_cannot_tell_falls_to_the_next_below() -> None:
    found = limits(decode=None, prefill=1.3)
    assert found.highest_level("decode", 0.99) == 0.5  # type: ignore[attr-defined]
    assert found.highest_level("prefill", 0.99) == 0.95  # type: ignore[attr-defined]
    assert found.highest_level("prefill", 0.3) is None  # type: ignore[attr-defined]
