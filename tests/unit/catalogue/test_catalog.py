"""The catalogue: names, own entries, widened fits, and systems scaled from a planted roofline."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import latfit
from latfit.api import add_to_catalog, catalog
from latfit.catalogue import GPUS, CatalogEntry, all_entries, fit_of, nearest, scaled_steps, widen
from latfit.catalogue.scaling import roofline_ms, scale_times
from latfit.errors import BadInput, WrongUsage
from latfit.hardware import ExecutionPath
from latfit.model import FAMILY, FitResult, FitStatus, latency_draws, parameter_draws
from latfit.planning.fit_quality import quality_of_path
from latfit.trace import Trace
from tests.conftest import ROOT

SAMPLES = ROOT / "sample_traces"

B, S = (each.ravel().astype(float) for each in np.meshgrid([1, 2, 4, 8, 16, 32, 64], [1, 64, 256, 1024, 2048]))
S = np.maximum(B, S)


@pytest.fixture(scope="module")
def rtx4090() -> FitResult:
    return fit_of(all_entries()["rtx4090/llama-3.1-8b"])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LATFIT_CATALOG", str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.mark.parametrize("name", sorted(all_entries()))
def test_every_shipped_entry_is_a_usable_fit(name: str) -> None:
    entry = all_entries()[name]
    fit = fit_of(entry)
    assert fit.status.ok
    assert fit.cross_validation.mape_pct == pytest.approx(entry.error_pct, rel=1e-6)
    assert entry.licence
    assert entry.source
    assert tuple(fit.domain["B"]) == entry.B


def test_an_entry_predicts_the_steps_it_was_made_from(rtx4090: FitResult) -> None:
    trace = latfit.read(SAMPLES / "rtx4090_llama-3.1-8b.parquet").trace
    steps = {name: trace.floats(name) for name in ("B", "S", *rtx4090.columns) if name in trace}
    assert np.abs(rtx4090.latency_ms(**steps) / trace.floats("T_ms") - 1).mean() < 0.02


def test_a_name_nobody_knows_names_the_nearest() -> None:
    with pytest.raises(WrongUsage, match="no entry") as error:
        latfit.Fit.load("catalog:rtx490/llama-3.1-8b")
    assert "rtx4090/llama-3.1-8b" in error.value.remedy
    assert "`latfit catalog show`" in error.value.remedy


def test_a_fit_of_ones_own_is_found_by_its_name(own: Path, rtx4090: FitResult) -> None:
    added = add_to_catalog(rtx4090, name="rtx4090/mine@tp2")
    assert added.result["added"] == str(own / "rtx4090--mine@tp2.json")
    (shown,) = catalog("rtx4090/mine@tp2").to_json()["entries"]
    assert (shown["gpu"], shown["model"], shown["tp"]) == ("rtx4090", "mine", 2)
    assert latfit.Fit.load("catalog:rtx4090/mine@tp2").result.latency_ms(np.ones(1), np.ones(1)) > 0


def test_bad_names_and_damaged_entries_are_one_error(own: Path, rtx4090: FitResult) -> None:
    with pytest.raises(WrongUsage, match="is no name"):
        add_to_catalog(rtx4090, name="RTX 4090")
    own.mkdir()
    (own / "a--b.json").write_text('{"schema": "latfit.catalog/1", "name": "a/b"')
    with pytest.raises(BadInput, match=r"a--b\.json"):
        catalog("a/b")


def test_own_entries_need_a_folder(monkeypatch: pytest.MonkeyPatch, rtx4090: FitResult) -> None:
    monkeypatch.delenv("LATFIT_CATALOG", raising=False)
    with pytest.raises(WrongUsage, match="no folder"):
        add_to_catalog(rtx4090, name="rtx4090/mine")


def test_a_plan_calls_the_error_of_an_entry_assumed() -> None:
    found = quality_of_path(ExecutionPath("gpu", latfit.Fit.load("catalog:rtx4090/llama-3.1-8b").result))
    assert found.name == "catalog:rtx4090/llama-3.1-8b"
    assert found.error == "20 % off assumed, not measured on this machine"


@pytest.mark.parametrize("model", ["saturation", "saturation-gamma", "context", "roofline", "linear", "saturation+moe"])
def test_times_scale_by_a_factor(model: str) -> None:
    """Every model has parameter vectors of the same latencies times 1.3, at every step."""
    structure = FAMILY[model]
    names = tuple(each.name for each in structure.parameters)
    theta = np.array([0.5 if each.fixed is None else each.fixed for each in structure.parameters])
    fit = FitResult(model, FitStatus.CONVERGED, {})
    scaled = scale_times(fit, names, theta[None, :], np.array([1.3]))[0]
    columns = {name: np.ones(len(B)) for name in structure.columns} | {"B": B, "S": S}
    assert structure.latency_ms(scaled, columns) == pytest.approx(1.3 * structure.latency_ms(theta, columns))


def test_draws_and_limits_widen_by_the_error(rtx4090: FitResult) -> None:
    """The spread of the draws is that of a log-normal factor whose mean error is 20 %."""
    wide = widen(rtx4090, 0.2)
    steps = np.array([64.0]), np.array([64.0])
    draws, own = parameter_draws(wide), parameter_draws(rtx4090)
    assert draws is not None
    assert own is not None
    sd = math.sqrt(math.pi / 2) * math.log(1.2)
    spread = np.log(latency_draws(wide, draws, *steps)).std()
    assert spread == pytest.approx(math.hypot(sd, np.log(latency_draws(rtx4090, own, *steps)).std()), rel=0.1)
    narrow, limit = (fit.limits.pooled_factor("mixed", 0.95) for fit in (rtx4090, wide))
    assert narrow is not None
    assert limit == pytest.approx(math.exp(math.hypot(math.log(narrow), 1.6449 * sd)), rel=1e-3)
    assert wide.latency_ms(*steps) == pytest.approx(rtx4090.latency_ms(*steps))


def planted(gpu: str, weights: float, overhead_ms: float = 0.2) -> CatalogEntry:
    """An entry whose steps take a roofline's time, and a fixed overhead in proportion to reading the weights."""
    T = roofline_ms(GPUS[gpu], weights, 1, S) * (1 + overhead_ms)
    rng = np.random.default_rng(0)
    noisy = np.tile(T, 20) * np.exp(rng.normal(0, 0.01, 20 * len(T)))
    prefills = np.tile(S > B, 20).astype(float)
    columns = {"B": np.tile(B, 20), "S": np.tile(S, 20), "T_ms": noisy, "prefill_requests": prefills}
    columns["prefill_tokens"] = np.where(prefills > 0, columns["S"] - columns["B"] + 1, 0.0)
    fit = latfit.fit(Trace(columns), model="roofline").result
    return CatalogEntry(
        name=f"{gpu}/m{weights / 1e9:.0f}b",
        gpu=gpu,
        model="m",
        contents="kernels",
        B=(1, 64),
        S=(1, 2048),
        steps=len(noisy),
        error_pct=1.0,
        weights=weights,
        fit=fit.to_json(),
    )


