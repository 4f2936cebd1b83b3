"""Launches that take so little at a time that small tests need several programs, each of which goes round several times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from rowstead.kernels import places_gpu, row_maps_gpu


@contextlib.contextmanager
def few_at_a_time() -> Iterator[None]:
    fewest = 128 if torch.cuda.is_available() else 16
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(places_gpu, "IDS", 4)
        patched.setattr(places_gpu, "SAMPLES", (1, 2))
        patched.setattr(places_gpu, "MANY_IDS", 1)
        patched.setattr(places_gpu, "PLACES", fewest)
        patched.setattr(row_maps_gpu, "WORDS", fewest)
        patched.setattr(places_gpu, "MOST_PLACE_BLOCKS", 4)
        patched.setattr(row_maps_gpu, "MOST_WORD_BLOCKS", 4)
        yield
