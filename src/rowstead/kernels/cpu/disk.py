"""Records in a file, read and packed by compiled loops: many reads in flight, and no Python for each.

A record is its row's number (int64) and then the bytes of its columns, side by side. Records lie in segments, each `per_segment`
slots long; slots are numbered through. Loops take files by descriptor and memory by address.

Of two ways to read, the queue is Linux's asynchronous I/O: one thread hands over many reads by one call and collects those that
are done, while with `pread` every read costs a thread that sleeps and wakes. The queue needs a file opened for direct I/O; `pread`
takes any.

Letters: N rows, n records asked for, m reads, C columns.
"""

from __future__ import annotations

import platform
import sys

import numba
import numpy as np
from numba.core import types

from rowstead.kernels.cpu.memory import address_of, integers_at, item, take

OK, SHORT, ANOTHER_ROW = 0, -1, -2
"""How reads ended, besides the system's error numbers, which are positive: well; at the end of the file; with another row."""

GATHER = 16
"""Reads in the queue to wait for before it is filled up again."""

_INTERRUPTED, _TRY_AGAIN = 4, 11

_pread = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))
_memcpy = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 6))
_error_address = types.ExternalFunction("__error" if sys.platform == "darwin" else "__errno_location", types.int64())

_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_SETUP, _DESTROY, _EVENTS, _SUBMIT = _NUMBERS.get(platform.machine(), (-1, -1, -1, -1))
"""System calls io_setup, io_destroy, io_getevents and io_submit."""


@numba.njit(nogil=True, cache=True)
def _error():  # type: ignore[no-untyped-def]
    return np.int64(item(_error_address(), 0, np.int32(0)))


@numba.njit(nogil=True, cache=True)
def _call(number, a, b, c, d, e):  # type: ignore[no-untyped-def]
    """A system call's result, or its error number with a minus."""
    result = _syscall(number, a, b, c, d, e)
    return result if result >= 0 else -_error()


class ReadQueue:
    """Room in the system for `depth` reads at once; raises OSError where the system gives none."""

    def __init__(self, depth: int) -> None:
        if sys.platform != "linux" or _SETUP < 0:
            raise OSError("no asynchronous I/O on this system")
        context = np.zeros(1, np.int64)
        failed = -_call(_SETUP, depth, address_of(context), 0, 0, 0)
        if failed:
            raise OSError(failed, "no room for asynchronous I/O")
        self.context = int(context[0])
        self.blocks = np.zeros((depth, 8), np.int64)
        """struct iocb."""
        self.pointers = np.zeros(depth, np.int64)
        self.events = np.zeros((depth, 4), np.int64)
        """struct io_event."""

    def close(self) -> None:
        """Give the room back."""
        _call(_DESTROY, self.context, 0, 0, 0, 0)


@numba.njit(nogil=True, cache=True)
def locate(rows, targets, where, in_memory, per_segment, record_bytes, columns, widths, on_disk, nowhere):  # type: ignore[no-untyped-def]
    """Copy the records that still wait in memory to be written; say which of the others are on disk and which nowhere.

    rows and targets int64 [n]: the record of `rows[k]` goes to place `targets[k]` of the columns; where [N] each row's slot or -1;
    in_memory int64 [segments] address of a segment or 0; columns and widths int64 [C] addresses of columns and bytes of a row
    there; on_disk, nowhere int64 [n] are filled with places in `rows`. Returns how many of each there are, and -1 for both if a
    row is outside.
    """
    num_on_disk, num_nowhere = 0, 0
    for place in range(len(rows)):
        if rows[place] < 0 or rows[place] >= len(where):
            return -1, -1
        slot = np.int64(where[rows[place]])
        if slot < 0:
            nowhere[num_nowhere] = place
            num_nowhere += 1
            continue
        segment = slot // per_segment
        if in_memory[segment]:
            _unpack(in_memory[segment] + (slot - segment * per_segment) * record_bytes, targets[place], columns, widths)
        else:
            on_disk[num_on_disk] = place
            num_on_disk += 1
    return num_on_disk, num_nowhere


