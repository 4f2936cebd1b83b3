"""Maps of rows on a GPU, of one bit a row.

Whatever the order in which bits were set, listing them gives each row once and rising, so nothing is sorted. A launch that lists a
map also empties it.

Letters: n rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = 512
"""Words of a map that a program takes at a time."""
MOST_WORD_BLOCKS = 4096
"""Programs among which words are divided at most: each adds up what those before it found."""


def num_words(num_rows: int) -> int:
    """int32 words of a map."""
    return triton.cdiv(num_rows, 32)


def word_blocks(count: int) -> int:
    """Programs that share `count` words of a map."""
    return max(1, triton.cdiv(count, WORDS * word_chunks(count)))


def word_chunks(count: int) -> int:
    """How many times each of them takes some."""
    return max(1, triton.cdiv(count, WORDS * MOST_WORD_BLOCKS))


def warps() -> int:
    """Of a program that empties a map: none beside others with the same words, which it might read after they have emptied them."""
    return max(1, min(16, WORDS // 128))


def count_bits(bits: Tensor, counts: Tensor, total: Tensor) -> None:
    """Fill `counts` int32 [blocks of words] with how many bits of a map each has; `total` int32 [1] rises by their sum."""
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
    """Fill `rows` int64 [n] with the rows of a map."""
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


# For launches over maps


@triton.jit
def bit_of(row):  # type: ignore[no-untyped-def]
    """The bit of each row in its word."""
    shift = (row & 31).to(tl.int32)
    return (tl.zeros_like(shift) + 1) << shift


@triton.jit
def ones_of(word):  # type: ignore[no-untyped-def]
    """How many bits of each word are set; int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 63).to(tl.int32)


@triton.jit
def lowest(word):  # type: ignore[no-untyped-def]
    """Which bit of each word is its lowest; 32 where there is none."""
    return ones_of((word ^ (word & (word - 1))) - 1)


@triton.jit
def bits_before(counts, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits in the words of all programs before this one."""
    block = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(counts + block, mask=block < tl.program_id(0), other=0), 0)


@triton.jit
def bits_of(bits, at, num_words, begin):  # type: ignore[no-untyped-def]
    """Words of a map, which are emptied, how many bits each has, and where in a list its first goes."""
    signed = tl.load(bits + at, mask=at < num_words, other=0)
    tl.store(bits + at, tl.zeros_like(signed), mask=signed != 0)
    word = signed.to(tl.uint32, bitcast=True)
    number = ones_of(word)
    return word, number, begin + tl.cumsum(number, 0) - number
