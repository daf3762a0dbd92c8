"""`latfit plan`: ten-odd lines, the contract, what makes an impossible plan possible, exit codes, files."""

import json
import re
from pathlib import Path

import pytest

from latfit.cli.app import run
from latfit.files import write_json
from latfit.hardware.profile import HardwareProfile
from latfit.messages import Message as LatfitWarning
from latfit.trace.parquet import write_trace
from tests.conftest import planted_trace
from tests.unit.planning.test_plan import fit_with, line, machine

Captured = pytest.CaptureFixture[str]
SMALL = {"B": [1, 64], "S": [1, 64]}


def latfit(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


def keep(folder: Path, profile: HardwareProfile) -> Path:
    write_json(folder / "hardware.json", profile.to_json())
    return folder


@pytest.fixture
def both(in_tmp: Path) -> Path:
    return keep(in_tmp, machine(amx=line(0, 2, domain=SMALL), gpu=line(12, 0.05, domain=SMALL)))


@pytest.fixture
def gpu(in_tmp: Path) -> Path:
    return keep(in_tmp, machine(gpu=line(4, 0.1, domain=SMALL)))


def test_a_plan_that_its_data_do_not_support_gives_no_command_and_ends_with_4(in_tmp: Path, capsys: Captured) -> None:
    blind = [LatfitWarning("no_better_than_constant", "Size does not matter.", "Measure more sizes.")]
    keep(in_tmp, machine(gpu=line(4, 0.1, domain=SMALL, warnings=blind)))
    assert latfit("plan", "--sla", "20ms") == 4
    told = capsys.readouterr()
    assert "vllm serve" not in told.out
    assert "not supported by these data: on gpu a constant" in told.err


def test_the_default_is_the_decision_and_fits_a_terminal(both: Path, capsys: Captured) -> None:
    assert latfit("plan", "--sla", "20ms", "--rate", "100/s") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 16
    told = " ".join(text.split())
    assert told.startswith("Serve 100 req/s of 1 token each with amx, greedy batches: p99 response ")
    thresholds = r"B1 = \d+ with the wait at this rate; B2 = \d+; T_cut = 8\.\d+ ms \(by simulation\)"
    assert re.search(thresholds + r" 1 replica needed. Capacity [\d.]+ req/s", told)
    assert re.search(r"vLLM on amx: vllm serve --max-num-seqs \d+", told)  # the path that serves the load
    assert "Next: latfit report --sla 20ms --rate 100/s" in told


def test_verbose_shows_every_table_and_what_is_assumed(both: Path, capsys: Captured) -> None:
    assert latfit("plan", "--sla", "20ms", "--rate", "100/s", "-v") == 0
    text = capsys.readouterr().out
    for caption in ("Strategies for 100 req/s", "Thresholds for a scheduler", "in the event simulation", "Poisson"):
        assert caption in text


@pytest.mark.parametrize(
    ("arguments", "code", "state"),
    [(("20ms",), 0, "good"), (("1ms",), 5, "bad"), (("20ms", "--laws-only"), 0, "doubt")],
)
def test_the_verdict_has_its_colour_on_a_terminal(
    arguments: tuple[str, ...], code: int, state: str, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert latfit("hardware", "add", "amx", "--nominal", "p50=1.3863ms") == 0
    said: list[tuple[str, str]] = []
    monkeypatch.setattr("latfit.cli.output.verdict", lambda text, state: said.append((text, state)))
    assert latfit("plan", "--rate", "100/s", "--sla", *arguments) == code
    assert [found for _, found in said] == [state]


def test_without_a_rate_the_engine_follows_the_thresholds(in_tmp: Path, capsys: Captured) -> None:
    keep(in_tmp, machine(gpu=fit_with([4.0, 0.1, 0.01], "linear", domain={"B": [1, 64], "S": [1, 4096]})))
    assert latfit("plan", "--sla", "8ms", "--json") == 0
    sequences = json.loads(capsys.readouterr().out)["engines"]["vllm"]["max_num_seqs"]
    assert 4 + 0.1 * sequences + 0.01 * (sequences + 128) <= 8
    assert latfit("plan", "--sla", "8ms") == 0
    assert f"vLLM on gpu: vllm serve --max-num-seqs {sequences}" in capsys.readouterr().out


def test_a_wait_and_a_transfer_move_B1(both: Path, capsys: Captured) -> None:
    values = []
    for extra in ((), ("--transfer", "4ms"), ("--transfer", "8ms")):
        assert latfit("plan", "--sla", "20ms", *extra, "--json") == 4  # the largest step was not measured
        values.append(json.loads(capsys.readouterr().out)["B1"]["value"])
    assert values == [7, 9, 11]  # ceil((12 + extra)/1.95)


class TestWhatWouldMakeItPossible:
    def test_a_longer_sla(self, gpu: Path, capsys: Captured) -> None:
        assert latfit("plan", "--sla", "1ms", "--rate", "10/s", "--tokens-per-request", "1") == 5
        assert "at least 4.1 ms" in capsys.readouterr().err

    def test_no_rate_at_all(self, in_tmp: Path, capsys: Captured) -> None:
        """A single step meets the SLA, but one in a hundred of the AMX's exponential services never does."""
        keep(in_tmp, machine(amx=line(0, 2, domain={"B": [1, 1], "S": [1, 1]})))
        assert latfit("plan", "--sla", "1.9ms", "--rate", "1/s", "--tokens-per-request", "1") == 5
        assert "at least 2 ms" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--rate", "0/s"], 2),
        (["--rate", "500"], 2),
        (["--rate", "5/s", "--arrivals", "a.csv"], 2),
        (["--replicas", "0"], 2),
        (["--set", "max_batch=0"], 2),
        (["--context", "-1"], 2),
        (["--transfer", "3"], 2),
        (["--prompt-tokens", "0"], 2),
        (["--percentile", "100"], 2),
        (["--tokens-per-request", "65"], 3),
        (["--arrivals", "none.csv"], 3),
        (["--hardware", "none.json"], 3),
    ],
)
def test_what_a_user_gets_wrong(arguments: list[str], code: int, gpu: Path, capsys: Captured) -> None:
    assert latfit("plan", "--sla", "20ms", *arguments) == code
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert len(told.strip().splitlines()) >= 2


