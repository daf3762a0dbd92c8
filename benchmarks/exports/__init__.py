"""Exported settings in the hands of the programs that they are for."""

from benchmarks.exports.run import main as main
