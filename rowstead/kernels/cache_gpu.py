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

PROGRAMS = 80
"""Just enough to keep both directions of a bus busy: with more, launches beside these wait for memory up to three times longer."""
BYTES_A_TURN, WARPS = 4096, 4
"""That a program has under way in each direction, and by how many warps."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def swap_rows(fast: Tensor, behind: Tensor, in_rows: Tensor, in_places: Tensor, out_rows: Tensor, out_places: Tensor) -> None:
    """Write `fast[out_places]` to `behind[out_rows]` and `behind[in_rows]` to `fast[in_places]`.

    fast [P, D]; behind [N, D], system memory as the GPU sees it; the others int64 [n] or [m], each without repetition. Where both
    lists of places are long enough they are the same, place by place, and apart from that have none in common.
    """
    num_in, num_out = in_rows.numel(), out_rows.numel()
    if not num_in and not num_out:
        return
    row_bytes = fast.shape[1] * fast.element_size()
    word = next(size for size in (8, 4, 2) if row_bytes % size == 0 and size <= max(4, fast.element_size()))
    width = row_bytes // word
    block = triton.next_power_of_2(width)
    turn = max(1, BYTES_A_TURN // (block * word))
    programs = min(PROGRAMS, triton.cdiv(max(num_in, num_out), turn))
    _swap[(programs,)](
        fast.view(_WORDS[word]), behind.view(_WORDS[word]), in_rows, in_places, out_rows, out_places, num_in, num_out,
        max(num_in, num_out), torch.zeros(1, dtype=torch.int32, device=fast.device), WIDTH=width, D=block, R=turn, num_warps=WARPS,
    )  # fmt: skip


def swap_rows_plainly(parts: Sequence[Tensor], behind: Sequence[Tensor], *moves: Tensor) -> None:
    """What `swap_rows` does, column by column, in plain torch."""
    in_rows, in_places, out_rows, out_places = moves
    for fast, back in zip(parts, behind, strict=True):
        back.index_copy_(0, out_rows, fast.index_select(0, out_places))
        fast.index_copy_(0, in_places, back.index_select(0, in_rows))


@triton.jit
def _swap(fast, behind, in_rows, in_places, out_rows, out_places, num_in, num_out, most, num_taken, WIDTH: tl.constexpr, D: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    column = tl.arange(0, D)[None, :]
    # Programs take turns as they come to them: one that others keep waiting must not be the one that all wait for.
    start = tl.atomic_add(num_taken, R)
    then = tl.atomic_add(num_taken, R)
    from_row, to_place, from_place, to_row = _turn(in_rows, in_places, out_rows, out_places, num_in, num_out, start, R)
    while start < most:
        place = start + tl.arange(0, R)[:, None]
        ins, outs = (place < num_in) & (column < WIDTH), (place < num_out) & (column < WIDTH)
        comes = tl.load(behind + from_row * WIDTH + column, mask=ins, other=0)
        goes = tl.load(fast + from_place * WIDTH + column, mask=outs, other=0)
        # Which rows are next is asked for while these are on their way.
        later = tl.atomic_add(num_taken, R)
        from_row, next_to_place, from_place, next_to_row = _turn(
            in_rows, in_places, out_rows, out_places, num_in, num_out, then, R
        )
        tl.debug_barrier()  # a row is read before another comes into its place
        tl.store(behind + to_row * WIDTH + column, goes, mask=outs)
        tl.store(fast + to_place * WIDTH + column, comes, mask=ins)
        to_place, to_row = next_to_place, next_to_row
        start, then = then, later


@triton.jit
def _turn(in_rows, in_places, out_rows, out_places, num_in, num_out, start, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which R rows come, and to which places, and from which places which others go."""
    place = start + tl.arange(0, R)[:, None]
    comes, goes = place < num_in, place < num_out
    return (
        tl.load(in_rows + place, mask=comes, other=0),
        tl.load(in_places + place, mask=comes, other=0),
        tl.load(out_places + place, mask=goes, other=0),
        tl.load(out_rows + place, mask=goes, other=0),
    )


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
