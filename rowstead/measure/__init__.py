"""Measuring many runs: sweeps over a design space, studies of quality, and what a machine can do."""
