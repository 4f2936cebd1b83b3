"""The kernel of a cache in GPU memory that swaps rows over the bus.

One launch reads rows from pinned system memory and writes others back at the same time, which keeps both directions of
the bus busy. It runs in few programs, so that training continues beside it. Rows should be in ascending order: the GPU then touches
fewer pages.

Letters: N rows, P slots, D width, n and m rows that move.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS, BYTES_PER_TURN, TURNS, WARPS = 12, 8192, 6, 8
"""Programs that move rows, bytes of one turn in each direction, turns in flight, and warps per program: just enough to keep both
directions of the bus busy. More slow down whatever runs beside them: M3's step takes 7.6 ms, 8.1 with 16 programs and 10.4 with 32."""
MAX_ROWS, MAX_PROGRAMS = 256, 4096
"""Rows per turn, and programs where rows do not cross the bus."""
MAX_BYTES = 96 << 10
"""Bytes that a program has in flight at most, which fit the GPU's shared memory whatever the width of rows."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def swap_rows(
    fast: Tensor,
    backing: Tensor,
    in_rows: Tensor,
    in_slots: Tensor,
    out_rows: Tensor,
    out_slots: Tensor,
    *,
    over_bus: bool = True,
) -> None:
    """Write `fast[out_slots]` to `backing[out_rows]` and `backing[in_rows]` to `fast[in_slots]`.

    fast [P, D]; backing [N, D], which is system memory if rows go `over_bus`; the others int64 [n] or [m], without repetition.
    `in_slots` and `out_slots` are equal as far as both go, and the rest of the longer one is disjoint from the other.
    """
    num_in, num_out = in_rows.numel(), out_rows.numel()
    if not num_in and not num_out:
        return
    row_bytes = fast.shape[1] * fast.element_size()
    word = next(size for size in (8, 4, 2) if row_bytes % size == 0 and size <= max(4, fast.element_size()))
    width = row_bytes // word
    block = triton.next_power_of_2(width)
    rows = max(1, min(MAX_ROWS, BYTES_PER_TURN // (block * word)))
    programs = min(PROGRAMS if over_bus else MAX_PROGRAMS, triton.cdiv(max(num_in, num_out), rows))
    turns = max(1, min(TURNS, MAX_BYTES // (2 * rows * block * word)))
    _swap[(programs,)](
        fast.view(_WORDS[word]), backing.view(_WORDS[word]), in_rows, in_slots, out_rows, out_slots, num_in, num_out,
        max(num_in, num_out), WIDTH=width, D=block, R=rows, STAGES=turns, num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_in", "num_out", "most"])
def _swap(fast, backing, in_rows, in_slots, out_rows, out_slots, num_in, num_out, most, WIDTH: tl.constexpr, D: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    column = tl.arange(0, D)[None, :]
    # Reads of later turns are in flight while a turn writes. No slot is read after its new row was written: no other turn has it,
    # and its own turn has read both rows by then.
    for start in tl.range(tl.program_id(0) * R, most, tl.num_programs(0) * R, num_stages=STAGES):
        turn = start + tl.arange(0, R)[:, None]
        comes, goes = turn < num_in, turn < num_out
        from_row = tl.load(in_rows + turn, mask=comes, other=0)
        from_slot = tl.load(out_slots + turn, mask=goes, other=0)
        ins, outs = comes & (column < WIDTH), goes & (column < WIDTH)
        new = tl.load(backing + from_row * WIDTH + column, mask=ins, other=0)
        old = tl.load(fast + from_slot * WIDTH + column, mask=outs, other=0)
        to_slot = tl.load(in_slots + turn, mask=comes, other=0)
        to_row = tl.load(out_rows + turn, mask=goes, other=0)
        tl.store(backing + to_row * WIDTH + column, old, mask=outs)
        tl.store(fast + to_slot * WIDTH + column, new, mask=ins)
