"""Steps in several processes are those of one, whatever their shares of a batch hold."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from rowstead.data.batch import Batch, Sparse
from rowstead.distributed.process_group import SINGLE_PROCESS, ProcessGroup, SingleProcess, Work
from rowstead.distributed.sharded_store import ShardedStore
from rowstead.distributed.sharding import plan_shards
from rowstead.kernels.layout import Layout, layout_of
from rowstead.nn.dlrm import DLRM, DLRMNetwork
from rowstead.nn.histories import HistoryNetwork
from rowstead.spec.encoders import EncoderSpec
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.model import ModelSpec
from rowstead.spec.parse import parse
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.train import TrainSpec
from rowstead.stores.device import DeviceStore
from rowstead.stores.histories import HistoryLayout, HistoryStore
from rowstead.training import sharded_step
from rowstead.training.step import Stepper
from tests.distributed.thread_process_group import in_threads

NUM_ROWS, WIDTH, MAX_IDS = 20, 8, 7
ENCODERS = {
    "attention": EncoderSpec(kind="attention", layers=2),
    "din": EncoderSpec(target="item", hidden=(5,)),
    "din softmax": EncoderSpec(target="item", hidden=(5,), softmax=True),
}


def batch_of(lengths: list[int]) -> Batch:
    """Examples with histories of these lengths."""
    count, generator = len(lengths), torch.Generator().manual_seed(len(lengths))
    offsets = torch.tensor([0] + [1] * (2 * count) + lengths).cumsum(0)
    ids = torch.randint(0, NUM_ROWS, (int(offsets[-1]),), generator=generator)
    sparse = Sparse(ids=ids, offsets=offsets, num_features=3)
    dense = torch.randn(count, 2, dtype=torch.float64, generator=generator)
    return Batch(dense=dense, sparse=sparse, labels=torch.arange(count).remainder(2).double())


def model_of(encoder: EncoderSpec, process_group: ProcessGroup = SINGLE_PROCESS) -> DLRM:
    """A model whose tables are replicated in all processes."""
    features = FeaturesSpec(
        dense=(DenseFeatureSpec(name="a"), DenseFeatureSpec(name="b")),
        sparse=(
            SparseFeatureSpec(name="item", num_rows=NUM_ROWS, max_ids=1),
            SparseFeatureSpec(name="device", num_rows=NUM_ROWS, max_ids=1),
            SparseFeatureSpec(name="history", num_rows=NUM_ROWS, pooling="none", max_ids=MAX_IDS, encoder=encoder),
        ),
    )
    layout = layout_of(features, tables_of(features, width=WIDTH))
    optimizer = SparseOptimizerSpec(kind="adam", lr=0.1)
    make = partial(DeviceStore, dtype=torch.float64)

    def build(own: Layout) -> DeviceStore | ShardedStore:
        if process_group.world_size == 1:
            return make(own, optimizer)
        plan = plan_shards(own, {table.name: "replicate" for table in own.tables}, process_group.world_size)
        return ShardedStore(plan, optimizer, process_group, make, dtype=torch.float64)

    parts = HistoryLayout(layout)
    store = HistoryStore(parts, [build(one) for one in parts.stores])
    network = parse(ModelSpec, {"width": WIDTH, "bottom": [6], "top": [6]})
    model, generator = DLRM(network, features, store).double(), torch.Generator().manual_seed(1)  # threads share the global one
    for parameter in model.net.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def trained(encoder: EncoderSpec, batches: list[Batch], process_group: ProcessGroup) -> dict[str, Tensor]:
    """Weights after a step with each batch."""
    train = parse(TrainSpec, {"dense_optimizer": {"kind": "adam", "lr": 0.01}})
    stepper = Stepper(model_of(encoder, process_group), train, total_steps=100, process_group=process_group)
    for number, batch in enumerate(batches, start=1):
        stepper.step(batch.local_share(process_group.rank, process_group.world_size), number)
    return stepper.state()


@pytest.mark.parametrize("bucket_bytes", [1, sharded_step.BUCKET_BYTES], ids=["many buckets", "one bucket"])
@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=list(ENCODERS))
def test_a_share_without_ids_of_histories_or_without_examples_sends_its_gradients_in_the_same_order(
    encoder: EncoderSpec, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_step, "BUCKET_BYTES", bucket_bytes)
    lengths = [[0, 0, 0, 7, 2, 1], [3, 1, 0, 0], [0, 0, 0, 0], [5]]
    batches = [batch_of(each) for each in lengths]
    alone = trained(encoder, batches, SINGLE_PROCESS)
    for together in in_threads(2, partial(trained, encoder, batches)):
        assert together.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(together[name], value, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


class CountingGroup(SingleProcess):
    """Counts the sums that were started."""

    num_sums = 0

    def start_all_reduce(self, tensor: Tensor, *, of_rows: bool = False) -> Work:
        self.num_sums += 1
        return super().start_all_reduce(tensor, of_rows=of_rows)


def test_gradients_of_the_network_are_sent_before_those_of_encoders_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_step, "BUCKET_BYTES", 1)
    model, batch, process_group = model_of(ENCODERS["attention"]), batch_of([3, 0, 2]), CountingGroup()
    assert isinstance(model.net, HistoryNetwork)
    sent: list[int] = []
    for parameter in model.net.encoders.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: sent.append(process_group.num_sums))
    buckets = sharded_step.GradientBuckets(model.net, process_group)
    buckets.begin()
    projected = model.net.project(batch.dense)
    pooled = model.pool(model.store.lookup(batch.sparse), batch.sparse)
    model.net.join(projected, pooled).sum().backward()
    buckets.finish()
    assert isinstance(model.net.network, DLRMNetwork)
    assert min(sent) == len(list(model.net.network.top.parameters()))
    assert process_group.num_sums == len(list(model.net.parameters()))
