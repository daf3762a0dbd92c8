"""Plans from fits with known parameters: published inverses, thresholds by enumeration, honest nulls."""

import numpy as np
import pytest
from msgspec import structs

from latfit.errors import BadInput, WrongUsage
from latfit.hardware.path_latency import PathLatency
from latfit.hardware.profile import ExecutionPath, HardwareProfile
from latfit.model.fit_parts import Errors, Estimate
from latfit.model.fit_result import FitResult, FitStatus
from latfit.model.registry import FAMILY
from latfit.planning.plan import make_plan
from latfit.planning.request import PlanOptions
from latfit.planning.steps.limits import level_for, levels_for
from latfit.planning.steps.thresholds import amortised_batch, gpu_threshold
from tests.conftest import REFERENCE


def fit_with(theta: list[float], model: str = "saturation", **parts: object) -> FitResult:
    names = [p.name for p in FAMILY[model].parameters]
    parameters = {name: Estimate(float(v), None, None, None, "") for name, v in zip(names, theta, strict=True)}
    whole = FitResult(model, FitStatus.CONVERGED, parameters, Errors(50), domain={"B": [1, 256], "S": [1, 4096]})
    return structs.replace(whole, **parts)


def line(tau: float, per_request: float, **parts: object) -> FitResult:
    return fit_with([tau, per_request, 0.0], "linear", **parts)


def machine(**fits: FitResult) -> HardwareProfile:
    return HardwareProfile({name: ExecutionPath(name, fit) for name, fit in fits.items()})


def latency(name: str, fit: FitResult, tokens: int = 1) -> PathLatency:
    return PathLatency(ExecutionPath(name, fit), tokens)


REFERENCE_MACHINE = machine(cpu=fit_with(REFERENCE.tolist()))


