"""Says in a sentence which limit of the system an error ran into, and how to raise it."""

from __future__ import annotations

import errno
import re
import resource

from rowstead.spec.errors import RowsteadError
from rowstead.spec.sizes import format_bytes

REMEDIES = (
    "1. make the model smaller: lower `scale`, `num_rows`, `model.width` or the widths of layers. 2. keep tables elsewhere: "
    "`placement: {'*': cached}` with a GPU, or `ssd` with a `memory.folder`. 3. lower `train.batch_size`. 4. raise the limit on memory, if there is one: `ulimit -v`, or that of the "
    "container"
)
MANY_FILES = 4096
MIN_ADDRESS_BYTES = 1_450_000_000
"""What torch and the kernels map before there is any table."""
_ALLOCATIONS = (
    r"you tried to allocate (\d+) bytes",  # torch on a CPU
    r"Unable to allocate ([\d.]+ \w+)",  # NumPy
    r"Tried to allocate ([\d.]+ \w+)",  # torch on a GPU
    r"size (\d+) failed",  # Arrow: malloc of size
)
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "cannot allocate memory",
    "bad_alloc",
    "failed to map segment",
    "unable to mmap",
    "memory allocation of",
)


def explain_limit(error: BaseException) -> str | None:
    """Why an error happened, if memory, files or threads ran out; None for other errors."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return next((reason for one in chain if (reason := _explain(one)) is not None), None)


def require_open_files(num_files: int, what: str) -> None:
    """Raise this process's limit on open files to `num_files` where it is lower, and an error where it cannot be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    except (ValueError, OSError):
        raise RowsteadError(
            f"{what} needs {num_files:,} open files, and this process may have {soft:,}: raise the limit with `ulimit -n {num_files}`"
        ) from None


def require_address_space() -> None:
    """Raise an error where `ulimit -v` leaves too little to import torch, which would crash."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < MIN_ADDRESS_BYTES:
        raise RowsteadError(
            f"this process may use {format_bytes(most)} of memory (`ulimit -v`), and training needs {format_bytes(MIN_ADDRESS_BYTES)} before it has "
            f"any table: raise the limit with `ulimit -v {2 * MIN_ADDRESS_BYTES // 1024}`, or `ulimit -v unlimited`"
        )


def _explain(error: BaseException) -> str | None:
    number, text = getattr(error, "errno", None), str(error)
    if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in text.lower():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = f" (an administrator has to allow more than {hard:,})" if hard < MANY_FILES else ""
        return f"too many open files: this process may have {soft:,}. Raise the limit with `ulimit -n {MANY_FILES}`{most}"
    if isinstance(error, BlockingIOError) or "can't start new thread" in text:
        return "no more threads or processes can be started: raise the limit with `ulimit -u`, or set `threads` and `--processes` lower"
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(word in text.lower() for word in _OUT_OF_MEMORY):
        found = next((match[1] for pattern in _ALLOCATIONS if (match := re.search(pattern, text))), None)
        size = "" if found is None else f" while allocating {format_bytes(int(found)) if found.isdigit() else found}"
        return f"out of memory{size}. {REMEDIES}"
    return None
