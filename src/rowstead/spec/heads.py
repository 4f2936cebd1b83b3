"""Task heads: what a label means, which loss it is trained with, and which measure says how good predictions are.

The arithmetic of a head is in `nn/heads.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

HeadKind = Literal["bce", "mse"]


@dataclass(frozen=True, kw_only=True)
class HeadEntry:
    """One task head, named by its loss."""

    description: str
    """One line for the docs."""
    label_range: tuple[float, float]
    """Lowest and highest label."""
    measure: Literal["ne", "mse"]
    """The measure of an evaluation that early stopping follows; lower is better."""


HEADS: dict[HeadKind, HeadEntry] = {
    "bce": HeadEntry(description="binary cross-entropy on log-odds", label_range=(0.0, 1.0), measure="ne"),
    "mse": HeadEntry(description="squared error of the probability", label_range=(0.0, 1.0), measure="mse"),
}
assert tuple(HEADS) == get_args(HeadKind)