@numba.njit(nogil=True, cache=True)
def record_starts(rows, places, where, per_segment, record_bytes, segment_bytes, first_byte):  # type: ignore[no-untyped-def]
    """Bytes of the file at which the records of `rows[places]` begin, int64 [n]."""
    starts = np.empty(len(places), np.int64)
    for number in range(len(places)):
        slot = np.int64(where[rows[places[number]]])
        segment = slot // per_segment
        starts[number] = first_byte + segment * segment_bytes + (slot - segment * per_segment) * record_bytes
    return starts


@numba.njit(nogil=True, cache=True)
def cut_reads(starts, record_bytes, sector, gap_bytes, most_bytes):  # type: ignore[no-untyped-def]
    """Reads of whole sectors that cover the records at rising `starts` int64 [n].

    Records whose sectors are at most `gap_bytes` apart come by one read of at most `most_bytes`, enough for any record. Returns int64 [m, 2] with first byte and size, and [m + 1] with the first record of each.
    """
    reads, firsts = np.empty((len(starts), 2), np.int64), np.empty(len(starts) + 1, np.int64)
    count, start, stop = 0, np.int64(0), np.int64(0)
    for number in range(len(starts)):
        first = starts[number] // sector * sector
        last = -(-(starts[number] + record_bytes) // sector) * sector
        if count == 0 or first - stop > gap_bytes or last - start > most_bytes:
            start, firsts[count] = first, number
            count += 1
        stop = last
        reads[count - 1, 0], reads[count - 1, 1] = start, stop - start
    firsts[count] = len(starts)
    return reads[:count], firsts[: count + 1]


@numba.njit(nogil=True, cache=True)
def _unpack(record, place, columns, widths):  # type: ignore[no-untyped-def]
    """Copy one record to place `place` of the columns."""
    source = record + 8
    for column in range(len(columns)):
        _memcpy(columns[column] + place * widths[column], source, widths[column])
        source += widths[column]


@numba.njit(nogil=True, cache=True)
def _deliver(read, memory, reads, firsts, starts, places, rows, targets, columns, widths):  # type: ignore[no-untyped-def]
    """Copy the records of a read that is now in `memory` to their places."""
    for number in range(firsts[read], firsts[read + 1]):
        record = memory + starts[number] - reads[read, 0]
        if item(record, 0, np.int64(0)) != rows[places[number]]:
            return ANOTHER_ROW
        _unpack(record, targets[places[number]], columns, widths)
    return OK


@numba.njit(nogil=True, cache=True)
def _read_queued(  # type: ignore[no-untyped-def]
    submit, collect, context, block_address, blocks, pointer_address, pointers, event_address, events, fd, memory, slot_bytes,
    reads, firsts, starts, places, rows, targets, columns, widths,
):  # fmt: skip
    depth, outcome = len(blocks), np.int64(OK)
    free, read_of = np.arange(depth), np.empty(depth, np.int64)
    num_free, flying, following = depth, 0, 0
    while flying or (outcome == OK and following < len(reads)):
        ready = 0
        while outcome == OK and num_free and following < len(reads):
            num_free -= 1
            slot = free[num_free]
            read_of[slot] = following
            blocks[slot, 0] = slot
            blocks[slot, 2] = np.int64(fd) << 32  # operation 0 is to read
            blocks[slot, 3] = memory + slot * slot_bytes
            blocks[slot, 4] = reads[following, 1]
            blocks[slot, 5] = reads[following, 0]
            pointers[ready] = block_address + slot * 64
            ready += 1
            following += 1
        taken = 0
        while taken < ready:
            result = _call(submit, context, ready - taken, pointer_address + 8 * taken, 0, 0)
            if result > 0:
                taken += result
            elif result == -_TRY_AGAIN and flying + taken:
                break
            elif result != -_TRY_AGAIN and result != -_INTERRUPTED:
                outcome = -result
                break
        flying += taken
        for left in range(taken, ready):  # the system was full: these wait for the next turn
            free[num_free] = (pointers[left] - block_address) // 64
            num_free += 1
        if taken < ready:
            # Reads are handed over in order, so that those left over are the last ones taken.
            following -= ready - taken
        if not flying:
            continue
        finished = _call(collect, context, min(GATHER, flying), depth, event_address, 0)
        if finished < 0:
            if finished != -_INTERRUPTED:
                return -finished
            continue
        for number in range(finished):
            slot, result = events[number, 0], events[number, 2]
            read = read_of[slot]
            if outcome == OK:
                if result == reads[read, 1]:
                    where = memory + slot * slot_bytes
                    outcome = np.int64(_deliver(read, where, reads, firsts, starts, places, rows, targets, columns, widths))
                else:
                    outcome = np.int64(SHORT) if result >= 0 else -result
            free[num_free] = slot
            num_free += 1
        flying -= finished
    return outcome


def read_queued(queue, fd, memory, slot_bytes, reads, firsts, starts, places, rows, targets, columns, widths):  # type: ignore[no-untyped-def]
    """Do all reads, as many at once as the queue has room for, and copy every record to its place.

    memory: address of a slot of `slot_bytes` for each read in the queue, aligned as direct I/O wants; reads and firsts as
    `cut_reads` gave for starts [n]: the record at `starts[k]` is that of `rows[places[k]]` and goes to place `targets[places[k]]` of
    the columns. Returns OK, or how the first that failed ended.
    """
    return _read_queued(
        _SUBMIT, _EVENTS, queue.context, address_of(queue.blocks), queue.blocks, address_of(queue.pointers), queue.pointers,
        address_of(queue.events), queue.events, fd, memory, slot_bytes, reads, firsts, starts, places, rows, targets, columns, widths,
    )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def read_in_turn(counter, fd, memory, reads, firsts, starts, places, rows, targets, columns, widths):  # type: ignore[no-untyped-def]
    """`read_queued` by `pread`: each thread that calls it takes reads from `counter` int64 [1] and has `memory` of its own."""
    while True:
        read = take(counter)
        if read >= len(reads):
            return np.int64(OK)
        done = 0
        while done < reads[read, 1]:
            result = _pread(fd, memory + done, reads[read, 1] - done, reads[read, 0] + done)
            if result == 0:
                return np.int64(SHORT)
            if result > 0:
                done += result
            elif _error() != _INTERRUPTED:
                return _error()
        outcome = _deliver(read, memory, reads, firsts, starts, places, rows, targets, columns, widths)
        if outcome != OK:
            return np.int64(outcome)


@numba.njit(nogil=True, cache=True)
def append(rows, sources, first, count, columns, widths, target, record_bytes, first_slot, per_segment, where, live):  # type: ignore[no-untyped-def]
    """Pack the records of `rows[first : first + count]` at address `target`, the place of slot `first_slot`.

    The record of `rows[k]` comes from place `sources[k]` of the columns, whose addresses and bytes of a row are int64 [C]; where [N] and live int64 [segments], the rows whose newest record a
    segment holds, are brought up to date.
    """
    for number in range(count):
        row = rows[first + number]
        if where[row] >= 0:
            live[where[row] // per_segment] -= 1
        where[row] = first_slot + number
        record = target + number * record_bytes
        integers_at(record, 1)[0] = row
        source = record + 8
        for column in range(len(columns)):
            _memcpy(source, columns[column] + sources[first + number] * widths[column], widths[column])
            source += widths[column]
    live[first_slot // per_segment] += count


@numba.njit(nogil=True, cache=True)
def keep_live(source, begin, from_slot, target, room, first_slot, record_bytes, per_segment, where, live):  # type: ignore[no-untyped-def]
    """Copy the newest records of a segment, read to address `source`, to `target`, the place of slot `first_slot`.

    Slots of the segment that begins at `from_slot` are looked at from the one numbered `begin` in it on, and at most `room` are
    copied. Returns where it stopped and how many were copied.
    """
    copied, number = 0, begin
    while number < per_segment:
        record = source + number * record_bytes
        row = item(record, 0, np.int64(0))
        if 0 <= row < len(where) and where[row] == from_slot + number:
            if copied == room:
                break
            _memcpy(target + copied * record_bytes, record, record_bytes)
            where[row] = first_slot + copied
            copied += 1
        number += 1
    live[from_slot // per_segment] -= copied
    live[first_slot // per_segment] += copied
    return number, copied
