"""The version; imports nothing, so that `latfit --version` stays instant."""

__version__ = "0.1.0"
