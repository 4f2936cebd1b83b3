"""Atomic writes of small files, and strict JSON lines."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from rowstead.records.plain_files import open_plain


def write_atomic(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Write a file atomically: a crash leaves either the old content or the new. The umask applies to `mode`."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process, or a link that somebody has put there
        with open(open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a renamed file survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_private(path: str, flags: int) -> int:
    """An opener for `open`: a new file has mode 0600."""
    return os.open(path, flags, 0o600)


def open_to_append(path: Path) -> int:
    """A descriptor of a file that is created if it is missing, and only appended to."""
    return open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def append_lines(descriptor: int, data: bytes) -> None:
    """Append whole lines; a torn line of a killed process stays on its own."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        data = b"\n" + data
    while data:
        data = data[os.write(descriptor, data) :]


def is_figure(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a finite number of at most 64 bits, and not a bool."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)  # 1e999 is read as infinity


def is_record(plain: Any) -> bool:
    """Whether JSON content has the fields of a Record with their types."""
    texts = isinstance(plain, dict) and all(isinstance(plain.get(name), str) for name in ("name", "spec_digest", "date"))
    if not texts or plain.get("kind") not in ("measured", "predicted"):
        return False
    machine, versions, figures = (plain.get(name, {}) for name in ("machine", "versions", "figures"))
    return (
        all(isinstance(part, dict) for part in (machine, versions, figures))
        and all(isinstance(value, (str, int, float)) for value in machine.values())
        and all(isinstance(value, str) for value in versions.values())
        and all(is_figure(value) for value in figures.values())
    )


def json_line(plain: Mapping[str, Any], *, whole: Collection[str] = ()) -> str:
    """One line of strict JSON; figures that are None, NaN or infinite are left out.

    Under the keys in `whole` nothing is left out: there they are null.
    """
    kept = {str(key): _strict(item, leave_out=key not in whole) for key, item in plain.items()}
    return json.dumps({key: item for key, item in kept.items() if item is not None}, allow_nan=False, ensure_ascii=False) + "\n"


def _strict(value: Any, *, leave_out: bool) -> Any:
    if isinstance(value, Mapping):
        cleaned = ((str(key), _strict(item, leave_out=leave_out)) for key, item in value.items())
        return {key: item for key, item in cleaned if item is not None or not leave_out}
    if isinstance(value, (list, tuple)):
        return [_strict(item, leave_out=leave_out) for item in value]
    if not isinstance(value, (str, int, float, bool)) and hasattr(value, "item"):
        value = value.item()  # a scalar of NumPy or torch
    return None if isinstance(value, float) and not math.isfinite(value) else value
