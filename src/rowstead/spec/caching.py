"""How a cache of embedding rows behaves: the stores and kernels implement these numbers, the planner models them."""

from __future__ import annotations

HALVING_BATCHES = 64
"""Batches after which the use counts of all rows are halved."""
MAX_USES = 255
"""The largest use count, which fits a byte."""
GROWTH = 1.25
"""Factor by which a cache grows beyond what is needed when its slots run out, so that it seldom grows."""

SETS_AHEAD = 2
"""Sets of batches that are fetched while the one before them is trained on, at most; on a CPU a set is one batch."""
SETS_IN_FLIGHT = SETS_AHEAD + 1
SET_IDS, MAX_SET = 1 << 24, 8
"""On a GPU a set has as many batches as hold about `SET_IDS` ids, at most `MAX_SET`: small batches then wait for the host less often."""

READ_BYTES, GAP_BYTES = 16 << 10, 4096
"""Largest size of one read of a file of rows, and the largest gap between two records that one read fetches."""
FILE_SPARE = 1.5
"""Length of a file of rows over the length of its records: a shorter file rewrites rows more often to free segments."""
