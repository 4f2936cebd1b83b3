"""What the benchmarks count and compare; their timings are not tested."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.embedding import SHAPES, Shape, contenders_on
from benchmarks.growth import AXES, BASE, log_ticks
from benchmarks.harness import chosen, publish
from benchmarks.peers import has_fbgemm
from benchmarks.reach import MODELS, QUICK_SIZES, SIZES, run_of
from benchmarks.step import Model, PeerNet, of_recipe
from benchmarks.tasks import score
from rowstead.data.batch import Sparse
from rowstead.spec.data import DataSpec, ParquetSpec
from rowstead.training.build import build_model

SMALL = Shape("small", 3, 50, 8, 4, 5)


def test_bytes_count_every_distinct_row_once() -> None:
    ids = torch.tensor([0, 0, 1, 1, 0, 2])  # two tables, three bags of one id: rows {0, 1} and {0, 1, 2}
    shape = Shape("tiny", 2, 10, 4, 1, 3)
    sparse = Sparse(ids=ids, offsets=torch.arange(7), num_features=2)
    assert shape.distinct_rows(sparse) == 5
    assert shape.lookup_bytes(sparse) == 5 * 16 + 6 * 8 + 6 * 16
    assert shape.both_bytes(sparse) == 2 * 5 * (16 + 4) + 6 * 8 + 2 * 6 * 16


def test_every_contender_of_the_embedding_benchmark_looks_up_and_trains() -> None:
    contenders = contenders_on(SMALL, "cpu")
    assert set(contenders) == {"rowstead", "torch"} | ({"fbgemm"} if has_fbgemm() else set())
    sparse, grad = SMALL.draw("cpu"), torch.ones(5, 24)
    if has_fbgemm():  # the peers share their tables
        torch.testing.assert_close(contenders["fbgemm"].lookup(sparse, grad), contenders["torch"].lookup(sparse, grad))
    for contender in contenders.values():
        before = contender.lookup(sparse, grad)
        assert before.shape == (5, 24)
        contender.both(sparse, grad)
        assert not torch.equal(before, contender.lookup(sparse, grad)), "an update must change what is looked up"


def small_model() -> Model:
    return of_recipe("M1", "m1", num_rows=20, batch_size=6)


def test_the_peer_computes_what_our_model_computes() -> None:
    model = small_model()
    ours = build_model(model.spec(), torch.device("cpu"), trains=True)
    peer, batch = PeerNet(model), model.draw("cpu")
    peer.load_state_dict(ours.net.state_dict(), strict=True)
    assert batch.labels is not None
    expected = binary_cross_entropy_with_logits(ours(batch), batch.labels)
    torch.testing.assert_close(peer(batch.dense, ours.store.lookup(batch.sparse), batch.labels), expected)


def test_operations_are_those_that_torch_counts_but_for_the_unused_half_of_the_products() -> None:
    model = small_model()
    batch, pooled = model.draw("cpu"), torch.rand(6, 30 * 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        PeerNet(model)(batch.dense, pooled, batch.labels).backward()
    num_vectors, size, width = model.num_vectors, 6, 64
    unused = 3 * 2 * size * width * (num_vectors**2 - model.num_pairs)
    assert model.operations() == counter.get_total_flops() - unused


def test_a_result_replaces_one_of_its_day_and_processor_and_none_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.harness.RESULTS", tmp_path)
    options = argparse.Namespace(save=True, json=False, quick=False, device="cpu")
    for figure in (1, 2):
        publish("one", [{"figure": figure}], {}, options)
    (first,) = tmp_path.iterdir()
    assert json.loads(first.read_text())["rows"] == [{"figure": 2}]
    first.write_text(json.dumps({"machine": {"cpu": "another"}}))
    publish("one", [{"figure": 3}], {}, options)
    assert [file.stem for file in sorted(tmp_path.iterdir())] == [first.stem, f"{first.stem}b"]


def test_shapes_are_chosen_by_name() -> None:
    shapes = SHAPES["cpu"]
    assert [s.name for s in chosen(shapes, argparse.Namespace(shapes="M3, M1", quick=True))] == ["M1", "M3"]
    assert len(chosen(shapes, argparse.Namespace(shapes=None, quick=True))) == 2
    assert chosen(shapes, argparse.Namespace(shapes=None, quick=False)) == list(shapes)
    with pytest.raises(SystemExit, match="no shape M9: there are M1, one-hot"):
        chosen(shapes, argparse.Namespace(shapes="M9", quick=False))


@pytest.mark.parametrize(("low", "high", "ends"), [(3, 700, (2, 1000)), (1, 1, (1, 2)), (12, 3e6, (10, 1e7))])
def test_ticks_are_round_and_enclose_the_figures(low: float, high: float, ends: tuple[float, float]) -> None:
    ticks = log_ticks(low, high)
    assert (ticks[0], ticks[-1]) == ends
    assert ticks == sorted(ticks)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_training_from_files_trains_the_model_whose_step_is_measured(device: str) -> None:
    for model in MODELS[device]:
        for size in (SIZES[device], QUICK_SIZES[device]):
            spec = run_of(model, DataSpec(parquet=ParquetSpec(train=("a.parquet",))), device, size.num_samples)
            assert spec.tables == model.spec().tables
            assert spec.model == model.spec().model
            assert spec.train.max_steps == size.num_samples // model.shape.batch_size >= 40, "first steps do not count"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_axis_of_growth_encloses_its_base(device: str) -> None:
    for axis in AXES[device]:
        values = sorted(axis.values)
        assert values == list(axis.values)
        assert values[0] <= getattr(BASE[device].shape, axis.field) <= values[-1]
        assert all(model.spec().tables for model in axis.models(BASE[device]))


def test_scores_of_a_task_are_best_and_without_bias_where_the_model_is_the_teacher() -> None:
    true_p = np.random.default_rng(0).uniform(0.05, 0.6, 1000).astype(np.float32)
    counted = np.arange(1000) % 3 == 0
    logits = np.log(true_p / (1 - true_p))
    right, high = score(logits, true_p, counted), score(logits + 0.5, true_p, counted)
    assert right.ne == pytest.approx(right.ne_best)
    assert right.bias == pytest.approx(0, abs=1e-6)
    assert (high.ne > right.ne, high.bias > 0.2) == (True, True)
