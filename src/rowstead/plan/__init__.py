"""Predict a run before it starts: memory, time and energy on a machine, and the best placement. Needs no torch."""