class TestInverse:
    def test_published_ranges(self) -> None:
        plan = make_plan(REFERENCE_MACHINE, 30.0)
        row = next(row for row in plan.S_at_B if row.B == 8)
        assert (row.S_min, row.S_max, row.extrapolated) == (8, 971, False)
        plan = make_plan(REFERENCE_MACHINE, 16.0)
        batches = next(row for row in plan.B_at_S if row.S == 512)
        assert (batches.B_min, batches.B_max) == (13, 94)

    def test_every_end_is_tight(self) -> None:
        """One token more, or one fewer, breaks the SLA, unless S >= B ends the range first."""
        plan = make_plan(REFERENCE_MACHINE, 20.0)
        fit = REFERENCE_MACHINE.paths["cpu"].fit

        def T(B: int, S: int) -> float:
            return float(fit.latency_ms(np.array([B]), np.array([S]))[0])

        assert plan.S_at_B
        for row in plan.S_at_B:
            assert row.S_max is not None
            assert T(row.B, row.S_max) <= 20 < T(row.B, row.S_max + 1)
            assert T(row.B, row.S_min) <= 20
            assert row.S_min == row.B or T(row.B, row.S_min - 1) > 20

    def test_a_percentile_above_the_measured_ones_is_extrapolated_and_named(self) -> None:
        """ln factor of p90 doubles to p99 (ln 0.01 / ln 0.1), or grows as that of all steps together does."""
        alone = {"ratio_quantiles": {"0.5": 1.0, "0.9": 1.1, "0.99": None}}
        pooled = {
            "ratio_quantiles": {"0.9": 1.1, "0.99": 1.3},
            "by_phase": {"decode": {"ratio_quantiles": {"0.9": 1.1**2, "0.99": None}}},
        }
        median = {
            "ratio_quantiles": {"0.5": 0.999, "0.99": 1.3},
            "by_phase": {"decode": {"ratio_quantiles": {"0.5": 0.998, "0.99": None}}},
        }
        near = {**median, "ratio_quantiles": {"0.5": 1.0 + 1e-9, "0.99": 1.3}}
        narrow = {
            "ratio_quantiles": {"0.9": 0.999, "0.99": 1.05},
            "by_phase": {"decode": {"ratio_quantiles": {"0.9": 1.2, "0.99": None}}},
        }
        cases = [(alone, 90.0, 1.1**2), (pooled, 90.0, 1.3**2), (median, 50.0, 1.3), (near, 50.0, 1.3)]
        for known, measured, factor in [*cases, (narrow, 90.0, 1.2)]:
            path = machine(cpu=fit_with(REFERENCE.tolist(), intervals=known)).paths["cpu"]
            level = level_for(path, 99.0, "decode")
            assert (level.percentile, level.measured) == (99.0, measured)
            assert level.at(1) == pytest.approx(factor)
        plan = make_plan(machine(cpu=fit_with(REFERENCE.tolist(), intervals=alone)), 50.0)
        assert plan.percentile == 99
        assert "from p90" in plan.warnings[0].message
        assert "at least 99" in plan.warnings[0].remedy

    def test_a_share_for_a_percentile_is_asked_about(self) -> None:
        with pytest.raises(WrongUsage) as error:
            make_plan(REFERENCE_MACHINE, 50.0, percentile=0.99)
        assert "from 1 on" in error.value.remedy

    def test_a_median_alone_is_no_percentile(self) -> None:
        path = machine(cpu=fit_with(REFERENCE.tolist(), intervals={"ratio_quantiles": {"0.5": 0.99}})).paths["cpu"]
        assert level_for(path, 99.0, "decode").percentile is None

    def test_limits_of_decode_and_of_prefill_are_their_own(self) -> None:
        """T = 2 + 0.01 S; decode steps stay below 1.1 times it, steps with prefill below 2 times."""
        known = {
            "ratio_quantiles": {"0.99": 1.5},
            "by_phase": {
                "decode": {"ratio_quantiles": {"0.99": 1.1}},
                "prefill or mixed": {"ratio_quantiles": {"0.99": 2.0}},
            },
        }
        plan = make_plan(machine(gpu=fit_with([2.0, 0.0, 0.01], "linear", intervals=known)), 5.0)
        found = {row.B: row.S_max for row in plan.S_at_B}
        assert found[8] == 50  # 2 (2 + 0.01 S) <= 5
        assert found[64] == 64  # S = B alone: 1.1 (2 + 0.64) <= 5, but 2 (2 + 0.65) > 5
        assert found[128] == 128
        assert 256 not in found  # 1.1 (2 + 2.56) = 5.016 > 5
        at_64 = [row.B_max for row in plan.B_at_S if row.S == 64]
        assert at_64 == [64]

    def test_limits_of_batch_sizes_are_their_own(self) -> None:
        """T = 2 + 0.01 S; steps of up to 16 requests take up to 3 times that, larger ones up to 1.1 times."""
        small, large = ({"ratio_quantiles": {"0.99": factor}} for factor in (3.0, 1.1))
        groups = [{"low": 1, "high": 16, **small}, {"low": 16, "high": 256, **large}]
        known = {"ratio_quantiles": {"0.99": 2.0}, "by_phase": {"decode": {**small, "by_batch": groups}}}
        path = machine(gpu=fit_with([2.0, 0.0, 0.01], "linear", intervals=known)).paths["gpu"]
        B = np.array([16.0, 17.0, 400.0])
        assert levels_for(path, 99.0).factors(B, B).tolist() == [3.0, 1.1, 1.1]
        plan = make_plan(machine(gpu=fit_with([2.0, 0.0, 0.01], "linear", intervals=known)), 5.0)
        assert {row.S: row.B_max for row in plan.B_at_S if row.S in (16, 32)} == {16: 15, 32: 32}  # 3 (2 + 0.16) > 5

    def test_the_promised_tokens_keep_the_sla_with_slow_draws(self) -> None:
        """T = 4 + k S: 30 ms take S = 26 / k, k = 0.1 or the 97.5 % quantile of its draws."""
        k = 0.1 * np.exp(np.random.default_rng(0).normal(0, 0.1, 200))
        drawn = {"parameters": ["tau_S"], "values": k[:, None].tolist()}
        plan = make_plan(machine(gpu=fit_with([4.0, 0.0, 0.1], "linear", draws=drawn)), 30.0)
        promised = int(26 / np.quantile(k, 0.975))
        found = {row.B: (row.S_max, row.S_promised) for row in plan.S_at_B}
        assert {found[B] for B in (1, 8, 128)} == {(260, promised)}
        assert found[256] == (260, None)  # not even the decode step of 256 tokens

    def test_the_context_that_is_assumed_is_said(self) -> None:
        theta = [2.0, 0.0, 1e-9, 1.0, 1.0, 1.0, 0.1, 0.02, 1e-4, 1e-4, 1e-4, 0.0, 0.0, 0.0, 0.0]
        domain = {"B": [1, 64], "S": [1, 4000], "context_tokens": [0, 1_000_000]}
        profile = machine(gpu=fit_with(theta, "context", domain=domain, typical={"context_tokens": 700.0}))
        assumed, given = (make_plan(profile, 20.0, request=PlanOptions(context=each)) for each in (None, 500.0))
        said = "gpu: planned at the trace's median context of 700 tokens a request."
        assert said in {each.message for each in assumed.warnings}
        assert said not in {each.message for each in given.warnings}

    def test_beyond_the_measured_range_is_marked(self) -> None:
        small = fit_with(REFERENCE.tolist(), domain={"B": [1, 256], "S": [1, 256]})
        plan = make_plan(machine(cpu=small), 30.0)
        assert all(row.extrapolated == (row.S_max is None or row.S_max > 256) for row in plan.S_at_B)
        assert "beyond the measured range" in plan.answer

    def test_out_of_reach_names_the_fastest_step(self) -> None:
        plan = make_plan(REFERENCE_MACHINE, 1.0)
        assert not plan.feasible
        assert plan.S_at_B == []
        grid_B, grid_S = np.meshgrid(np.arange(1.0, 257), np.arange(1.0, 4097))
        valid = grid_S >= grid_B
        least = REFERENCE_MACHINE.paths["cpu"].fit.latency_ms(grid_B[valid], grid_S[valid]).min()
        assert plan.fastest_ms == pytest.approx(least, rel=1e-3)
        assert make_plan(REFERENCE_MACHINE, plan.fastest_ms * 1.0001).feasible

    def test_a_flat_latency_has_no_upper_end(self) -> None:
        plan = make_plan(machine(cpu=line(5.0, 0.0)), 10.0)
        assert plan.feasible
        assert all(row.S_max is None for row in plan.S_at_B)
        assert "Every step" in plan.answer


