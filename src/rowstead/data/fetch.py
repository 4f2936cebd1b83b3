"""Fetches row groups of remote files: by ranges, ahead of the threads that decode, in bounded memory."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

from rowstead.data.files import LogFile
from rowstead.data.footers import Range

THREADS = 16
"""Requests at a time. They wait for the network, so their number does not depend on the cores."""
GROUPS_AHEAD = 32
FETCHED_BYTES = 256 << 20
"""Compressed bytes of row groups that are fetched and not yet decoded; a row group of more than half of it is streamed."""
GAP_BYTES = 16 << 10
"""Ranges with a smaller gap between them are one request."""
REQUEST_BYTES = 8 << 20
"""Larger ranges are several requests, so that a row group comes over several connections."""


def plan_requests(ranges: Iterable[Range]) -> list[Range]:
    """Requests that cover `ranges`: neighbours together, none larger than REQUEST_BYTES."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start - merged[-1][1] < GAP_BYTES:
            first, last = merged.pop()
            merged.append((first, max(last, stop)))
        else:
            merged.append((start, stop))
    return [(at, min(at + REQUEST_BYTES, stop)) for start, stop in merged for at in range(start, stop, REQUEST_BYTES)]


class LocalCopy:
    """A local file as large as a remote one, with only some of its bytes; the others take no memory."""

    def __init__(self, size: int) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("rowstead", os.MFD_CLOEXEC)
            self.path = f"/proc/self/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp()
        os.ftruncate(self._file, size)

    def write(self, data: bytes, at: int) -> None:
        os.pwrite(self._file, data, at)

    def close(self) -> None:
        os.close(self._file)
        if not self.path.startswith("/proc/"):
            os.unlink(self.path)


@dataclass(frozen=True)
class _Fetch:
    """A row group on its way."""

    copy: LocalCopy
    requests: list[Future[None]]
    num_bytes: int

    def close(self) -> None:
        # Requests under way write to the copy. `wait` alone would wait for ever for those that were cancelled before they began.
        wait([request for request in self.requests if not request.cancel()])
        self.copy.close()


class RowGroupFetcher:
    """Fetches row groups in order, some of them ahead. Thread-safe.

    The next one is started when its bytes fit into FETCHED_BYTES beside those that are fetched and not yet decoded, or when there are
    none: so the first row group that is still needed is always on its way.
    """

    def __init__(self, wanted: Sequence[Callable[[], tuple[LogFile, Sequence[Range]] | None]]) -> None:
        """`wanted` returns what to request of each row group; None for one that is not fetched."""
        self._wanted = wanted
        self._changed = threading.Condition()
        self._started: dict[int, _Fetch | None] = {}
        self._num_started = self._num_held = self._held_bytes = 0
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch")  # threads start on demand
        self._closed = False

    @contextmanager
    def fetched(self, number: int) -> Iterator[str | None]:
        """Path of a local copy of row group `number`; None for one that is not fetched. Once for each."""
        with self._changed:
            self._start_more()
            self._changed.wait_for(lambda: number in self._started or self._closed)
            fetch = self._started.pop(number)
        try:
            for request in fetch.requests if fetch else ():
                request.result()
            yield fetch.copy.path if fetch else None
        finally:
            if fetch:
                fetch.close()
                with self._changed:
                    self._num_held -= 1
                    self._held_bytes -= fetch.num_bytes
                    self._start_more()

    def close(self) -> None:
        """Stop fetching and drop what nobody has taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(cancel_futures=True)
        for fetch in self._started.values():
            if fetch:
                fetch.close()

    def _start_more(self) -> None:
        while self._num_started < len(self._wanted) and self._num_held < GROUPS_AHEAD and not self._closed:
            wanted = self._wanted[self._num_started]()
            fetch = None
            if wanted is not None:
                file, requests = wanted
                num_bytes = sum(stop - start for start, stop in requests)
                if self._held_bytes and self._held_bytes + num_bytes > FETCHED_BYTES:
                    break
                copy = LocalCopy(file.size)
                fetch = _Fetch(copy, [self._pool.submit(_request, file, part, copy) for part in requests], num_bytes)
                self._num_held += 1
                self._held_bytes += num_bytes
            self._started[self._num_started] = fetch
            self._num_started += 1
        self._changed.notify_all()


def _request(file: LogFile, part: Range, copy: LocalCopy) -> None:
    copy.write(file.read(*part), part[0])
