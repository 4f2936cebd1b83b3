"""Incremental checkpoints: which rows they hold, how these are written, and when a full one is due.

After Check-N-Run (Eisenman et al., 2022): of the tables, only the rows that were touched since the last full checkpoint are
saved. Everything else that training changes is small, and saved whole each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rowstead.spec.train import CheckpointFormat
from rowstead.stores.state import StatePart, taken
from rowstead.training.checkpoint_encoding import encode, saves_bytes, stored_as
from rowstead.training.checkpoint_files import Outgoing, of_tensor
from rowstead.training.saved_tensors import TOUCHED
from rowstead.training.touched import RowBits


@dataclass(frozen=True, kw_only=True)
class Increment:
    """What an incremental checkpoint is: the rows that differ from a full one in the same folder."""

    base: str
    """Name of the full checkpoint."""
    number: int
    """How many incremental ones, this included, there were since."""
    touched: dict[str, RowBits]
    """By table, the same in all processes of a job."""
    encoding: CheckpointFormat = "exact"


def of_touched(increment: Increment) -> list[Outgoing]:
    """The bitmaps that say which rows of each table an incremental checkpoint holds."""
    return [of_tensor(f"{TOUCHED}{table}", torch.from_numpy(rows.bits)) for table, rows in increment.touched.items()]


def of_touched_rows(name: str, part: StatePart, most_rows: int, increment: Increment) -> Outgoing:
    """The touched rows of a part, side by side: a tensor of as many rows as were touched in the whole table.

    The optimizer's state is always exact: a sum of squares that was rounded to zero would make the next step a leap.
    """
    table, _, what = part.name.rpartition(".")
    bits = increment.touched[table]
    before, after = bits.position(part.first_row), bits.position(part.first_row + part.num_rows)
    encoding = increment.encoding
    if what != "rows" or not saves_bytes(encoding, part.dtype, part.shape[1]):
        encoding = "exact"
    stored_dtype, width = stored_as(encoding, part.dtype, part.num_columns)
    columns = part.first_column, part.first_column + part.num_columns

    def read(start: int, stop: int) -> Tensor:
        return encode(encoding, taken(part, bits.at(before + start, before + stop) - part.first_row))

    return Outgoing(
        name=name,
        dtype=part.dtype,
        shape=(bits.count, part.shape[1]),
        num_rows=after - before,
        row_shape=(width,),
        read=read,
        first_row=before,
        columns=None if columns == (0, part.shape[1]) else columns,
        stored_dtype=stored_dtype,
        most_rows=most_rows,
        notes={"touched": f"{TOUCHED}{table}", "encoding": encoding},
    )
