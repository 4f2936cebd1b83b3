"""What every EmbeddingStore must do, checked against plain loops over NumPy in FP64; each store's tests inherit this."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, SparseOptimizerSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.histories import HistoryLayout, HistoryStore

KINDS = tuple(ROW_OPTIMIZERS)
WIDTHS = st.one_of(st.integers(1, 9), st.sampled_from([16, 28, 64, 100, 132]))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Random features over random tables: some shared, widths that are no power of two, sum and mean."""
    shared = [
        TableSpec(name=f"shared{t}", num_rows=draw(st.integers(1, 12)), width=draw(WIDTHS))
        for t in range(draw(st.integers(0, 2)))
    ]
    features = [
        SparseFeatureSpec(name=f"f{i}", table=table.name, pooling=draw(st.sampled_from(["sum", "mean"])))
        for i, table in enumerate(shared)
        for _ in [0]
    ]
    for i in range(draw(st.integers(0 if features else 1, 4))):
        pooling = draw(st.sampled_from(["sum", "mean"]))
        if shared and draw(st.booleans()):
            table = draw(st.sampled_from(shared))
            features.append(SparseFeatureSpec(name=f"g{i}", table=table.name, pooling=pooling))
        else:
            rows, width = draw(st.integers(1, 12)), draw(WIDTHS)
            features.append(SparseFeatureSpec(name=f"g{i}", num_rows=rows, width=width, pooling=pooling))
    spec = FeaturesSpec(sparse=tuple(features), tables=tuple(shared))
    return layout_of(spec, tables_of(spec, width=4))


@st.composite
def history_layouts(draw: st.DrawFn) -> Layout:
    """The same with some histories, at least one."""
    layout = draw(layouts())
    every = range(layout.num_features)
    histories = draw(st.sets(st.sampled_from(every), min_size=1))
    tables = {layout.table_of[feature] for feature in histories}
    return dataclasses.replace(
        layout,
        is_mean=tuple(layout.is_mean[feature] and layout.table_of[feature] not in tables for feature in every),
        is_history=tuple(feature in histories for feature in every),
    )


@st.composite
def sparse_batches(draw: st.DrawFn, layout: Layout, weighted: bool) -> Sparse:
    """Random bags, empty ones and repeated ids included."""
    num_samples = draw(st.integers(1, 4))
    lengths, ids = [], []
    for table in layout.table_of:
        for _ in range(num_samples):
            bag = draw(st.lists(st.integers(0, layout.tables[table].num_rows - 1), max_size=5))
            lengths.append(len(bag))
            ids.extend(bag)
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    weights = None
    if weighted:
        numbers = draw(st.lists(st.floats(-2, 2), min_size=len(ids), max_size=len(ids)))
        weights = torch.tensor(numbers, dtype=torch.float64)
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return Sparse(ids=torch.tensor(ids, dtype=dtype), offsets=offsets, num_features=layout.num_features, weights=weights)


def optimizers(kind: str) -> st.SearchStrategy[SparseOptimizerSpec]:
    """Row optimizers of one kind, with and without clipping and decays."""
    clips, decays = st.sampled_from([None, 0.5]), st.sampled_from([0.0, 0.3])
    return st.builds(SparseOptimizerSpec, kind=st.just(kind), eps=st.just(1e-3), clip=clips, l2=decays, weight_decay=decays)


def fixed_layout() -> Layout:
    """Three features over two tables, one of them shared."""
    shared = TableSpec(name="shared", num_rows=9, width=6)
    features = (
        SparseFeatureSpec(name="a", table="shared"),
        SparseFeatureSpec(name="b", num_rows=7, width=4, pooling="mean"),
        SparseFeatureSpec(name="c", table="shared", pooling="mean"),
    )
    spec = FeaturesSpec(sparse=features, tables=(shared,))
    return layout_of(spec, tables_of(spec, width=4))


