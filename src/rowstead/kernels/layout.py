"""What kernels need to know about tables and features: which table each feature reads, and the columns of its pooled vector."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from rowstead.spec.features import FeaturesSpec, Table


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Features in the order of the batch, over tables in the order of first use.

    Compared and hashed by identity: kernels cache what they derive from a layout, and look it up in every call.
    """

    tables: tuple[Table, ...]
    table_of: tuple[int, ...]
    """For each feature the index of its table: [F]."""
    columns: tuple[int, ...]
    """For each feature the first column of its vector in the pooled output, and the total width last: [F + 1]."""
    is_mean: tuple[bool, ...]
    """For each feature whether its rows are averaged rather than summed."""
    is_history: tuple[bool, ...] = ()
    """For each feature whether its rows are kept in order (`stores/histories.py`); empty where none is, as kernels have it."""

    @property
    def num_features(self) -> int:
        return len(self.table_of)

    @property
    def total_width(self) -> int:
        return self.columns[-1]


def layout_of(features: FeaturesSpec, tables: tuple[Table, ...]) -> Layout:
    """The layout of `features` over the `tables` that `tables_of` gave for them."""
    table_of = {feature: index for index, table in enumerate(tables) for feature in table.features}
    specs = features.expanded_sparse()
    order = tuple(table_of[feature] for feature in range(len(specs)))
    return Layout(
        tables=tables,
        table_of=order,
        columns=(0, *accumulate(tables[table].width for table in order)),
        is_mean=tuple(spec.pooling == "mean" for spec in specs),
        is_history=tuple(spec.is_history for spec in specs) if features.has_histories else (),
    )
