"""Hive partitions: folders such as `date=2026-11-01` give the files in them a column each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa

from rowstead.spec.errors import DataError

NULL = "__HIVE_DEFAULT_PARTITION__"
MAX_PARTITIONS = 100
"""Folders of one path that give a column."""
_FOLDER = re.compile(r"([^=/\\?*]+)=([^/\\]*)")


def read_partitions(paths: Sequence[str]) -> list[dict[str, pa.Scalar]]:
    """For each path, the columns that its folders give; null where only other paths have one.

    A column is int64 or date32 if all its values are whole numbers or dates, else text.
    """
    found = [_read_path(path) for path in paths]
    names = tuple(dict.fromkeys(name for values in found for name in values))
    types = {name: _choose_type([values.get(name) for values in found]) for name in names}
    return [{name: pa.scalar(values.get(name)).cast(types[name]) for name in names} for values in found]


def _read_path(path: str) -> dict[str, str | None]:
    folders = path.split("://")[-1].split("?")[0].split("/")[:-1]
    matches = [match for folder in folders if (match := _FOLDER.fullmatch(folder)) is not None]
    if len(matches) > MAX_PARTITIONS:
        raise DataError(f"`{path}` has {len(matches)} folders such as `{matches[0][0]}`; at most {MAX_PARTITIONS} are allowed")
    return {unquote(match[1]): None if match[2] == NULL else unquote(match[2]) for match in matches}


def _choose_type(values: Sequence[str | None]) -> pa.DataType:
    known = pa.array([value for value in values if value is not None], pa.string())
    for kind in (pa.int64(), pa.date32()):
        try:
            known.cast(kind)
        except pa.ArrowInvalid:
            continue
        return kind if len(known) else pa.string()
    return pa.string()
