"""A store's state in parts: put together, and loaded into parts that are cut in another way."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowstead.kernels.layout import layout_of
from rowstead.spec.errors import CheckpointError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores import state as state_module
from rowstead.stores.device import DeviceStore
from rowstead.stores.state import SavedState, StatePart, load_parts, part_of, whole_state
from tests.distributed.cuts import Cut, cuts


def parts_of(name: str, table: Tensor, pieces: list[Cut]) -> list[StatePart]:
    """Parts that share the memory of a table."""
    shape = (table.shape[0], table.shape[1])
    return [
        dataclasses.replace(part_of(name, table[a:b, c:d]), shape=shape, first_row=a, first_column=c) for a, b, c, d in pieces
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 30), width=st.integers(1, 8), piece_bytes=st.integers(1, 200))
def test_any_parts_make_up_the_whole_and_load_it(data: st.DataObject, num_rows: int, width: int, piece_bytes: int) -> None:
    table = torch.arange(float(num_rows * width)).reshape(num_rows, width)
    before = state_module.PIECE_BYTES
    state_module.PIECE_BYTES = piece_bytes
    try:
        pieces = data.draw(cuts(num_rows, width))
        assert torch.equal(whole_state(parts_of("t.rows", table, pieces))["t.rows"], table)
        into = torch.zeros_like(table)
        load_parts(parts_of("t.rows", into, data.draw(cuts(num_rows, width))), {"t.rows": table})
        assert torch.equal(into, table)
    finally:
        state_module.PIECE_BYTES = before


class Counting(dict[str, Tensor]):
    """Saved tensors that note which rows were read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: list[tuple[int, int, int, int | None]] = []

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def rows(self, name: str, start: int, stop: int, first_column: int = 0, last_column: int | None = None) -> Tensor:
        self.read.append((start, stop, first_column, last_column))
        return self[name][start:stop, first_column:last_column]


def test_of_a_saved_table_only_the_rows_and_columns_of_a_part_are_read_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "PIECE_BYTES", 3 * 2 * 4)
    saved = Counting({"t.rows": torch.arange(40.0).reshape(10, 4)})
    assert isinstance(saved, SavedState)
    into = torch.zeros(7, 2)
    part = dataclasses.replace(part_of("t.rows", into), shape=(10, 4), first_row=3, first_column=1)
    load_parts([part], saved)
    assert saved.read == [(3, 6, 1, 3), (6, 9, 1, 3), (9, 10, 1, 3)]
    assert torch.equal(into, saved["t.rows"][3:, 1:3])


def test_nothing_is_written_where_something_does_not_fit() -> None:
    one, other = torch.zeros(3, 2), torch.zeros(3, 2)
    parts = [part_of("a.rows", one), part_of("b.rows", other)]
    with pytest.raises(CheckpointError, match=r"`b\.rows` is \(4, 2\) in the checkpoint and \(3, 2\) in this model"):
        load_parts(parts, {"a.rows": torch.ones(3, 2), "b.rows": torch.ones(4, 2)})
    with pytest.raises(CheckpointError, match=r"has no `b\.rows`: it was saved with another model"):
        load_parts(parts, {"a.rows": torch.ones(3, 2)})
    assert not one.any()


def test_a_part_of_a_table_is_no_whole() -> None:
    with pytest.raises(AssertionError, match=r"4 of the 6 elements of `t\.rows`"):
        whole_state([dataclasses.replace(part_of("t.rows", torch.zeros(2, 2)), shape=(3, 2))])


def test_the_parts_of_a_device_store_are_its_own_memory() -> None:
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="a", num_rows=5), SparseFeatureSpec(name="b", num_rows=3)))
    layout = layout_of(features, tables_of(features, width=4))
    store = DeviceStore(layout, SparseOptimizerSpec(kind="adam"))
    parts = {part.name: part for part in store.parts()}
    assert list(parts) == [f"{table}.{name}" for table in "ab" for name in ("rows", "moment1", "moment2")]
    parts["b.rows"].write(1, torch.ones(2, 4))
    assert store.rows("b", torch.tensor([1, 2])).eq(1).all()
    assert torch.equal(parts["b.rows"].take(torch.tensor([0, 2])), store.state()["b.rows"][[0, 2]])
    assert store.state()["a.rows"].data_ptr() == store.weights[0].data_ptr()
    only_rows = DeviceStore(layout, None)
    only_rows.load_state(store.state(), rows_only=True)
    assert torch.equal(only_rows.state()["b.rows"], store.state()["b.rows"])