def test_a_file_a_picture_and_a_page(both: Path, capsys: Captured) -> None:
    files = ("--out", "plan.json", "--report", "page")
    assert latfit("plan", "--sla", "20ms", "--rate", "100/s", "--laws-only", *files, "--json") == 0
    assert json.loads((both / "plan.json").read_text()) == json.loads(capsys.readouterr().out)
    assert "Serve 100" in (both / "page" / "report.html").read_text()


def test_a_transfer_has_a_part_for_each_token(both: Path, capsys: Captured) -> None:
    """2 ms + 4 tokens of 0.5 ms are 4 ms."""
    values = []
    for transfer in ("2ms+0.5ms", "4ms"):
        options = ("--tokens-per-request", 4, "--transfer", transfer)
        assert latfit("plan", "--sla", "20ms", *options, "--json") == 4  # the largest step was not measured
        values.append(json.loads(capsys.readouterr().out)["B1"]["value"])
    assert values[0] == values[1] is not None


def test_a_rate_needs_lengths_where_steps_depend_on_them(in_tmp: Path, capsys: Captured) -> None:
    write_trace(Path("steps.parquet"), planted_trace(0.03))
    assert latfit("fit", "steps.parquet", "--model", "saturation", "--path", "gpu") == 0
    capsys.readouterr()
    assert latfit("plan", "--sla", "50ms", "--rate", "5/s") == 2
    assert "--lengths 1000:250" in capsys.readouterr().err
    assert latfit("plan", "--sla", "50ms", "--rate", "5/s", "--tokens-per-request", "1", "--json") in (0, 5)
