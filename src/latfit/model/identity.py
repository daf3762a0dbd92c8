"""What a fit remembers of the system that its steps were measured on."""

from latfit.model.fit_result import FitResult
from latfit.trace import Trace, identity_of


def fitted_identity(fit: FitResult) -> dict[str, str]:
    """What a fit remembers of the system that its steps were measured on."""
    if "identity" in fit.provenance:
        return dict(fit.provenance["identity"])
    known = identity_of(Trace({}, fit.provenance.get("trace", {})))
    return {**known, **{name: str(value) for name, value in fit.data.more.get("system", {}).items()}}
