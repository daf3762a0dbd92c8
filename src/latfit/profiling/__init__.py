"""Measuring steps of a transformer on this machine."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.profiling.devices.numpy_device import NumpyDevice
    from latfit.profiling.grid import ProfileRequest, parse_contexts, parse_cpus
    from latfit.profiling.host.inventory import Inventory, inventory
    from latfit.profiling.host.machine import LoadWatch, usable_cpus
    from latfit.profiling.journal import Journal, journal_of
    from latfit.profiling.result import ProfileResult
    from latfit.profiling.run import Announcement, PathOutcome, measure
    from latfit.profiling.sampler import Progress
    from latfit.profiling.shapes import StepShape, model_shape, read_config

__all__, __getattr__, __dir__ = face(__name__, __file__)
