"""Dense features that are far too large to learn from, found in the first batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LARGE = 1000.0
"""A root mean square above this, after a feature's transforms, is warned of; standardised features have 1."""


def scale_warning(dense: torch.Tensor, names: Sequence[str]) -> str | None:
    """A sentence about the features of dense [B, Fd] whose values are too large; None if none are."""
    if not dense.numel():
        return None
    sizes = dense.double().square().mean(dim=0).sqrt().tolist()
    large = sorted(((size, name) for size, name in zip(sizes, names, strict=True) if not size <= LARGE), reverse=True)
    if not large:
        return None
    size, name = large[0]
    more = f" (and of {len(large) - 1} more dense features)" if len(large) > 1 else ""
    return (
        f"values of dense feature `{name}` are around {size:.2g}{more}, so that training may diverge: set `standardise: true`, with "
        "`log: true` for a long tail, or list it under features.sparse if it contains ids"
    )
