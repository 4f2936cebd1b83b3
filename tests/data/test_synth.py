"""The synthetic log: the same rows in any reading order, and the distributions of the spec."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits

from rowstead.data.batch import share_bounds
from rowstead.data.block import RawBlock
from rowstead.data.encode import Encoder
from rowstead.data.synth import SynthLog, SynthSource, SynthSplit, write_parquet
from rowstead.data.transforms import DenseTransforms
from rowstead.spec.data import SynthSpec
from rowstead.spec.errors import DataError, SpecError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of

SMALL = SynthSpec(
    num_train_samples=1_000,
    num_eval_samples=301,
    num_dense=3,
    num_skewed_dense=1,
    num_sparse=3,
    num_ids=(7, 50, 1_000),
    mean_ids=(1.0, 2.5, 4.0),
    lengths="poisson",
)
QUICK = SynthSpec(
    num_train_samples=400_000,
    num_eval_samples=10_000,
    num_sparse=9,
    num_ids=(50, 100, 200, 500, 1_000, 1_000, 2_000, 5_000, 10_000),
    mean_ids=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0),
    skew=1.1,
    lengths="poisson",
    signal=1.8,
    interaction_share=0.3,
)
SELECTED = FeaturesSpec(
    dense=(DenseFeatureSpec(name="count", column="dense_0"), DenseFeatureSpec(name="dense_2")),
    sparse=(
        SparseFeatureSpec(name="sparse_2", num_rows=1_000, hash="none"),
        SparseFeatureSpec(name="small", column="sparse_0", num_rows=7, hash="none"),
    ),
)


log_of = functools.lru_cache(SynthLog)


def source(spec: SynthSpec = SMALL, split: str = "train", features: FeaturesSpec = SELECTED) -> SynthSource:
    tables = tables_of(features, width=4)
    return SynthSource(log_of(spec), Encoder(features, tables, DenseTransforms.learn(features)), split)  # type: ignore[arg-type]


def arrays(block: RawBlock) -> list[np.ndarray]:
    assert block.labels is not None
    assert block.true_p is not None
    lengths = [np.diff(offsets) for offsets in block.offsets]
    return [block.dense, *block.ids, *lengths, block.labels, block.true_p]


def entropy(p: np.ndarray | float) -> float:
    p = np.asarray(p, np.float64)
    return float(np.mean(-p * np.log(p) - (1 - p) * np.log1p(-p)))


def best_ne(block: RawBlock) -> float:
    assert block.true_p is not None
    return entropy(block.true_p) / entropy(float(block.true_p.mean(dtype=np.float64)))


def log_odds(block: RawBlock) -> np.ndarray:
    assert block.true_p is not None
    p = block.true_p.astype(np.float64)
    return np.log(p / (1 - p))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1_301), st.integers(0, 1_301), st.sampled_from([0.0, 0.6]))
def test_rows_drawn_separately_are_the_rows_drawn_in_sequence(one: int, other: int, drift: float) -> None:
    start, stop = min(one, other), max(one, other)
    log = log_of(dataclasses.replace(SMALL, drift=drift))
    whole, part = log.rows(0, log.num_rows), log.rows(start, stop)
    for f in range(3):
        low, high = whole.offsets[f][start], whole.offsets[f][stop]
        np.testing.assert_array_equal(part.ids[f], whole.ids[f][low:high])
        np.testing.assert_array_equal(part.offsets[f], whole.offsets[f][start : stop + 1] - low)
    np.testing.assert_array_equal(part.dense, whole.dense[start:stop])
    np.testing.assert_array_equal(part.true_p, whole.true_p[start:stop])  # type: ignore[index]
    np.testing.assert_array_equal(part.labels, whole.labels[start:stop])  # type: ignore[index]


def test_the_log_is_the_same_as_ever() -> None:
    """A new digest means that all synthetic logs have changed: add it to the changelog."""
    digest = hashlib.sha256()
    for array in arrays(SynthLog(SMALL).rows(0, 500)):
        digest.update(np.ascontiguousarray(array).tobytes())
    assert digest.hexdigest()[:16] == "c2f15e2acc5896ee"


def test_another_seed_is_another_log() -> None:
    one, other = (SynthLog(dataclasses.replace(SMALL, seed=seed)).rows(0, 1_000) for seed in (1, 2))
    assert abs(np.corrcoef(one.dense[:, 1], other.dense[:, 1])[0, 1]) < 0.15
    assert abs(np.corrcoef(log_odds(one), log_odds(other))[0, 1]) < 0.15


def test_selected_columns_are_the_full_logs_columns() -> None:
    log = SynthLog(SMALL)
    whole = log.rows(100, 700)
    part = log.rows(100, 700, dense=["dense_2", "dense_0"], sparse=["sparse_1", "sparse_1"])
    np.testing.assert_array_equal(part.dense, whole.dense[:, [2, 0]])
    assert part.dense.flags.c_contiguous
    np.testing.assert_array_equal(part.ids[0], whole.ids[1])
    np.testing.assert_array_equal(part.ids[1], whole.ids[1])
    np.testing.assert_array_equal(part.true_p, whole.true_p)


def test_an_unknown_column_names_the_nearest() -> None:
    with pytest.raises(DataError, match="no column `sparse_7`: did you mean `sparse_"):
        SynthLog(SMALL).rows(0, 1, sparse=["sparse_7"])
    with pytest.raises(DataError, match="no column"):
        source(features=FeaturesSpec(dense=(DenseFeatureSpec(name="dense_3"),)))


def test_clicks_happen_as_often_as_true_p_says() -> None:
    block = SynthLog(QUICK).rows(0, 200_000)
    assert block.true_p is not None
    assert block.labels is not None
    assert block.true_p.min() > 0
    assert block.true_p.max() < 1
    for rows in np.array_split(np.argsort(block.true_p), 10):
        p = block.true_p[rows].astype(np.float64)
        error = np.sqrt((p * (1 - p)).sum()) / len(rows)
        assert abs(block.labels[rows].mean(dtype=np.float64) - p.mean()) < 4 * error


def test_click_rate_signal_and_best_ne_are_what_the_spec_asks_for() -> None:
    for rate in (0.05, 0.25):
        block = SynthLog(dataclasses.replace(QUICK, click_rate=rate)).rows(0, 100_000)
        assert block.true_p is not None
        assert block.true_p.mean(dtype=np.float64) == pytest.approx(rate, rel=0.04)
        assert log_odds(block).std() == pytest.approx(1.8, rel=0.05)
        assert best_ne(block) < 0.8


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.0, 1.3])
def test_ids_follow_zipfs_law(skew: float) -> None:
    spec = SynthSpec(num_dense=0, num_sparse=1, num_ids=1_000, mean_ids=4.0, skew=skew)
    ids = SynthLog(spec).rows(0, 100_000).ids[0]
    counts = np.sort(np.bincount(ids, minlength=1_000))[::-1]
    assert len(counts) == 1_000
    if skew == 0:
        assert counts[0] < 1.25 * counts.mean()
        return
    slope = np.log(counts[2] / counts[60]) / np.log(61 / 3)
    assert slope == pytest.approx(skew, abs=0.12)
    popular = np.argsort(np.bincount(ids))[::-1][:3]
    assert not {0, 1, 2} & set(popular.tolist())


@pytest.mark.parametrize("num_ids", [1, 2, 3, 1 << 20, 3_000_000_000])
def test_ids_stay_in_range_and_ranks_map_one_to_one(num_ids: int) -> None:
    log = SynthLog(SynthSpec(num_dense=1, num_sparse=1, num_ids=num_ids, skew=0.5))
    ids = log.rows(0, 5_000).ids[0]
    assert ids.min() >= 0
    assert ids.max() < num_ids
    ranks = np.arange(max(0, num_ids - 1_000), num_ids)
    assert len(np.unique(log.population.ids(0, ranks))) == len(ranks)


def test_poisson_lengths_have_the_mean_asked_for_and_the_cap() -> None:
    spec = SynthSpec(num_dense=0, num_sparse=2, mean_ids=(0.7, 8.0), lengths="poisson", max_ids=12)
    lengths = [np.diff(offsets) for offsets in SynthLog(spec).rows(0, 50_000).offsets]
    assert lengths[0].mean() == pytest.approx(0.7, rel=0.02)
    assert lengths[0].var() == pytest.approx(0.7, rel=0.03)
    assert (lengths[0] == 0).mean() == pytest.approx(np.exp(-0.7), rel=0.02)
    assert lengths[1].max() == 12


@pytest.mark.parametrize("lengths", ["fixed", "poisson"])
def test_power_law_lengths_keep_their_mean_over_features(lengths: str) -> None:
    spec = SynthSpec(num_dense=0, num_sparse=30, mean_ids=28.0, length_power=0.8, lengths=lengths)  # type: ignore[arg-type]
    means = SynthLog(spec).population.mean_ids
    assert means.mean() == pytest.approx(28.0, abs=1e-9)
    assert means.max() > 5 * means.min()
    assert means.max() <= 200
    if lengths == "fixed":
        assert (means == np.rint(means)).all()


def test_skewed_dense_columns_come_back_under_log() -> None:
    dense = SynthLog(SMALL).rows(0, 1_000).dense
    assert dense[:, 0].min() > 0
    back = np.log1p(dense[:, 0])
    skewness = [np.mean((x - x.mean()) ** 3) / x.std() ** 3 for x in (dense[:, 0], back)]
    assert skewness[0] > 1
    assert abs(skewness[1]) < 0.25


def features_of(block: RawBlock, num_ids: tuple[int, ...]) -> torch.Tensor:
    """One-hot counts of all ids and the dense values, [R, sum of num_ids + Fd]."""
    columns = [torch.from_numpy(block.dense)]
    for ids, offsets, size in zip(block.ids, block.offsets, num_ids, strict=True):
        rows = np.repeat(np.arange(block.num_rows), np.diff(offsets))
        counts = np.zeros((block.num_rows, size), np.float32)
        np.add.at(counts, (rows, ids), 1.0)
        columns.append(torch.from_numpy(counts))
    return torch.cat(columns, dim=1)


def logistic_ne_over_best(share: float) -> float:
    """NE of a converged logistic regression over the best possible, both under the teacher."""
    spec = dataclasses.replace(QUICK, num_sparse=3, num_ids=(10, 20, 30), mean_ids=1.0, interaction_share=share)
    log = SynthLog(spec)
    train, test = log.rows(0, 30_000), log.rows(30_000, 45_000)
    x, y = features_of(train, spec.num_ids), torch.from_numpy(train.labels)  # type: ignore[arg-type]
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=30, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(x @ weight + bias, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        p = torch.from_numpy(test.true_p)  # type: ignore[arg-type]
        mine = binary_cross_entropy_with_logits(features_of(test, spec.num_ids) @ weight + bias, p)
    assert test.true_p is not None
    return float(mine) / entropy(test.true_p)


def test_a_linear_model_learns_the_log_without_interactions_and_only_that() -> None:
    assert logistic_ne_over_best(0.0) < 1.005
    assert logistic_ne_over_best(0.3) > 1.05


def test_drift_turns_the_teacher_to_something_unrelated() -> None:
    spec = SynthSpec(num_train_samples=1 << 20, num_eval_samples=1, num_sparse=4, num_ids=100, latent=2)

    def seen_at(row: int, drift: float) -> np.ndarray:
        """Log-odds that the teacher of that row gives to the same examples."""
        log = log_of(dataclasses.replace(spec, drift=drift))
        pooled = np.empty((4, 4_000, 2))
        turn = np.repeat(log.teacher.turn(row, 1), 4_000, axis=0)
        for f in range(4):
            offsets = log.population.offsets(f, 0, 4_000)
            log.teacher.pool(f, log.population.ranks(f, 0, offsets), offsets, turn, pooled[f])
        p = log.teacher.click_probability(pooled, log.population.hidden_dense(0, 4_000), turn).astype(np.float64)
        return np.log(p / (1 - p))

    def likeness(drift: float, row: int) -> float:
        return float(np.corrcoef(seen_at(0, drift), seen_at(row, drift))[0, 1])

    last = 1 << 20
    assert likeness(0.0, last) == pytest.approx(1.0)
    assert abs(likeness(1.0, last)) < 0.35
    assert likeness(1.0, last) < likeness(1.0, last // 2) < likeness(1.0, last // 8) < 1
    assert likeness(0.2, last) > 0.8


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 17))
def test_ranks_share_every_row_once_and_evenly(num_samples: int, world_size: int) -> None:
    shares = [range(*share_bounds(num_samples, rank, world_size)) for rank in range(world_size)]
    assert [row for share in shares for row in share] == list(range(num_samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def flattened(batches: list) -> list[np.ndarray]:  # type: ignore[type-arg]
    """Dense values, labels, true_p and first feature's ids of some batches, one after the other."""
    ids = [b.sparse.ids[: b.sparse.offsets[b.num_samples]] for b in batches]
    parts = [[b.dense for b in batches], [b.labels for b in batches], [b.true_p for b in batches], ids]
    return [torch.cat(part).numpy() for part in parts]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_three_ranks_read_what_one_reads(split: str) -> None:
    log = source(split=split)
    single = [batch for batch, _ in log.batches(64)]
    together = [batch for rank in range(3) for batch, _ in log.batches(97, rank=rank, world_size=3)]
    assert sum(b.num_samples for b in single) == log.num_samples == (1_000 if split == "train" else 301)
    for one, other in zip(flattened(single), flattened(together), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_cursor_continues_right_after_its_batch() -> None:
    log = source()
    whole = list(log.batches(64, rank=1, world_size=2))
    for index, (_, cursor) in enumerate(whole):
        rest = list(log.batches(64, epoch=3, rank=1, world_size=2, cursor=cursor))
        assert [c for _, c in rest] == [c for _, c in whole[index + 1 :]]
        if rest:
            assert torch.equal(rest[0][0].dense, whole[index + 1][0].dense)
            assert torch.equal(rest[0][0].sparse.ids, whole[index + 1][0].sparse.ids)


def test_raw_blocks_are_the_first_rows_of_the_split() -> None:
    blocks = list(SynthSplit(SMALL, SELECTED, "eval").raw_blocks(200))
    assert sum(block.num_rows for block in blocks) == 200
    expected = SynthLog(SMALL).rows(1_000, 1_200, dense=["dense_0", "dense_2"], sparse=[])
    np.testing.assert_array_equal(np.concatenate([b.dense for b in blocks]), expected.dense)
    dense_only = list(SynthLog(SMALL).dense_blocks(["dense_0", "dense_2"], "eval", 200))
    np.testing.assert_array_equal(np.concatenate([b.dense for b in dense_only]), expected.dense)


def test_parquet_files_hold_the_rows_of_the_direct_feed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    spec = dataclasses.replace(SMALL, lengths="fixed")
    seen: list[tuple[int, int]] = []
    summary = write_parquet(spec, tmp_path, rows_per_file=400, rows_per_group=150, progress=lambda *n: seen.append(n))
    assert [path.name for path in summary.files["train"]] == [f"train-0000{i}.parquet" for i in range(3)]
    assert summary.num_rows == {"train": 1_000, "eval": 301}
    assert seen[-1] == (1_301, 1_301)
    table = pq.read_table([*summary.files["train"], *summary.files["eval"]])
    log = SynthLog(spec)
    block = log.rows(0, log.num_rows)
    for i in range(3):
        np.testing.assert_array_equal(table[f"dense_{i}"].to_numpy(), block.dense[:, i])
        column = table[f"sparse_{i}"].combine_chunks()
        values = column if i == 0 else column.flatten()
        np.testing.assert_array_equal(values.to_numpy(), block.ids[i])
    np.testing.assert_array_equal(table["label"].to_numpy(), block.labels)
    np.testing.assert_array_equal(table["true_p"].to_numpy(), block.true_p)
    with pytest.raises(DataError, match="already has"):
        write_parquet(spec, tmp_path)
    write_parquet(spec, tmp_path, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 2


def test_bags_of_every_length_survive_parquet(tmp_path) -> None:  # type: ignore[no-untyped-def]
    summary = write_parquet(SMALL, tmp_path)
    column = pq.read_table(list(summary.files["train"]))["sparse_1"].combine_chunks()
    block = SynthLog(SMALL).rows(0, 1_000)
    np.testing.assert_array_equal(column.offsets.to_numpy(), block.offsets[1])
    np.testing.assert_array_equal(column.flatten().to_numpy(), block.ids[1])


def test_logs_of_only_dense_or_only_sparse_columns_still_have_their_signal() -> None:
    for dense, sparse in ((4, 0), (0, 1), (0, 2), (1, 1)):
        block = SynthLog(SynthSpec(num_dense=dense, num_sparse=sparse, num_ids=100, latent=1)).rows(0, 20_000)
        assert log_odds(block).std() == pytest.approx(2.0, rel=0.1)


def test_more_skewed_columns_than_dense_ones_are_refused() -> None:
    with pytest.raises(SpecError, match="num_skewed_dense"):
        SynthSpec(num_dense=2, num_skewed_dense=3)
