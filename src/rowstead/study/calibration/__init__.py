"""Measures this machine and the parts of a training step on it."""
