"""The values of a column that its raw 64-bit ids stand for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

import pyarrow as pa
import pyarrow.compute as pc

from rowstead.data.column_values import is_list, to_bags
from rowstead.data.columns import NO_GROUP
from rowstead.data.file_log import FileLog

MAX_NAME = 60
"""Characters of a name; the rest is cut."""


def name_values(log: FileLog, column: str, ids: Iterable[int]) -> dict[int, str]:
    """The value of `column`, as text, for each of these raw ids that the log has; reads the column until all are found.

    What was found is remembered with the log.
    """
    known = log.value_names.setdefault(column, {NO_GROUP: "(none)"})
    missing = set(ids) - set(known)
    if missing:
        with closing(log.tables([column])) as tables:
            for table in tables:
                values = table.column(column)
                values = (pc.list_flatten(values) if is_list(values.type) else values).drop_null().unique()
                values = pa.chunked_array([values]) if isinstance(values, pa.Array) else values
                found, offsets = to_bags(values, column)
                for value, start, stop in zip(values.to_pylist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                    if stop > start and (code := int(found[start])) in missing:
                        known[code] = _shown(value)
                        missing.remove(code)
                if not missing:
                    break
    return {code: known[code] for code in ids if code in known}


def _shown(value: object) -> str:
    text = " ".join(str(value).split()) or '""'
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "…"
