"""latfit: from measured inference steps to a latency model, and from the model to decisions.

    fit = latfit.fit("server.log")              what a step of B requests and S tokens takes, and how sure that is
    fit.predict(B=[8, 32], S=512)               a DataFrame

Names are loaded when they are first used; `import latfit` itself loads nothing heavy.
"""

from typing import TYPE_CHECKING

from latfit._face import face
from latfit._version import __version__

if TYPE_CHECKING:
    from latfit.api import (
        Comparison as Comparison,
        Evaluation as Evaluation,
        Fit as Fit,
        Hardware as Hardware,
        Plan as Plan,
        Profile as Profile,
        Report as Report,
        Simulation as Simulation,
        Validation as Validation,
        compare as compare,
        export as export,
        fit as fit,
        fit_each as fit_each,
        plan as plan,
        plan_engine as plan_engine,
        profile as profile,
        read as read,
        report as report,
        simulate as simulate,
        simulate_engine as simulate_engine,
        step_budget as step_budget,
        tune as tune,
        validate as validate,
    )
    from latfit.errors import LatfitError as LatfitError
    from latfit.trace import Trace as Trace

__all__, __getattr__, __dir__ = face(__name__, __file__)
__all__ += ["__version__"]
