"""Reading measured runs: the shapes that are known, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from latfit.errors import BadInput
from latfit.validation.measured import read_measured

HEAD = "t_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n"


def written(folder: Path, text: str) -> Path:
    target = folder / "run.csv"
    target.write_text(text)
    return target


def test_moments_count_from_the_first_arrival(tmp_path: Path) -> None:
    run = read_measured(written(tmp_path, HEAD + "100.0,8,3,100.5,101.0\n100.25,9,1,101.5,101.5\n"))
    np.testing.assert_allclose(run.requests.arrival_ms, [0.0, 250.0])
    np.testing.assert_allclose(run.first_ms, [500.0, 1500.0])
    np.testing.assert_allclose(run.last_ms, [1000.0, 1500.0])


@pytest.mark.parametrize(("unit", "scale"), [("s", 1e-3), ("ms", 1.0)])
def test_spans_count_from_each_arrival(tmp_path: Path, unit: str, scale: float) -> None:
    head = f"arrived_at,num_prefill_tokens,num_decode_tokens,ttft_{unit},latency_{unit}\n"
    run = read_measured(written(tmp_path, head + f"2.0,8,3,{500 * scale},{900 * scale}\n"))
    np.testing.assert_allclose([run.first_ms[0], run.last_ms[0]], [500.0, 900.0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD, "no request"),
        (HEAD.replace("first_token_s", "began_s") + "0,1,1,1,1\n", "nothing says when tokens came"),
        (HEAD.replace("t_s,", "when,", 1) + "0,1,1,1,1\n", "no column t_s"),
        (HEAD + "0,1,1,1,1\n5,1,1,4,6\n", "request 2 has a first token before"),
        (HEAD + "0,1,1,2,1\n", "request 1"),
        (HEAD + "0,1,1,1,\n", "request 1"),
        (HEAD + "3,1,1,4,5\n2,1,1,4,5\n", "arriv"),
        (HEAD + "3,0,1,4,5\n", "request 1"),
        (HEAD + "3,4,0,4,5\n", "request 1"),
    ],
)
def test_what_is_no_measured_run_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        read_measured(written(tmp_path, text))
    assert "run.csv" in str(caught.value)
