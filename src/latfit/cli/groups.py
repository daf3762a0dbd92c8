"""Options in groups: a verb takes a dataclass for each group, and the command line shows the options of all."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints


def takes_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb whose parameters named `..._options` are dataclasses of options, as a verb with these in their place."""
    own = inspect.signature(verb)
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: hints[name] for name in own.parameters if name.endswith("_options")}
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name]
            )
            for each in fields(groups[name])
        ]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]

    @functools.wraps(verb)
    def flat(**given: Any) -> None:
        grouped = {
            name: group(**{each.name: given.pop(each.name) for each in fields(group) if each.name in given})
            for name, group in groups.items()
        }
        verb(**given, **grouped)

    flat.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat
