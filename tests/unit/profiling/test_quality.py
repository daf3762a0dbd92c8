"""Warnings: raised where their cause is planted, silent where it is not."""

import numpy as np
import pytest
from scipy.stats import binom, kstest

from latfit.messages import Message as LatfitWarning
from latfit.profiling.host.machine import LoadReading, sensible_threads
from latfit.profiling.quality import compute_drift, find_symptoms, find_warnings
from latfit.profiling.result import ProfileResult
from tests.unit.profiling.fake_device import FakeDevice, FakeFaults
from tests.unit.profiling.planted import CELLS, codes, fake, run_fake, saturation_ms

RUNS = 100

CPUS = sensible_threads()  # a device without a number of threads uses all


def only(result: ProfileResult) -> LatfitWarning:
    """The one warning about unstable timing."""
    (found,) = (warning for warning in result.warnings if warning.code == "busy_machine")
    return found


class TestDrift:
    def test_without_drift_its_score_is_standard_normal(self) -> None:
        """So |z| > 3 has probability 0.0027: alarms stay within the 99.9 % quantile of that rate."""
        results = [run_fake(fake(noise=0.1, seed=seed), CELLS[:8], seed=seed, budget_s=1.5) for seed in range(RUNS)]
        assert kstest([compute_drift(result).z for result in results], "norm").pvalue > 0.001
        drifts = sum("from start to end" in str(find_symptoms(result)) for result in results)
        assert drifts <= binom.ppf(0.999, RUNS, 0.0027)

    @pytest.mark.parametrize("drift_per_s", [0.04, -0.02])
    def test_planted_drift_is_flagged_with_its_size(self, drift_per_s: float) -> None:
        device = fake(noise=0.01, faults=FakeFaults(drift_per_s=drift_per_s))
        result = run_fake(device, budget_s=8.0, precision=0.001)
        planted = drift_per_s * result.elapsed_s
        assert "from start to end" in only(result).message
        # log(1 + x) is not quite straight: a fifth covers the planted 16-32 %
        assert compute_drift(result).change == pytest.approx(planted, rel=0.2)


class TestUnstable:
    def test_hiccups_are_flagged(self) -> None:
        result = run_fake(fake(faults=FakeFaults(hiccup_rate=0.04)), precision=0.01)
        assert "busy_machine" in codes(result)
        assert any("1.5 times" in warning.message for warning in result.warnings)

    def test_a_quiet_machine_is_not(self) -> None:
        assert codes(run_fake(fake(noise=0.02))) == set()


class TestRepeats:
    def test_the_budget_it_names_would_do(self) -> None:
        """A run with twice the named budget reaches the precision almost everywhere: the guess has the right size."""
        short = run_fake(fake(noise=0.05), budget_s=3.0, precision=0.02)
        (warning,) = (warning for warning in short.warnings if warning.code == "few_data")
        named_s = float(warning.remedy.partition("--budget ")[2].partition("s")[0])
        long = run_fake(fake(noise=0.05, seed=1), budget_s=2 * named_s, precision=0.02)
        assert 3.0 < named_s < 300.0
        assert np.mean(long.within_precision) > 0.9


class TestLoad:
    def run(self, reading: LoadReading | None) -> set[str]:
        return codes(run_fake(fake(), load=reading))

    def test_others_on_our_cores_are_flagged(self) -> None:
        assert self.run(LoadReading(other_cpus=0.8, cpus=CPUS)) == {"busy_machine"}

    def test_fewer_threads_than_cpus_are_flagged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("latfit.profiling.quality.sensible_threads", lambda: 8)
        result = run_fake(fake())
        for threads, chosen, found in ((5, True, ["busy_machine"]), (8, True, []), (5, False, [])):
            device = {"threads": threads, "threads_idle": chosen}
            assert [each.code for each in find_warnings(result, None, device)] == found

    def test_others_on_spare_cores_are_not(self) -> None:
        assert self.run(LoadReading(other_cpus=0.8, cpus=CPUS + 1)) == set()
        assert self.run(LoadReading(other_cpus=0.02, cpus=CPUS)) == set()
        assert self.run(None) == set()


def test_all_symptoms_are_one_warning_with_a_remedy_and_other_load_explains_them() -> None:
    faults = FakeFaults(hiccup_rate=0.05, drift_per_s=0.2)
    result = run_fake(fake(noise=0.1, faults=faults), budget_s=8.0, precision=0.001)
    warnings = find_warnings(result, LoadReading(1.0, CPUS), {})
    assert [warning.code for warning in warnings] == ["busy_machine", "few_data"]
    unstable = only(result).message
    assert all(words in unstable for words in ("from start to end", "scatter", "1.5 times"))
    assert all(warning.message.endswith(".") and warning.remedy.endswith(".") for warning in warnings)


class TestProcesses:
    def run(self, factors: tuple[float, ...]) -> ProfileResult:
        """Processes whose steps take `factors` times the planted time."""

        def device(factor: float, seed: int) -> FakeDevice:
            return FakeDevice(lambda B, S: factor * saturation_ms(B, S), noise=0.005, seed=seed)

        return run_fake([device(factor, seed) for seed, factor in enumerate(factors)])

    def test_their_spread_is_found_and_flagged(self) -> None:
        result = self.run((float(np.exp(-0.1)), 1.0, float(np.exp(0.1))))
        assert result.between_processes is not None
        assert result.between_processes.processes == 3
        assert "between processes" in only(result).message

    def test_alike_ones_are_not(self) -> None:
        assert codes(self.run((1.0, 1.0, 1.0))) == set()
