"""Kernels with blocks so small that small tests need several programs, each with several iterations."""

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
        patched.setattr(cache_slots, "SLOTS", fewest)
        patched.setattr(bitmaps, "WORDS", fewest)
        patched.setattr(cache_slots, "MAX_SLOT_BLOCKS", 4)
        patched.setattr(bitmaps, "MAX_WORD_BLOCKS", 4)
        yield
