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
    measure: Literal["ne", "mse"]
    """The measure of an evaluation that early stopping follows; lower is better."""


LABEL_RANGE = (0.0, 1.0)
"""Smallest and largest label. All heads predict a probability, so they share it; the reader refuses other labels."""

HEADS: dict[HeadKind, HeadEntry] = {
    "bce": HeadEntry(description="binary cross-entropy on log-odds", measure="ne"),
    "mse": HeadEntry(description="squared error of the probability", measure="mse"),
}
assert tuple(HEADS) == get_args(HeadKind)
