"""The files of a run's log as it first read them, kept in its folder: a run must not continue with another log."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rowstead.data.footers import Fingerprint, describe_changes
from rowstead.data.open_log import Sources
from rowstead.records.files import write_atomic
from rowstead.spec.errors import DataError

FILE = "log_files.json"
"""In the folder of a run; a run of a synthetic log has none."""


def write_log_files(folder: Path, sources: Sources) -> None:
    """Keep the fingerprints of a log's files in the folder of a run."""
    found = _fingerprints(sources)
    if found:
        write_atomic(folder / FILE, json.dumps({path: asdict(fingerprint) for path, fingerprint in found.items()}) + "\n")


def check_log_files(
    folder: Path, sources: Sources, *, accept_changes: bool = False, on_message: Callable[[str], None] = lambda _: None
) -> None:
    """Raise a DataError if the log is not the one that the run in `folder` has read, or say so if changes are accepted."""
    file = folder / FILE
    if not file.is_file():
        return
    try:
        before = {path: Fingerprint(**plain) for path, plain in json.loads(file.read_bytes()).items()}
        changes = describe_changes(before, _fingerprints(sources))
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{file} cannot be read; remove it to continue without a check of the log's files") from None
    if changes is None:
        return
    if not accept_changes:
        raise DataError(
            f"the log is not the one that {folder} was trained on: {changes}. Restore the files, or pass --accept-changed-log to "
            "continue with these"
        )
    on_message(f"continuing with a changed log: {changes}")


def _fingerprints(sources: Sources) -> dict[str, Fingerprint]:
    splits = (sources.train, sources.eval, sources.test)
    logs = [split.file_log for split in splits if split is not None]
    return {path: found for log in logs if log is not None for path, found in log.fingerprints.items()}
