"""Bitmaps of rows on a GPU.

Whatever the order in which bits were set, a bitmap lists each row once and in ascending order, without a sort. A kernel that lists a
bitmap also clears it.

Letters: n rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = 512
"""Words that a program processes at a time."""
MAX_WORD_BLOCKS = 4096
"""Programs that share the words at most: each adds up the counts of those before it."""


def num_words(num_rows: int) -> int:
    """int32 words of a bitmap."""
    return triton.cdiv(num_rows, 32)


def word_blocks(count: int) -> int:
    """Programs that share `count` words."""
    return max(1, triton.cdiv(count, WORDS * word_chunks(count)))


def word_chunks(count: int) -> int:
    """How many blocks of words each program processes."""
    return max(1, triton.cdiv(count, WORDS * MAX_WORD_BLOCKS))


def warps() -> int:
    """Warps of a program that clears words: few enough that no two threads hold the same word, which one might read after the other cleared it."""
    return max(1, min(16, WORDS // 128))


def count_bits(bits: Tensor, counts: Tensor, total: Tensor) -> None:
    """Fill `counts` int32 [blocks of words] with the number of bits set in each; `total` int32 [1] rises by their sum."""
    chunks, blocks = word_chunks(bits.numel()), word_blocks(bits.numel())
    _count_bits[(blocks,)](bits, counts, total, bits.numel(), chunks, BLOCK=WORDS, num_warps=4)


@triton.jit
def _count_bits(bits, counts, total, num_words, chunks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for chunk in range(chunks):
        at = (program.to(tl.int64) * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        found += ones_of(tl.load(bits + at, mask=at < num_words, other=0).to(tl.uint32, bitcast=True))
    count = tl.sum(found, 0)
    tl.store(counts + program, count)
    tl.atomic_add(total, count, sem="relaxed")


def list_rows(bits: Tensor, counts: Tensor, rows: Tensor) -> None:
    """Fill `rows` int64 [n] with the rows of a bitmap, and clear it."""
    blocks = word_blocks(bits.numel())
    chunks = word_chunks(bits.numel())
    _list_rows[(blocks,)](
        bits, counts, rows, bits.numel(), chunks, BLOCK=WORDS, BLOCKS=triton.next_power_of_2(blocks), num_warps=warps()
    )


@triton.jit
def _list_rows(bits, counts, rows, num_words, chunks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    begin = bits_before(counts, BLOCKS)
    for chunk in range(chunks):
        at = (tl.program_id(0).to(tl.int64) * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        word, number, into = bits_of(bits, at, num_words, begin)
        begin += tl.sum(number, 0)
        turns = tl.max(number, 0)
        while turns > 0:
            tl.store(rows + into, at * 32 + lowest(word), mask=word != 0)
            word = word & (word - 1)
            into += 1
            turns -= 1


# For kernels over bitmaps


@triton.jit
def bit_of(row):  # type: ignore[no-untyped-def]
    """The bit of each row in its word."""
    shift = (row & 31).to(tl.int32)
    return (tl.zeros_like(shift) + 1) << shift


@triton.jit
def ones_of(word):  # type: ignore[no-untyped-def]
    """Number of bits set in each word (population count); int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 63).to(tl.int32)


@triton.jit
def lowest(word):  # type: ignore[no-untyped-def]
    """Index of the lowest bit set in each word; 32 if none is."""
    return ones_of((word ^ (word & (word - 1))) - 1)


@triton.jit
def bits_before(counts, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits set in the words of all programs before this one."""
    block = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(counts + block, mask=block < tl.program_id(0), other=0), 0)


@triton.jit
def bits_of(bits, at, num_words, begin):  # type: ignore[no-untyped-def]
    """Read and clear words: returns them, the number of bits in each, and the list index of its first."""
    signed = tl.load(bits + at, mask=at < num_words, other=0)
    tl.store(bits + at, tl.zeros_like(signed), mask=signed != 0)
    word = signed.to(tl.uint32, bitcast=True)
    number = ones_of(word)
    return word, number, begin + tl.cumsum(number, 0) - number
