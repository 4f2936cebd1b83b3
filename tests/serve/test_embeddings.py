"""Embedding rows of a trained model as arrays: which row an id has, all rows of a table, and neighbours."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import torch

import rowstead
from rowstead.spec.errors import RowsteadError
from tests.serve.conftest import raw_columns


@pytest.fixture(scope="module")
def model(run):
    return rowstead.load(run)


def test_the_row_of_an_id_is_the_one_that_a_batch_looks_up(model):
    columns = raw_columns(50, seed=2)
    batch = model.encode(columns)
    for index, feature in enumerate(["user", "city"]):
        rows, bounds = model.row_of(feature, columns[feature]), batch.sparse.offsets[index * 50 : index * 50 + 51].tolist()
        expected = [int(batch.sparse.ids[a]) if a < b else -1 for a, b in itertools.pairwise(bounds)]
        assert rows.tolist() == expected
        assert rows.dtype == np.int64
    assert model.row_of("user", np.array([5])).tolist() == model.row_of("user", pd.Series([5])).tolist()
    assert model.row_of("slot", [3, 0]).tolist() == [3, 0]
    assert model.row_of("user", []).tolist() == []


def test_embeddings_are_the_rows_of_the_table_as_float32(model):
    for name, table, width in (("user", "user", 8), ("city", "city", 3), ("seen", "items", 8), ("items", "items", 8)):
        found = model.embeddings(name)
        weights = model.store.state()[f"{table}.rows"].float().numpy()
        np.testing.assert_array_equal(found, weights)
        assert found.shape[1] == width
        assert found.dtype == np.float32
        assert found.flags.c_contiguous
    ids = ["a", None, "ärger", "never seen"]
    rows = model.row_of("city", ids)
    np.testing.assert_array_equal(model.embeddings("city", ids)[[0, 2, 3]], model.embeddings("city")[rows[[0, 2, 3]]])
    assert not model.embeddings("city", ids)[1].any()


def test_embeddings_pool_to_what_the_model_looks_up(model):
    columns = raw_columns(20, seed=4)
    pooled = model.store.lookup(model.encode(columns).sparse).detach()
    np.testing.assert_allclose(model.embeddings("user", columns["user"]), pooled[:, :8].numpy(), atol=1e-7)


def test_neighbours_are_indices_of_the_ids_they_are_among(model):
    among = [f"word {number}" for number in range(30)]
    scores, indices = model.nearest("city", ["word 7", "word 8"], 3, among=among)
    assert scores.shape == indices.shape == (2, 3)
    rows = model.row_of("city", among)
    assert [rows[i] for i in indices[:, 0]] == rows[[7, 8]].tolist()
    np.testing.assert_allclose(scores[:, 0], 1, atol=1e-5)
    _, of_table = model.nearest("city", ["word 7"], 1)
    assert of_table[0, 0] == rows[7]


def test_a_name_or_id_that_does_not_fit_is_an_error(model):
    for call in (lambda: model.embeddings("citty"), lambda: model.row_of("citty", ["a"])):
        with pytest.raises(RowsteadError, match=r"no sparse feature.* `citty`: did you mean `city`\?"):
            call()
    with pytest.raises(RowsteadError, match="`city` was text in training but is an integer here"):
        model.row_of("city", [1])
    with pytest.raises(RowsteadError, match="id 20 is outside its table"):
        model.row_of("slot", [20])
    with pytest.raises(RowsteadError, match="give them one by one"):
        model.row_of("user", [[1, 2]])


def test_many_rows_are_predicted_in_parts(model, monkeypatch):
    columns = raw_columns(100, seed=5)
    whole = model.predict(columns)
    monkeypatch.setattr("rowstead.nn.dlrm.PREDICT_BATCH", 7)
    np.testing.assert_allclose(model.predict(columns), whole, atol=1e-6)
    none = {name: values[:0] for name, values in columns.items()}
    assert model.predict(none).tolist() == []


def test_a_model_of_ones_own_batches_has_no_raw_columns(run):
    model = rowstead.load(run)
    model._encoder = None
    with pytest.raises(RowsteadError, match=r"only a model from `rowstead\.load`"):
        model.embeddings("user")
    assert isinstance(model, torch.nn.Module)
