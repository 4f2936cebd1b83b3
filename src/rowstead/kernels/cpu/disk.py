"""Records in a file, read and packed by compiled loops: many reads in flight, without Python code per read.

A record is its row's number (int64) followed by the bytes of its columns. Records lie in segments of `per_segment` slots; slots are
numbered through all segments. Kernels take files by descriptor and memory by address.

There are two ways to read. The queue is Linux's asynchronous I/O: one thread submits many reads with one system call and collects those
that are done; it needs a file opened for direct I/O. With `pread`, which takes any file, every read blocks a thread.

Letters: N rows, n records to read, m reads, C columns.
"""

from __future__ import annotations

import platform
import sys

import numba
import numpy as np
from numba.core import types

from rowstead.kernels.cpu.memory import address_of, integers_at, item, take

OK, SHORT, WRONG_ROW = 0, -1, -2
"""Outcomes of reads: success, end of file, a record of another row. Positive outcomes are errno values."""

GATHER = 16
"""Completed reads to wait for before the queue is refilled."""

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
    """Result of a system call, or -errno."""
    result = _syscall(number, a, b, c, d, e)
    return result if result >= 0 else -_error()


class ReadQueue:
    """A kernel queue for `depth` reads in flight; raises OSError where there is none."""

    def __init__(self, depth: int) -> None:
        if sys.platform != "linux" or _SETUP < 0:
            raise OSError("no asynchronous I/O on this system")
        context = np.zeros(1, np.int64)
        failed = -_call(_SETUP, depth, address_of(context), 0, 0, 0)
        if failed:
            raise OSError(failed, "no queue for asynchronous I/O")
        self.context = int(context[0])
        self.blocks = np.zeros((depth, 8), np.int64)
        """struct iocb."""
        self.pointers = np.zeros(depth, np.int64)
        self.events = np.zeros((depth, 4), np.int64)
        """struct io_event."""

    def close(self) -> None:
        """Release the queue."""
        _call(_DESTROY, self.context, 0, 0, 0, 0)


@numba.njit(nogil=True, cache=True)
def locate(rows, targets, slot_of, in_memory, per_segment, record_bytes, columns, widths, on_disk, unwritten):  # type: ignore[no-untyped-def]
    """Copy the records that are still in memory; list which of the others are on disk and which were never written.

    rows and targets int64 [n]: the record of `rows[k]` goes to index `targets[k]` of the columns; slot_of [N] the slot of each row or
    -1; in_memory int64 [segments] address of a segment or 0; columns and widths int64 [C] addresses of columns and bytes of a row
    there; on_disk, unwritten int64 [n] are filled with indices in `rows`. Returns the number of each, or -1 for both if a row is out
    of range.
    """
    num_on_disk, num_unwritten = 0, 0
    for index in range(len(rows)):
        if rows[index] < 0 or rows[index] >= len(slot_of):
            return -1, -1
        slot = np.int64(slot_of[rows[index]])
        if slot < 0:
            unwritten[num_unwritten] = index
            num_unwritten += 1
            continue
        segment = slot // per_segment
        if in_memory[segment]:
            _unpack(in_memory[segment] + (slot - segment * per_segment) * record_bytes, targets[index], columns, widths)
        else:
            on_disk[num_on_disk] = index
            num_on_disk += 1
    return num_on_disk, num_unwritten


@numba.njit(nogil=True, cache=True)
def record_starts(rows, chosen, slot_of, per_segment, record_bytes, segment_bytes, first_byte):  # type: ignore[no-untyped-def]
    """File offsets of the records of `rows[chosen]`, int64 [n]."""
    starts = np.empty(len(chosen), np.int64)
    for number in range(len(chosen)):
        slot = np.int64(slot_of[rows[chosen[number]]])
        segment = slot // per_segment
        starts[number] = first_byte + segment * segment_bytes + (slot - segment * per_segment) * record_bytes
    return starts


