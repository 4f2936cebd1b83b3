"""Launches that take so little at a time that small tests need several programs, each of which goes round several times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def few_at_a_time() -> Iterator[None]:
    from rowstead.kernels.gpu import bitmaps, cache_slots

    fewest = 128 if torch.cuda.is_available() else 16
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cache_slots, "IDS", 4)
        patched.setattr(cache_slots, "SAMPLES", (1, 2))
        patched.setattr(cache_slots, "MANY_IDS", 1)
        patched.setattr(cache_slots, "PLACES", fewest)
        patched.setattr(bitmaps, "WORDS", fewest)
        patched.setattr(cache_slots, "MOST_PLACE_BLOCKS", 4)
        patched.setattr(bitmaps, "MOST_WORD_BLOCKS", 4)
        yield