class TestThresholds:
    def test_published_crossing(self) -> None:
        """AMX 2B against GPU 8 + 0.05B: equal at 4.10, so AMX up to 4 and the GPU from 5."""
        b1 = gpu_threshold(latency("amx", line(0, 2)), latency("gpu", line(8, 0.05)))
        assert b1.value == 5
        assert b1.wins == [(5, 256)]

    def test_amx_wins_only_in_a_middle_range(self) -> None:
        """theory: AMX .5 + 8/(1-e^(-.25B)) + .06B against GPU 9.5 + .03B: AMX for 11..33 only."""
        amx = fit_with([0.5, 8e9, 1.0, 1e9, 0.25, 50.0, 0.06, 0.0])
        b1 = gpu_threshold(latency("amx", amx), latency("gpu", line(9.5, 0.03)))
        assert b1.wins == [(1, 10), (34, 256)]
        assert "only for batches 1 to 10, 34 to 256" in b1.reason

    @pytest.mark.parametrize(("tau", "value", "word"), [(1000.0, None, "never"), (0.0, 1, "always")])
    def test_never_and_always(self, tau: float, value: int | None, word: str) -> None:
        b1 = gpu_threshold(latency("amx", line(0.01, 2)), latency("gpu", line(tau, 0.05)))
        assert b1.value == value
        assert word in b1.reason

    def test_amortised_batch_without_an_end_is_the_published_one(self) -> None:
        wide = line(8.0, 0.05, domain={"B": [1, 10**6], "S": [1, 10**6]})
        assert amortised_batch(latency("gpu", wide)).value == pytest.approx(160, abs=1)

    def test_one_path_only_is_null_with_the_reason(self) -> None:
        document = make_plan(REFERENCE_MACHINE, 20.0).to_json()
        assert not {"T_cut", "S_at_B", "B_at_S"} & set(document)
        for name in ("B1", "B2", "T_cut_ms"):
            assert document[name]["value"] is None
            assert "two execution paths" in document[name]["reason"]


class TestBadInput:
    def test_unusable_fit(self) -> None:
        broken = structs.replace(line(1, 1), status=FitStatus.TOO_FEW_ROWS)
        with pytest.raises(BadInput, match="not usable"):
            make_plan(machine(cpu=broken), 20.0)
