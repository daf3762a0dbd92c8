"""Settings for serving engines, from a plan: files in which every number says where it comes from."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.exporting.engines import start_line, vllm_flags, with_flags
    from latfit.exporting.facts import Exported as Exported, PlanFacts as PlanFacts, Wanted as Wanted, read_plan
    from latfit.exporting.targets import TARGETS, Target as Target, add_target as add_target, export_plan

__all__, __getattr__, __dir__ = face(__name__, __file__)