def test_a_planted_roofline_scales_to_another_gpu_and_another_model() -> None:
    """The truth of both targets is known; the error is that of the fits."""
    entries = {each.name: each for each in (planted("h100", 8e9), planted("a100-80gb", 8e9), planted("h100", 3e9))}
    h100, a100, small = entries.values()
    for target in (a100, small):
        assert target.weights is not None
        scaled = scaled_steps(h100, target.gpu, target.weights, 1)
        T = fit_of(target).latency_ms(scaled["B"], scaled["S"])
        assert np.abs(scaled["T_ms"] / T - 1).mean() < 0.03
    assert nearest({h100.name: h100, small.name: small}, "h100", "m", 7e9, 1) is h100


def test_a_system_that_nobody_measured_is_scaled() -> None:
    scaled = latfit.Fit.load("catalog:h200/llama-3.2-3b")
    assert scaled.result.latency_ms(np.array([8.0]), np.array([8.0])) < latfit.Fit.load(
        "catalog:h100/llama-3.2-3b"
    ).result.latency_ms(np.array([8.0]), np.array([8.0]))
    assert scaled.warnings[0].code == "from_catalog"


def test_a_model_is_named_by_its_config(tmp_path: Path) -> None:
    """Reading 3.21 billion parameters takes 0.4 of the time of 8.03 billion on the same GPU."""
    config = {
        "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 128256,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    scaled = latfit.Fit.load(f"catalog:h200/{tmp_path / 'config.json'}").result
    one = np.ones(1)
    measured = fit_of(all_entries()["h200/llama-3.1-8b"]).latency_ms(one, one)
    assert scaled.latency_ms(one, one) / measured == pytest.approx(3.213 / 8.03, rel=0.05)


def test_a_plan_on_a_gpu_of_the_catalogue_is_supported() -> None:
    """The allowance for another machine is no misfit: the entry's own error is 0.9 %."""
    found = latfit.plan_engine(
        "catalog:h100/llama-3.1-8b", rate="20/s", lengths="500:200", ttft="500ms", tpot="50ms", replicas=1
    )
    assert found.feasible
    assert not found.result.unsupported
