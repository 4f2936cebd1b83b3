"""Task heads: what a label means, which loss it is trained with, and which measure says how good predictions are.

A new head is an entry here and its arithmetic in `nn/heads.py`; one with a measure of its own also adds it to `training/metrics.py`, to
`Monitor` in `spec/train.py`, and to the tables of `cli/console.py` and `report/page.py`.
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
    is_log_loss: bool
    """Whether the training loss is the log loss, so that it can be stated as NE."""


LABEL_RANGE = (0.0, 1.0)
"""Smallest and largest label. All heads predict a probability, so they share it; the reader refuses other labels."""

HEADS: dict[HeadKind, HeadEntry] = {
    "bce": HeadEntry(description="binary cross-entropy on log-odds", measure="ne", is_log_loss=True),
    "mse": HeadEntry(description="squared error of the probability", measure="mse", is_log_loss=False),
}
assert tuple(HEADS) == get_args(HeadKind)
