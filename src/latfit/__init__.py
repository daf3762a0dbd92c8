"""latfit: from measured inference steps to a latency model, and from the model to decisions.

The package imports nothing heavy by itself; each room is imported by name (`from latfit.fitting import fit_trace`).
"""

from latfit._version import __version__

__all__ = ["__version__"]
