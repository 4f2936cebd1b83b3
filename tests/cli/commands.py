"""What tests of the command line have in common: recipes and logs in the current folder, and how a command ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rowstead.spec.parse import override, to_plain
from tests.small_runs import parquet_spec, small_plain

Change = Callable[[pa.Table], pa.Table]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


Command = Callable[..., Done]


def recipe(*assignments: str, plain: Any = None) -> str:
    """A recipe file in the current folder."""
    Path("mine.yaml").write_text(yaml.safe_dump(override(small_plain() if plain is None else plain, assignments)))
    return "mine.yaml"


def parquet_recipe(folder: Path, *assignments: str) -> str:
    return recipe(plain=to_plain(parquet_spec(folder, *assignments)))


def changed(log: Path, change: Change, only: str = "*") -> Path:
    """A copy of the log, in the current folder, some files of which went through `change`."""
    folder = Path("changed").absolute()
    folder.mkdir()
    for file in log.glob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(change(table) if file.match(f"{only}.parquet") else table, folder / file.name)
    return folder


def with_values(column: str, values: Any) -> Change:
    """A table whose `column` begins with `values`, or has the type of a whole array given."""

    def change(table: pa.Table) -> pa.Table:
        if isinstance(values, pa.DataType):
            new = table[column].cast(values)
        else:
            whole = table[column].to_pylist()
            new = pa.array([*values, *whole[len(values) :]], table[column].type)
        return table.set_column(table.schema.get_field_index(column), column, new)

    return change


def assert_refused(done: Done, *says: str) -> None:
    assert done.code == 2, done.text
    assert done.err.startswith("error: ")
    for text in says:
        assert text in done.err
    assert not list(Path().glob("runs/*/checkpoints"))
