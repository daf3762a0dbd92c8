"""The models by name. A new model is one file and one line here."""

from collections.abc import Mapping

from latfit.errors import WrongUsage
from latfit.model.baselines import CONSTANT, LINEAR
from latfit.model.saturation import Saturation
from latfit.model.terms import LatencyModel

FAMILY: Mapping[str, LatencyModel] = {
    "constant": CONSTANT,
    "linear": LINEAR,
    "saturation": Saturation(),
}


def model_named(name: str) -> LatencyModel:
    """The structure called `name`. Raises WrongUsage with the names there are."""
    if name not in FAMILY:
        raise WrongUsage(f"no model is called {name!r}", where="--model", remedy=f"Choose one of: {', '.join(FAMILY)}.")
    return FAMILY[name]