def fixed_batch(layout: Layout, *, seed: int, num_samples: int = 5) -> Sparse:
    """Bags of 0 to 3 random ids."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, layout.num_features * num_samples)
    num_rows = np.repeat([layout.tables[table].num_rows for table in layout.table_of], num_samples)
    ids = torch.from_numpy(rng.integers(0, np.repeat(num_rows, lengths)))
    return Sparse(ids=ids, offsets=torch.tensor([0, *np.cumsum(lengths)]), num_features=layout.num_features)


class PlainStore:
    """The contract, word for word, over NumPy: one row at a time."""

    def __init__(self, layout: Layout, state: Mapping[str, torch.Tensor], optimizer: SparseOptimizerSpec) -> None:
        self.layout, self.optimizer = layout, optimizer
        self.rows = [state[f"{table.name}.rows"].double().cpu().numpy().copy() for table in layout.tables]
        zeros = [np.zeros_like(rows) for rows in self.rows]
        self.first, self.second = zeros, [np.zeros_like(rows) for rows in self.rows]

    def shares(self, sparse: Sparse):  # type: ignore[no-untyped-def]
        """(feature, vector, table, row, share of the row in the vector) of each id; a history has a vector for each id."""
        count = sparse.num_samples
        for feature, table in enumerate(self.layout.table_of):
            first = int(sparse.offsets[feature * count])
            for example in range(count):
                start, stop = sparse.offsets[feature * count + example : feature * count + example + 2].tolist()
                for index in range(start, stop):
                    share = 1.0 if sparse.weights is None else float(sparse.weights[index])
                    if self.layout.is_mean[feature]:
                        share /= stop - start
                    vector = index - first if self.is_history(feature) else example
                    yield feature, vector, table, int(sparse.ids[index]), share

    def is_history(self, feature: int) -> bool:
        return bool(self.layout.is_history) and self.layout.is_history[feature]

    def vectors(self, sparse: Sparse) -> list[np.ndarray]:
        """Those of each feature: [B, D], or of a history [its ids, D]."""
        count, found = sparse.num_samples, []
        for feature, table in enumerate(self.layout.table_of):
            num_ids = int(sparse.offsets[(feature + 1) * count] - sparse.offsets[feature * count])
            found.append(np.zeros((num_ids if self.is_history(feature) else count, self.layout.tables[table].width)))
        for feature, vector, table, row, share in self.shares(sparse):
            found[feature][vector] += share * self.rows[table][row]
        return found

    def lookup(self, sparse: Sparse) -> np.ndarray:
        return np.concatenate(self.vectors(sparse), axis=1)

    def update(self, sparse: Sparse, grad: np.ndarray, lr: float, step: int) -> None:
        self.update_vectors(sparse, np.split(grad, self.layout.columns[1:-1], axis=1), lr, step)

    def update_vectors(self, sparse: Sparse, grads: Sequence[np.ndarray], lr: float, step: int) -> None:
        summed: dict[tuple[int, int], np.ndarray] = {}
        for feature, vector, table, row, share in self.shares(sparse):
            part = grads[feature][vector]
            if self.optimizer.clip is not None:
                part = part * min(1.0, self.optimizer.clip / max(np.linalg.norm(part), 1e-300))
            summed[table, row] = summed.get((table, row), 0.0) + share * part
        for (table, row), g in summed.items():
            before = self.rows[table][row].copy()
            self.rows[table][row] -= self.change(table, row, g + self.optimizer.l2 * before, lr, step)
            self.rows[table][row] -= lr * self.optimizer.weight_decay * before

    def change(self, table: int, row: int, g: np.ndarray, lr: float, step: int) -> np.ndarray:
        o, first, second = self.optimizer, self.first[table], self.second[table]
        if o.kind == "sgd":
            return lr * g
        if o.kind == "momentum":
            first[row] = o.momentum * first[row] + g
            return lr * first[row]
        if o.kind in ("adam", "rowwise_adam"):
            first[row] = o.beta1 * first[row] + (1 - o.beta1) * g
            second[row] = o.beta2 * second[row] + (1 - o.beta2) * (g * g if o.kind == "adam" else (g * g).mean())
            return lr * np.sqrt(1 - o.beta2**step) / (1 - o.beta1**step) * first[row] / (np.sqrt(second[row]) + o.eps)
        assert o.kind in ("adagrad", "rowwise_adagrad")
        second[row] += g * g if o.kind == "adagrad" else (g * g).mean()
        return lr * g / (np.sqrt(second[row]) + o.eps)


class StoreContract:
    """Inherit and give `make`; pytest then runs every promise of the contract against that store."""

    device = "cpu"
    """Where the store keeps its rows and expects its batches."""
    same_bits = True
    """Whether two stores of one state train to the same bits."""
    has_snapshots = False
    """Whether the state can be read while training goes on."""

    def make(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> EmbeddingStore:
        raise AssertionError("a store's tests say how to make it")

    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_lookups_and_updates_are_exact(self, kind: str, data: st.DataObject) -> None:
        self.check_exact(kind, data)

    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=10, deadline=None)
    @given(data=st.data())
    def test_a_store_that_loads_the_state_continues_the_same(self, kind: str, data: st.DataObject) -> None:
        self.check_loads_state(kind, data)

    @pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam"])
    @settings(max_examples=8, deadline=None)
    @given(data=st.data())
    def test_a_snapshot_holds_what_was_there_whatever_is_trained_meanwhile(self, kind: str, data: st.DataObject) -> None:
        self.check_snapshot(kind, data)

    def test_started_lookups_and_updates_equal_immediate_ones(self) -> None:
        layout = fixed_layout()
        first, second = (self.make(layout, SparseOptimizerSpec(kind="rowwise_adagrad"), torch.float32) for _ in range(2))
        second.load_state({name: value.clone() for name, value in first.state().items()})
        for step in (1, 2):
            sparse = fixed_batch(layout, seed=step).to(self.device)
            pooled, waited = first.lookup(sparse), second.start_lookup(sparse)()
            torch.testing.assert_close(waited, pooled)
            first.update(sparse, pooled.detach() + 1, lr=0.1, step=step)
            second.start_update(sparse, pooled.detach() + 1)(0.1, step)
        for store in (first, second):
            store.flush()
        for name, value in first.state().items():
            torch.testing.assert_close(value, second.state()[name])

    def test_a_store_describes_itself_and_closes(self) -> None:
        layout = fixed_layout()
        store = self.make(layout, SparseOptimizerSpec(), torch.float32)
        assert isinstance(store, EmbeddingStore)
        assert (store.layout, store.tables) == (layout, layout.tables)
        assert store.kernel != "none"
        assert store.batches_ahead >= 0
        assert all(isinstance(value, (int, float)) for value in store.figures().values())
        sparse = fixed_batch(layout, seed=1).to(self.device)
        assert store.check_batch(sparse).ids is sparse.ids
        store.limit_prefetch(1)
        store.prefetch(sparse)
        store.drop_prefetched()
        other = store.copy_for_thread()
        torch.testing.assert_close(other.lookup(sparse), store.lookup(sparse))
        if other is not store:
            other.close()
        store.close()

    def check_exact(self, kind: str, data: st.DataObject) -> None:
        layout = data.draw(layouts())
        optimizer = data.draw(optimizers(kind))
        store = self.make(layout, optimizer, torch.float64)
        plain = PlainStore(layout, store.state(), optimizer)
        weighted = data.draw(st.booleans())
        for step in range(1, 4):
            sparse = data.draw(sparse_batches(layout, weighted))
            here = sparse.to(self.device)
            store.prefetch(here)
            np.testing.assert_allclose(store.lookup(here).cpu().numpy(), plain.lookup(sparse), rtol=1e-9, atol=1e-12)
            rng = np.random.default_rng(step)
            grad = rng.normal(size=(sparse.num_samples, layout.total_width))
            store.update(here, torch.from_numpy(grad).to(self.device), lr=0.1, step=step)
            plain.update(sparse, grad, 0.1, step)
        for table, rows in zip(layout.tables, plain.rows, strict=True):
            ours = store.rows(table.name, torch.arange(table.num_rows, device=self.device)).cpu().numpy()
            np.testing.assert_allclose(ours, rows, rtol=1e-9, atol=1e-12)

    def check_loads_state(self, kind: str, data: st.DataObject) -> None:
        layout = data.draw(layouts())
        optimizer = SparseOptimizerSpec(kind=kind)
        first = self.make(layout, optimizer, torch.float32)
        for step in (1, 2):
            self._train(first, data.draw(sparse_batches(layout, weighted=False)), step)
        second = self.make(layout, optimizer, torch.float32)
        second.load_state({name: value.clone() for name, value in first.state().items()})
        sparse = data.draw(sparse_batches(layout, weighted=False))
        self._train(first, sparse, 3)
        self._train(second, sparse, 3)
        for name, value in first.state().items():
            if self.same_bits:
                assert torch.equal(value, second.state()[name]), name
            else:
                torch.testing.assert_close(value, second.state()[name])

    def check_snapshot(self, kind: str, data: st.DataObject) -> None:
        layout = data.draw(layouts())
        store = self.make(layout, SparseOptimizerSpec(kind=kind), data.draw(st.sampled_from([torch.float32, torch.float64])))
        self._train(store, data.draw(sparse_batches(layout, weighted=False)), 1)
        for _ in range(2):
            before = {name: value.clone().cpu() for name, value in store.state().items()}
            snapshot = store.snapshot()
            assert (snapshot is not None) == self.has_snapshots
            if snapshot is None:
                return
            reads = []
            for part in snapshot.parts:
                middle = data.draw(st.integers(0, part.num_rows))
                reads += [(part, 0, middle, False), (part, middle, part.num_rows, data.draw(st.booleans()))]
            for step, (part, start, stop, is_taken) in enumerate(data.draw(st.permutations(reads)), 2):
                self._train(store, data.draw(sparse_batches(layout, weighted=False)), step)
                some = part.take(torch.arange(start, stop)) if is_taken else part.read(start, stop)
                rows = slice(part.first_row + start, part.first_row + stop)
                columns = slice(part.first_column, part.first_column + part.num_columns)
                assert torch.equal(some.cpu(), before[part.name][rows, columns]), part.name
            snapshot.close()

    def _train(self, store: EmbeddingStore, sparse: Sparse, step: int) -> None:
        sparse = sparse.to(self.device)
        store.update(sparse, store.lookup(sparse).detach() + 1, lr=0.1, step=step)


class HistoryContract(StoreContract):
    """The same promises for layouts with histories, whose rows are looked up and updated one by one."""

    def make_with_histories(self, layout: Layout, optimizer: SparseOptimizerSpec, dtype: torch.dtype) -> EmbeddingStore:
        parts = HistoryLayout(layout)
        return HistoryStore(parts, [self.make(one, optimizer, dtype) for one in parts.stores])

    @pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam"])
    @settings(max_examples=5, deadline=None)
    @given(data=st.data())
    def test_rows_of_histories_are_looked_up_and_updated_one_by_one(self, kind: str, data: st.DataObject) -> None:
        layout, optimizer = data.draw(history_layouts()), data.draw(optimizers(kind))
        store, parts = self.make_with_histories(layout, optimizer, torch.float64), HistoryLayout(layout)
        plain = PlainStore(layout, store.state(), optimizer)
        weighted = data.draw(st.booleans())
        for step in range(1, 4):
            sparse = data.draw(sparse_batches(layout, weighted))
            here = sparse.to(self.device)
            store.prefetch(here)
            flat = store.lookup(here).detach().cpu().requires_grad_()
            vectors, rng = parts.unpack(flat, sparse), np.random.default_rng(step)
            grads = [rng.normal(size=vector.shape) for vector in vectors]
            for vector, expected in zip(vectors, plain.vectors(sparse), strict=True):
                np.testing.assert_allclose(vector.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
            torch.autograd.backward(vectors, [torch.from_numpy(grad) for grad in grads])
            assert flat.grad is not None
            store.update(here, flat.grad.to(self.device), lr=0.1, step=step)
            plain.update_vectors(sparse, grads, 0.1, step)
        for table, rows in zip(layout.tables, plain.rows, strict=True):
            ours = store.rows(table.name, torch.arange(table.num_rows, device=self.device)).cpu().numpy()
            np.testing.assert_allclose(ours, rows, rtol=1e-9, atol=1e-12)


class BriefStoreContract(StoreContract):
    """The same promises over fewer random cases, for stores that run slowly where they are tested."""

    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=4, deadline=None)
    @given(data=st.data())
    def test_lookups_and_updates_are_exact(self, kind: str, data: st.DataObject) -> None:
        self.check_exact(kind, data)

    @pytest.mark.parametrize("kind", ["rowwise_adagrad"])
    @settings(max_examples=1, deadline=None)
    @given(data=st.data())
    def test_a_snapshot_holds_what_was_there_whatever_is_trained_meanwhile(self, kind: str, data: st.DataObject) -> None:
        self.check_snapshot(kind, data)

    @pytest.mark.parametrize("kind", ["rowwise_adagrad"])
    @settings(max_examples=2, deadline=None)
    @given(data=st.data())
    def test_a_store_that_loads_the_state_continues_the_same(self, kind: str, data: st.DataObject) -> None:
        self.check_loads_state(kind, data)
