"""What prompts consist of, as recorded requests name it."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit.workload import read_requests


def lines(tokens: int, *, partial: bool, unit_s: bool = False) -> list[str]:
    """Forty prompts that begin alike, of blocks of `tokens`; partial: the last block is named though it is a part."""
    found = []
    for i in range(40):
        prompt = 3 * tokens + 7 * i
        count = -(-prompt // tokens) if partial else prompt // tokens
        names = [900, *range(1000 * i, 1000 * i + count - 1)]
        when = {"chat_id": i, "timestamp": 0.5 * i} if unit_s else {"timestamp": 500 * i}
        found.append(json.dumps({**when, "input_length": prompt, "output_length": 5, "hash_ids": names}))
    return found


@pytest.mark.parametrize("tokens", [16, 512])
@pytest.mark.parametrize("partial", [True, False])
def test_the_size_of_a_block_is_the_one_that_fits(tokens: int, partial: bool, tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    file.write_text("\n".join(lines(tokens, partial=partial)) + "\n")
    found = read_requests(file).requests
    assert found.prefix is not None
    assert found.prefix.tokens == tokens
    assert len(found.prefix.starts) == 41
    first = found.prefix.ids[found.prefix.starts[:-1]]
    assert set(first.tolist()) == {first[0]}
    assert len(set(found.prefix.ids.tolist())) == len(found.prefix.ids) - 39


@pytest.mark.parametrize("broken", [None, "a", 7, [[1], {}], [None]])
def test_a_broken_list_of_names_is_none(broken: object, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    row = {"input_length": 1000, "output_length": 2}
    rows = [{**row, "timestamp": i, "hash_ids": [1, 2 + i] if i else broken} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = read_requests(file).requests.prefix
    assert found is not None
    assert np.diff(found.starts).tolist() == [0] + [2] * 19


def test_rows_take_their_contents_along(tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    file.write_text("\n".join(lines(16, partial=True)) + "\n")
    requests = read_requests(file).requests
    for rows in (slice(3, 20, 4), np.array([1, 5, 30]), np.arange(40) % 3 == 0):
        some = requests.select(rows)
        assert requests.prefix is not None
        assert some.prefix is not None
        for new, old in enumerate(np.arange(40)[rows]):
            of_new = some.prefix.ids[some.prefix.starts[new] : some.prefix.starts[new + 1]]
            of_old = requests.prefix.ids[requests.prefix.starts[old] : requests.prefix.starts[old + 1]]
            assert of_new.tolist() == of_old.tolist()
    assert requests.at_rate(1.0).prefix is requests.prefix
