import sys

import pytest

from latfit.provenance import command_line, run_facts, utc_now


def test_time_is_utc() -> None:
    assert utc_now().endswith("+00:00")


def test_the_command_is_quoted_as_a_shell_would_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/latfit", "fit", "a b.parquet", "--where", "tp == 8"])
    assert command_line() == "latfit fit 'a b.parquet' --where 'tp == 8'"


def test_facts_name_the_seed_and_the_libraries() -> None:
    assert {"latfit", "command", "created", "seed", "python", "numpy", "scipy"} == set(run_facts(3))
