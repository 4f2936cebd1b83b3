"""`RawBlock`: some rows of a log as they were written, before transforms and hashing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class RawBlock:
    """R rows of a log, only the columns that are asked for, features in the order of the spec."""

    dense: NDArray[np.float32]
    """[R, Fd], C-contiguous; NaN where a value is missing."""
    ids: tuple[NDArray[np.int64], ...]
    """For each sparse feature its raw 64-bit ids, all rows one after the other: integers as they are, text hashed by XXH64."""
    offsets: tuple[NDArray[np.int64], ...]
    """For each sparse feature [R + 1], first 0: row r owns ids[offsets[r] : offsets[r+1]]."""
    labels: NDArray[np.float32] | None = None
    """[R]."""
    weights: NDArray[np.float32] | None = None
    """Example weights [R]."""
    true_p: NDArray[np.float32] | None = None
    """True click probabilities [R]."""

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.dense.shape[0])
