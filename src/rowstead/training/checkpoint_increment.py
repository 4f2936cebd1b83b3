"""Incremental checkpoints: which rows they hold, and how these are written.

After Check-N-Run (Eisenman et al., 2022): only the rows that were touched since the last full checkpoint are saved. Everything else
that training changes is small, and saved each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rowstead.spec.train import CheckpointFormat
from rowstead.stores.state import StatePart, take_rows
from rowstead.training.checkpoint_files import TensorPiece, encode, piece_of_tensor, saves_bytes, stored_as
from rowstead.training.saved_tensors import TOUCHED
from rowstead.training.touched import RowBitmap


@dataclass(frozen=True, kw_only=True)
class Increment:
    """What an incremental checkpoint holds: the rows that differ from a full one in the same folder."""

    base: str
    """Name of the full checkpoint."""
    number: int
    """Incremental checkpoints since the full one, including this."""
    touched: dict[str, RowBitmap]
    """Touched rows by table, the same in all processes of a job."""
    encoding: CheckpointFormat = "exact"


def touched_bitmaps(increment: Increment) -> list[TensorPiece]:
    """Bitmaps of the rows of each table that an incremental checkpoint holds."""
    return [piece_of_tensor(f"{TOUCHED}{table}", torch.from_numpy(rows.bits)) for table, rows in increment.touched.items()]


def piece_of_touched_rows(name: str, part: StatePart, max_rows: int, increment: Increment) -> TensorPiece:
    """The touched rows of a part, as a piece of a tensor of all touched rows of the table.

    Optimizer state is always exact: a sum of squares rounded to zero would make the next step far too large.
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
        return encode(encoding, take_rows(part, bits.at(before + start, before + stop) - part.first_row))

    return TensorPiece(
        name=name,
        dtype=part.dtype,
        shape=(bits.count, part.shape[1]),
        num_rows=after - before,
        row_shape=(width,),
        read=read,
        first_row=before,
        columns=None if columns == (0, part.shape[1]) else columns,
        stored_dtype=stored_dtype,
        max_rows=max_rows,
        notes={"touched": f"{TOUCHED}{table}", "encoding": encoding},
    )
