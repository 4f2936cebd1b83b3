"""What every `Source` must do. A test class inherits `SourceContract` and says how to make one."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import closing

import pytest
import torch

from rowstead.data.batch import Batch
from rowstead.data.source import Batches, Source

BATCH_SIZE = 64
NUM_SAMPLES = 500


class SourceContract:
    """Inherit and override the fixture `source`: a fresh source of `NUM_SAMPLES` labelled examples."""

    @pytest.fixture
    def source(self) -> Source:
        raise NotImplementedError

    def test_an_epoch_has_every_example_in_full_batches_but_the_last(self, source: Source) -> None:
        sizes = [batch.num_samples for batch, _ in source.batches(BATCH_SIZE)]
        assert source.num_samples == NUM_SAMPLES == sum(sizes)
        assert set(sizes[:-1]) == {BATCH_SIZE}

    def test_reading_again_gives_the_same_batches(self, source: Source) -> None:
        assert_same(source.batches(BATCH_SIZE, epoch=1), source.batches(BATCH_SIZE, epoch=1))

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_ranks_together_read_every_example_once(self, source: Source, world_size: int) -> None:
        everything = sorted(examples(list(source.batches(BATCH_SIZE))))
        shares = [examples(list(source.batches(BATCH_SIZE, rank=r, world_size=world_size))) for r in range(world_size)]
        assert sorted(example for share in shares for example in share) == everything
        assert max(map(len, shares)) - min(map(len, shares)) <= 1

    def test_a_cursor_continues_right_after_its_batch(self, source: Source) -> None:
        batches = list(source.batches(BATCH_SIZE, epoch=2))
        for done in (1, 3, len(batches)):
            assert_same(source.batches(BATCH_SIZE, epoch=2, cursor=batches[done - 1][1]), iter(batches[done:]))

    def test_closing_an_iterator_stops_its_threads(self, source: Source) -> None:
        before = threading.active_count()
        with closing(source.batches(BATCH_SIZE)) as batches:
            next(batches)
        assert threading.active_count() == before

    def test_nothing_was_skipped_in_a_log_without_bad_rows(self, source: Source) -> None:
        list(source.batches(BATCH_SIZE))
        assert not source.num_skipped
        assert source.background_cpu_s_per_sample >= 0

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_local_shares_make_up_the_batches_of_one_process(self, source: Source, world_size: int) -> None:
        expected = list(source.batches(BATCH_SIZE, epoch=1))
        shares = [list(source.local_share(rank, world_size).batches(BATCH_SIZE, epoch=1)) for rank in range(world_size)]
        assert all(len(own) == len(expected) for own in shares)
        for i, (batch, cursor) in enumerate(expected):
            own = [share[i] for share in shares]
            assert all(after == cursor for _, after in own)
            assert examples(own) == examples([(batch, cursor)])
            for part, _ in own:
                *totals, of_tasks = dataclasses.astuple(part.totals)
                *expected, expected_of_tasks = dataclasses.astuple(batch.totals)
                assert [*totals, *of_tasks] == pytest.approx([*expected, *expected_of_tasks])

    def test_a_local_share_resumes_at_the_cursor_of_one_process(self, source: Source) -> None:
        _, cursor = list(source.batches(BATCH_SIZE))[2]
        batch, _ = next(source.batches(BATCH_SIZE, cursor=cursor))
        part, _ = next(source.local_share(1, 2).batches(BATCH_SIZE, cursor=cursor))
        assert torch.equal(part.dense, batch.dense[BATCH_SIZE // 2 :])

    def test_a_local_share_may_be_empty(self, source: Source) -> None:
        last = list(source.local_share(0, 4).batches(166))[-1][0]  # 166, 166, 166 and 2 examples
        assert (last.num_samples, last.totals.num_samples) == (0, 2)
        assert last.sparse.num_samples == 0

    def test_map_applies_functions_in_order_and_leaves_the_source_as_it_was(self, source: Source) -> None:
        before = list(source.batches(BATCH_SIZE))
        mapped = source.map(lambda b: dataclasses.replace(b, dense=b.dense + 1))
        mapped = mapped.map(lambda b: dataclasses.replace(b, dense=b.dense * 2))
        for (found, after), (batch, cursor) in zip(mapped.batches(BATCH_SIZE), before, strict=True):
            assert after == cursor
            assert torch.equal(found.dense, (batch.dense + 1) * 2)
        assert_same(source.batches(BATCH_SIZE), iter(before))

    def test_a_function_mapped_before_the_local_share_sees_the_whole_batch(self, source: Source) -> None:
        sizes = set()

        def note(batch: Batch) -> Batch:
            sizes.add(batch.num_samples)
            return batch

        part, _ = next(source.map(note).local_share(0, 2).batches(BATCH_SIZE))
        assert part.num_samples == BATCH_SIZE // 2
        assert BATCH_SIZE // 2 not in sizes

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
    def test_pinned_batches_are_the_same_batches(self, source: Source) -> None:
        found = list(source.pin_memory().batches(BATCH_SIZE))
        assert all(tensor.is_pinned() for batch, _ in found for tensor in batch.tensors())
        assert_same(iter(found), source.batches(BATCH_SIZE))


def examples(batches: list[tuple[Batch, dict[str, int]]]) -> list[tuple[object, ...]]:
    """Every example as plain values: dense, label, weight, and the ids of each feature."""
    found: list[tuple[object, ...]] = []
    for batch, _ in batches:
        assert batch.labels is not None
        weights = batch.labels if batch.weights is None else batch.weights
        offsets, ids, size = batch.sparse.offsets.tolist(), batch.sparse.ids.tolist(), batch.num_samples
        for b in range(size):
            bags = [ids[offsets[f * size + b] : offsets[f * size + b + 1]] for f in range(batch.sparse.num_features)]
            found.append((batch.dense[b].tolist(), float(batch.labels[b]), float(weights[b]), bags))
    return found


def assert_same(found: Batches | object, expected: Batches | object) -> None:
    """Batches and cursors are equal, in order."""
    pairs = list(zip(found, expected, strict=True))  # type: ignore[call-overload]
    for (mine, after), (other, cursor) in pairs:
        assert after == cursor
        assert examples([(mine, after)]) == examples([(other, cursor)])
