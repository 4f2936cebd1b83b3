"""Kernels compile on their first call, so property tests in this folder have no deadline."""

from hypothesis import settings

settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")
