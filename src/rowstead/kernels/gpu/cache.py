"""What a cache in a GPU's memory does there: names the rows that a batch needs, and swaps rows over the bus.

Rows are swapped in one launch: lanes read rows from page-locked system memory and write others back at the same time, so both
directions of the bus are busy; few programs do it, so that training beside them goes on. Rows should come in rising order: the
GPU then finds them in fewer pages.

Letters: B examples, F features, N rows, P places, D width, n and m rows that move, nnz ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS, BYTES_A_TURN, TURNS, WARPS = 12, 8192, 6, 8
"""Programs that move rows, what each has in a turn in each direction, turns that it has under way, and its warps: just enough to
keep both directions of a bus busy. With more, all that runs beside them waits for memory: M3's step 8.1 ms by 16 programs and 10.4 by 32
instead of 7.6."""
MOST_ROWS, MOST_PROGRAMS = 256, 4096
"""Of a turn, and where no bus is in the way."""
MOST_BYTES = 96 << 10
"""That a program has under way at most, whatever the width of rows: GPUs have room for so much near their cores."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def swap_rows(
    fast: Tensor,
    behind: Tensor,
    in_rows: Tensor,
    in_places: Tensor,
    out_rows: Tensor,
    out_places: Tensor,
    *,
    over_bus: bool = True,
) -> None:
    """Write `fast[out_places]` to `behind[out_rows]` and `behind[in_rows]` to `fast[in_places]`.

    fast [P, D]; behind [N, D], memory as the GPU sees it, which is the system's if rows go `over_bus`; the others int64 [n] or [m],
    each without repetition. Where both lists of places are long enough they are the same, place by place, and apart from that have
    none in common.
    """
    num_in, num_out = in_rows.numel(), out_rows.numel()
    if not num_in and not num_out:
        return
    row_bytes = fast.shape[1] * fast.element_size()
    word = next(size for size in (8, 4, 2) if row_bytes % size == 0 and size <= max(4, fast.element_size()))
    width = row_bytes // word
    block = triton.next_power_of_2(width)
    rows = max(1, min(MOST_ROWS, BYTES_A_TURN // (block * word)))
    programs = min(PROGRAMS if over_bus else MOST_PROGRAMS, triton.cdiv(max(num_in, num_out), rows))
    turns = max(1, min(TURNS, MOST_BYTES // (2 * rows * block * word)))
    _swap[(programs,)](
        fast.view(_WORDS[word]), behind.view(_WORDS[word]), in_rows, in_places, out_rows, out_places, num_in, num_out,
        max(num_in, num_out), WIDTH=width, D=block, R=rows, STAGES=turns, num_warps=WARPS,
    )  # fmt: skip


def swap_rows_plainly(parts: Sequence[Tensor], behind: Sequence[Tensor], *moves: Tensor) -> None:
    """What `swap_rows` does, column by column, in plain torch."""
    in_rows, in_places, out_rows, out_places = moves
    for fast, back in zip(parts, behind, strict=True):
        back.index_copy_(0, out_rows, fast.index_select(0, out_places))
        fast.index_copy_(0, in_places, back.index_select(0, in_rows))


@triton.jit(do_not_specialize=["num_in", "num_out", "most"])
def _swap(fast, behind, in_rows, in_places, out_rows, out_places, num_in, num_out, most, WIDTH: tl.constexpr, D: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    column = tl.arange(0, D)[None, :]
    # Reads of later turns are under way while a turn writes. Nothing is read from a place after its new row was written: no other
    # turn has it, and in its own both rows have been read by then.
    for start in tl.range(tl.program_id(0) * R, most, tl.num_programs(0) * R, num_stages=STAGES):
        turn = start + tl.arange(0, R)[:, None]
        comes, goes = turn < num_in, turn < num_out
        from_row = tl.load(in_rows + turn, mask=comes, other=0)
        from_place = tl.load(out_places + turn, mask=goes, other=0)
        ins, outs = comes & (column < WIDTH), goes & (column < WIDTH)
        new = tl.load(behind + from_row * WIDTH + column, mask=ins, other=0)
        old = tl.load(fast + from_place * WIDTH + column, mask=outs, other=0)
        to_place = tl.load(in_places + turn, mask=comes, other=0)
        to_row = tl.load(out_rows + turn, mask=goes, other=0)
        tl.store(behind + to_row * WIDTH + column, old, mask=outs)
        tl.store(fast + to_place * WIDTH + column, new, mask=ins)


def name_rows(ids: Tensor, offsets: Tensor, first_rows: Tensor) -> Tensor:
    """For each id its row among all tables, int64 [nnz]: the first row of its feature's table, and so many more.

    ids int32 or int64 [nnz]; offsets int64 [F*B + 1]; first_rows int64 [F], -1 for features whose ids all become -1.
    """
    rows = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    num_features = first_rows.numel()
    if rows.numel():
        num_samples = (offsets.numel() - 1) // num_features
        block = 1024
        programs = max(1, triton.cdiv(2 * rows.numel(), num_features * block))  # features differ in how many ids they have
        _name[(num_features, programs)](ids, offsets, first_rows, rows, num_samples, programs * block, BLOCK=block, num_warps=4)
    return rows


@triton.jit
def _name(ids, offsets, first_rows, rows, num_samples, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    feature = tl.program_id(0).to(tl.int64)
    first = tl.load(first_rows + feature)
    begin = tl.load(offsets + feature * num_samples)
    end = tl.load(offsets + (feature + 1) * num_samples)
    for start in range(begin + tl.program_id(1) * BLOCK, end, stride):
        at = start + tl.arange(0, BLOCK)
        named = tl.load(ids + at, mask=at < end, other=0).to(tl.int64) + first
        tl.store(rows + at, tl.where(first < 0, -1, named), mask=at < end)
