"""CPU kernels, in Numba."""