@numba.njit(nogil=True, cache=True)
def cut_reads(starts, record_bytes, sector, gap_bytes, max_bytes):  # type: ignore[no-untyped-def]
    """Cut reads of whole sectors that cover the records at ascending `starts` int64 [n].

    Records whose sectors are at most `gap_bytes` apart share one read of at most `max_bytes`, which must hold any record. Returns int64
    [m, 2] with offset and size, and [m + 1] with the first record of each.
    """
    reads, firsts = np.empty((len(starts), 2), np.int64), np.empty(len(starts) + 1, np.int64)
    count, start, stop = 0, np.int64(0), np.int64(0)
    for number in range(len(starts)):
        first = starts[number] // sector * sector
        last = -(-(starts[number] + record_bytes) // sector) * sector
        if count == 0 or first - stop > gap_bytes or last - start > max_bytes:
            start, firsts[count] = first, number
            count += 1
        stop = last
        reads[count - 1, 0], reads[count - 1, 1] = start, stop - start
    firsts[count] = len(starts)
    return reads[:count], firsts[: count + 1]


@numba.njit(nogil=True, cache=True)
def _unpack(record, index, columns, widths):  # type: ignore[no-untyped-def]
    """Copy one record to `index` of the columns."""
    source = record + 8
    for column in range(len(columns)):
        _memcpy(columns[column] + index * widths[column], source, widths[column])
        source += widths[column]


@numba.njit(nogil=True, cache=True)
def _deliver(read, memory, reads, firsts, starts, chosen, rows, targets, columns, widths):  # type: ignore[no-untyped-def]
    """Copy the records of a completed read in `memory` to their targets."""
    for number in range(firsts[read], firsts[read + 1]):
        record = memory + starts[number] - reads[read, 0]
        if item(record, 0, np.int64(0)) != rows[chosen[number]]:
            return WRONG_ROW
        _unpack(record, targets[chosen[number]], columns, widths)
    return OK


@numba.njit(nogil=True, cache=True)
def _read_queued(  # type: ignore[no-untyped-def]
    submit, collect, context, block_address, blocks, pointer_address, pointers, event_address, events, fd, memory, slot_bytes,
    reads, firsts, starts, chosen, rows, targets, columns, widths,
):  # fmt: skip
    depth, outcome = len(blocks), np.int64(OK)
    free, read_of = np.arange(depth), np.empty(depth, np.int64)
    num_free, in_flight, following = depth, 0, 0
    while in_flight or (outcome == OK and following < len(reads)):
        ready = 0
        while outcome == OK and num_free and following < len(reads):
            num_free -= 1
            slot = free[num_free]
            read_of[slot] = following
            blocks[slot, 0] = slot
            blocks[slot, 2] = np.int64(fd) << 32  # operation 0 reads
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
            elif result == -_TRY_AGAIN and in_flight + taken:
                break
            elif result != -_TRY_AGAIN and result != -_INTERRUPTED:
                outcome = -result
                break
        in_flight += taken
        for left in range(taken, ready):  # the queue was full: these wait for the next round
            free[num_free] = (pointers[left] - block_address) // 64
            num_free += 1
        if taken < ready:
            # Reads are submitted in order, so those left over are the last.
            following -= ready - taken
        if not in_flight:
            continue
        finished = _call(collect, context, min(GATHER, in_flight), depth, event_address, 0)
        if finished < 0:
            if finished != -_INTERRUPTED:
                return -finished
            continue
        for number in range(finished):
            slot, result = events[number, 0], events[number, 2]
            read = read_of[slot]
            if outcome == OK:
                if result == reads[read, 1]:
                    buffer = memory + slot * slot_bytes
                    outcome = np.int64(_deliver(read, buffer, reads, firsts, starts, chosen, rows, targets, columns, widths))
                else:
                    outcome = np.int64(SHORT) if result >= 0 else -result
            free[num_free] = slot
            num_free += 1
        in_flight -= finished
    return outcome


def read_queued(queue, fd, memory, slot_bytes, reads, firsts, starts, chosen, rows, targets, columns, widths):  # type: ignore[no-untyped-def]
    """Do all reads, as many at once as the queue holds, and copy every record to its target.

    memory: address of a buffer of `slot_bytes` for each read in the queue, aligned for direct I/O; reads and firsts as `cut_reads`
    returned for starts [n]: the record at `starts[k]` belongs to `rows[chosen[k]]` and goes to index `targets[chosen[k]]` of the
    columns. Returns OK, or the outcome of the first read that failed.
    """
    return _read_queued(
        _SUBMIT, _EVENTS, queue.context, address_of(queue.blocks), queue.blocks, address_of(queue.pointers), queue.pointers,
        address_of(queue.events), queue.events, fd, memory, slot_bytes, reads, firsts, starts, chosen, rows, targets, columns, widths,
    )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def read_by_pread(counter, fd, memory, reads, firsts, starts, chosen, rows, targets, columns, widths):  # type: ignore[no-untyped-def]
    """`read_queued` by `pread`: each calling thread takes reads from `counter` int64 [1] and has its own `memory`."""
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
        outcome = _deliver(read, memory, reads, firsts, starts, chosen, rows, targets, columns, widths)
        if outcome != OK:
            return np.int64(outcome)


@numba.njit(nogil=True, cache=True)
def append(rows, sources, first, count, columns, widths, target, record_bytes, first_slot, per_segment, slot_of, live):  # type: ignore[no-untyped-def]
    """Pack the records of `rows[first : first + count]` at address `target`, that of slot `first_slot`.

    The record of `rows[k]` comes from index `sources[k]` of the columns, whose addresses and bytes per row are int64 [C]. Updates slot_of
    [N], and live int64 [segments], the number of newest records in each segment.
    """
    for number in range(count):
        row = rows[first + number]
        if slot_of[row] >= 0:
            live[slot_of[row] // per_segment] -= 1
        slot_of[row] = first_slot + number
        record = target + number * record_bytes
        integers_at(record, 1)[0] = row
        source = record + 8
        for column in range(len(columns)):
            _memcpy(source, columns[column] + sources[first + number] * widths[column], widths[column])
            source += widths[column]
    live[first_slot // per_segment] += count


@numba.njit(nogil=True, cache=True)
def keep_live(source, begin, from_slot, target, capacity, first_slot, record_bytes, per_segment, slot_of, live):  # type: ignore[no-untyped-def]
    """Copy the newest records of a segment, which is at address `source`, to `target`, the address of slot `first_slot`.

    Scans the segment that starts at `from_slot` from its slot `begin` on, and copies at most `capacity` records. Returns the slot at
    which it stopped, and the number of records copied.
    """
    copied, number = 0, begin
    while number < per_segment:
        record = source + number * record_bytes
        row = item(record, 0, np.int64(0))
        if 0 <= row < len(slot_of) and slot_of[row] == from_slot + number:
            if copied == capacity:
                break
            _memcpy(target + copied * record_bytes, record, record_bytes)
            slot_of[row] = first_slot + copied
            copied += 1
        number += 1
    live[from_slot // per_segment] -= copied
    live[first_slot // per_segment] += copied
    return number, copied
