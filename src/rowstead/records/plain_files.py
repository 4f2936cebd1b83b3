"""Files that somebody else may have written: opened only if they are plain files, read up to a size, parsed as bounded JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rowstead.spec.errors import RowsteadError
from rowstead.spec.sizes import format_bytes

MAX_DEPTH = 64
"""Lists and mappings within each other in a JSON file."""
MAX_JSON_BYTES = 64 << 20
"""Largest JSON file that is read as a whole."""
NOT_PLAIN = (errno.EINVAL, errno.EFBIG)
"""Codes of the errors for what is not a regular file, or too large."""
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: True, "a device"),
)


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """A descriptor of a regular file; an OSError for anything else, such as a symbolic link, a device or a named pipe."""
    try:
        # Without O_NONBLOCK a named pipe would block here until somebody opens its other end.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _not_plain(path, os.lstat(path).st_mode) from None
        raise
    found = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(found):
        os.close(descriptor)
        raise _not_plain(path, found)
    return descriptor


def _not_plain(path: Path, mode: int) -> OSError:
    kind = next(name for is_kind, name in _KINDS if is_kind(mode))
    return OSError(errno.EINVAL, f"it is {kind}, not a plain file", str(path))


def read_plain(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of a regular file of at most `max_bytes`; an OSError for anything else."""
    with open(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= max_bytes else None  # `read(n)` takes n bytes, however short the file
        while content is not None and len(content) <= max_bytes and (more := file.read(1 << 20)):  # it has grown meanwhile
            content += more
    if content is None or len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(max_bytes)}", str(path))
    return content


def parse_json(content: bytes) -> Any:
    """Parse UTF-8 JSON; a ValueError if a key is given twice, or if it is nested too deeply or has numbers beyond 64 bits."""
    try:
        plain = json.loads(content.decode(), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    check_bounded(plain)
    return plain


def check_bounded(plain: Any) -> None:
    """Raise a ValueError if JSON content is nested too deeply, or has text that is not Unicode or integers beyond 64 bits."""
    level, depth = [plain], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                value.encode()  # half of a surrogate pair raises a ValueError
            elif isinstance(value, int):
                if abs(value) >= 2**64:
                    raise ValueError("it has an integer beyond 64 bits")
            elif isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, (list, tuple)):
                below += value
        level, depth = below, depth + 1


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)} is given twice")
    return found


def is_count(value: object, *, at_least: int = 0) -> bool:
    """Whether a JSON value is an integer from `at_least` up to 63 bits, and not a bool."""
    return type(value) is int and at_least <= value < 2**63


def shown(value: object) -> str:
    """A value from a file as part of a message: short, in quotes, and without characters that change a terminal."""
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return f"`{text if len(text) <= 80 else text[:77] + '…'}`"


def check_plain_folder(folder: Path) -> None:
    """Refuse a folder that has a symbolic link, a named pipe or a device in it: reading or writing there would go elsewhere."""
    for path, mode in _walk(folder):
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISSOCK(mode)):
            error = _not_plain(path, mode)
            raise RowsteadError(
                f"{folder} cannot be used: {path.relative_to(folder)}: {error.strerror}. Replace it by what it stands for "
                f"(`cp -rL {folder} COPY` follows links) if you trust it, or remove it"
            )


def _walk(folder: Path) -> Iterator[tuple[Path, int]]:
    """Everything in a folder and the folders in it, with its mode; links are not followed."""
    folders = [folder]
    while folders:
        here = folders.pop()
        with contextlib.suppress(FileNotFoundError):  # a run that trains has removed it meanwhile
            names = os.listdir(here)
            for path in (here / name for name in names):
                with contextlib.suppress(FileNotFoundError):
                    mode = os.lstat(path).st_mode
                    yield path, mode
                    if stat.S_ISDIR(mode):
                        folders.append(path)
