"""Models by name. `NAME+moe` adds a cost that grows with S and saturates (see `context`)."""

from dataclasses import replace

from latfit.errors import WrongUsage, refuse_taken
from latfit.model.correction import CORRECTION
from latfit.model.formulas import CONSTANT, CONTEXT, HINGE, K_E, LINEAR, QUADRATIC, TAU_E, Saturation
from latfit.model.roofline import ROOFLINE
from latfit.model.term_model import LatencyModel, Separable

_PLAIN: tuple[LatencyModel, ...] = (
    CONSTANT,
    LINEAR,
    QUADRATIC,
    HINGE,
    Saturation(),
    Saturation(grows=True),
    CONTEXT,
    ROOFLINE,
)

MOE = "+moe"


def _with_experts(model: LatencyModel) -> Separable:
    table = model if isinstance(model, Separable) else Separable("", "", (), base=model, columns=model.columns)
    return replace(
        table,
        name=f"{model.name}{MOE}",
        formula=f"{model.formula} + tau_E*(1 - exp(-k_E*S))",
        terms=(*table.terms, TAU_E),
        shapes=(*table.shapes, K_E),
        columns=table.columns or ("S",),
    )


BUILT_IN: tuple[LatencyModel, ...] = (*_PLAIN, _with_experts(CONSTANT))  # whose terms the engine simulator compiles

FAMILY: dict[str, LatencyModel] = {model.name: model for model in _PLAIN} | {
    f"{model.name}{MOE}": _with_experts(model) for model in _PLAIN
}


def add_model(model: LatencyModel) -> None:
    """Register a model by its name, also with +moe, for `--model` and files. Raises WrongUsage for a name taken."""
    refuse_taken(model.name, FAMILY, "model")
    FAMILY.update({model.name: model, f"{model.name}{MOE}": _with_experts(model)})


def model_named(name: str) -> LatencyModel:
    """Return the model called `name`. Raises WrongUsage."""
    if name not in FAMILY:
        plain = ", ".join(known for known in FAMILY if not known.endswith(MOE))
        raise WrongUsage(
            f"no model is called {name!r}",
            where="--model",
            remedy=f"Choose one of: {plain}; each also with {MOE} or {CORRECTION}.",
        )
    return FAMILY[name]
