"""The compiled router sends each owner what plain torch sends it, and every id arrives once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.batch import Sparse
from rowstead.distributed.router import Router
from rowstead.distributed.sharding import SHARDS, plan_shards
from tests.fleet.sparse_servers import plain_layout


@st.composite
def routed_batches(draw: st.DrawFn) -> tuple[Router, Sparse]:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    layout = plain_layout(*sizes, width=8)
    shards = {table.name: draw(st.sampled_from([s for s in SHARDS if s != "replicate"])) for table in layout.tables}
    lookups = {table.name: draw(st.floats(0.1, 100)) for table in layout.tables}
    plan = plan_shards(layout, shards, draw(st.integers(1, 5)), lookups=lookups)
    lengths = [draw(st.lists(st.integers(0, 4), min_size=3, max_size=3)) for _ in range(layout.num_features)]
    ids = [
        draw(st.integers(0, layout.tables[layout.table_of[feature]].num_rows - 1))
        for feature, bags in enumerate(lengths)
        for _ in range(sum(bags))
    ]
    flat = torch.tensor(lengths).flatten()
    sparse = Sparse(
        ids=torch.tensor(ids, dtype=draw(st.sampled_from([torch.int64, torch.int32]))),
        offsets=torch.cat([flat.new_zeros(1), flat.cumsum(0)]),
        num_features=layout.num_features,
        weights=torch.rand(len(ids)) if draw(st.booleans()) else None,
    )
    return Router(layout, plan.pieces), sparse


@settings(max_examples=100, deadline=None)
@given(given=routed_batches())
def test_compiled_and_plain_routing_agree(given: tuple[Router, Sparse]) -> None:
    router, sparse = given
    for ours, plain in zip(router.route(sparse), router.route_by_torch(sparse), strict=True):
        torch.testing.assert_close(ours.ids, plain.ids, rtol=0, atol=0)
        torch.testing.assert_close(ours.lengths.long(), plain.lengths.long(), rtol=0, atol=0)
        assert (ours.weights is None) == (sparse.weights is None)
        if ours.weights is not None:
            torch.testing.assert_close(ours.weights, plain.weights, rtol=0, atol=0)


@settings(max_examples=50, deadline=None)
@given(given=routed_batches())
def test_every_id_of_a_table_that_is_not_cut_by_columns_reaches_one_owner(given: tuple[Router, Sparse]) -> None:
    router, sparse = given
    lengths = sparse.offsets.diff().view(sparse.num_features, -1)
    reached = torch.zeros_like(lengths)
    owners = torch.zeros(sparse.num_features, dtype=torch.int64)
    for features, routed in zip(router.features, router.route(sparse), strict=True):
        reached[features] += routed.lengths
        owners[features] += 1
    copies = torch.where(torch.from_numpy(router.is_split), 1, owners)
    assert torch.equal(reached, lengths * copies.unsqueeze(1))
