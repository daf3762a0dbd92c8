"""What a request declares holds of the library and of the command line."""

import inspect
from dataclasses import MISSING, fields, replace
from itertools import pairwise
from typing import Any

import pytest

import latfit
from latfit.api import requests
from latfit.api.request import Option, Request, check, declared, given_in, option_of
from latfit.errors import WrongUsage
from tests.docs.reference import commands, options

KNOWN = [each for each in vars(requests).values() if inspect.isclass(each) and issubclass(each, Request)]
REQUESTS = [each for each in KNOWN if not each.__subclasses__()]
COMMANDS = dict(commands())
MOST_SHOWN, MOST_OPTIONS = 12, 215
EXCLUSIVE = [(each, pair) for each in REQUESTS for group in each.exclusive() for pair in pairwise(group)]
NEEDY = [(each, name) for each in REQUESTS for name in each.needed()]


def given(request: type, *names: str) -> Any:
    """A request with these fields, and those without a default, given."""
    required = {each.name for each in fields(request) if each.default is MISSING}
    return request(**{name: ["given"] for name in {*required, *names}})


@pytest.mark.parametrize("request_", REQUESTS)
def test_names_are_those_of_fields_and_every_field_is_explained(request_: type[Request]) -> None:
    found = {each.name: each for each in declared(request_)}
    needed = request_.needed()
    named = {*request_.SHOWN.split(), *needed, *(name for group in request_.exclusive() for name in group)}
    named |= {name for others in needed.values() for name in others}
    own = {name for name in named if name not in found}
    assert own <= {"out", "strict", "figure"}  # options of the command alone
    assert all(each.text for each in found.values() if each.option is not None)


@pytest.mark.parametrize(("request_", "pair"), EXCLUSIVE)
def test_contradictions_are_refused_by_name(request_: type[Request], pair: tuple[str, str]) -> None:
    with pytest.raises(WrongUsage, match="contradict") as caught:
        check(given(request_, *pair))
    assert all(option_of(request_, name) in str(caught.value) for name in pair)


@pytest.mark.parametrize(("request_", "name"), NEEDY)
def test_what_has_no_effect_is_told_once(
    request_: type[Request], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = replace(given(request_, name), seed=1) if name == "seed" else given(request_, name)
    if not set(request_.needed()[name]) & given_in(alone):
        check(alone)
        assert capsys.readouterr().err.count(f"note: {option_of(request_, name)} has no effect") == 1


def test_options_are_few() -> None:
    known = {id(each.option) for request in REQUESTS for each in declared(request) if each.option}
    assert len(known) <= MOST_OPTIONS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_few_options(name: str) -> None:
    assert len([each for each in options(COMMANDS[name]) if not each.hidden]) <= MOST_SHOWN


def test_a_verb_has_the_signature_of_its_request() -> None:
    found = inspect.signature(latfit.plan)
    assert list(found.parameters)[:3] == ["paths", "sla", "rate"]
    assert found.parameters["percentile"].annotation == float | str  # no metadata of the command line
    assert "percentile\n    Percentile of steps or responses" in (latfit.plan.__doc__ or "")
    assert not any(isinstance(each.annotation, Option) for each in found.parameters.values())
