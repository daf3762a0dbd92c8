"""Measuring steps of a transformer on this machine."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.profiling.devices.numpy_device import NumpyDevice as NumpyDevice
    from latfit.profiling.grid import (
        ProfileRequest as ProfileRequest,
        parse_contexts as parse_contexts,
        parse_cpus as parse_cpus,
    )
    from latfit.profiling.host.inventory import Inventory as Inventory, inventory as inventory
    from latfit.profiling.host.machine import LoadWatch as LoadWatch, usable_cpus as usable_cpus
    from latfit.profiling.journal import Journal as Journal, journal_of as journal_of
    from latfit.profiling.result import ProfileResult as ProfileResult
    from latfit.profiling.run import (
        Announcement as Announcement,
        PathOutcome as PathOutcome,
        measure as measure,
    )
    from latfit.profiling.sampler import Progress as Progress
    from latfit.profiling.shapes import StepShape as StepShape, model_shape as model_shape, read_config as read_config

__all__, __getattr__, __dir__ = face(__name__, __file__)
