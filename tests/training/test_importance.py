"""Permutation importance: what a model relies on is found, what it does not is near zero, and the fast way is the plain one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rowstead.run import Result, train
from rowstead.spec.errors import RowsteadError
from rowstead.training.importance import Sample, importance, measure, take_bags
from rowstead.training.metrics import Evaluation
from rowstead.training.trained import evaluate, open_run
from tests.small_runs import small_spec


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    spec = small_spec("train.epochs=3")
    dense = (
        *spec.features.dense,
        dataclasses.replace(spec.features.dense[0], name="unused", column="dense_0", repeat=1, clip=(5, 6)),
    )
    return train(
        dataclasses.replace(spec, features=dataclasses.replace(spec.features, dense=dense)),
        out=tmp_path_factory.mktemp("runs") / "run",
    )


def test_a_permuted_feature_is_what_evaluation_says_of_the_permuted_examples(finished: Result) -> None:
    trained = open_run(str(finished.folder))
    (batch, _) = next(trained.source().batches(2000))
    sample = Sample.read(trained.source(), 10**6)
    found = measure(trained.model, sample, ["a", "b", "b", "c", "d"], ["x", "y", "z"], permutations=2, seed=3)
    assert found.ne == pytest.approx(evaluate(str(finished.folder)).ne, abs=1e-7)
    assert {one.name for one in found.features} == {"x", "y", "z", "a", "b", "c", "d"}
    random = np.random.default_rng(3)
    increases = []
    for _ in range(2):  # of x, the first that is measured
        order = random.permutation(2000)
        offsets = batch.sparse.offsets.numpy()
        bags = [batch.sparse.ids.numpy()[offsets[row] : offsets[row + 1]] for row in order]
        lengths = np.concatenate([[len(bag) for bag in bags], np.diff(offsets)[2000:]])
        ids = np.concatenate([*bags, batch.sparse.ids.numpy()[offsets[2000] :]])
        sparse = dataclasses.replace(
            batch.sparse,
            ids=batch.sparse.ids.new_tensor(ids),
            offsets=batch.sparse.offsets.new_tensor(np.concatenate([[0], np.cumsum(lengths)])),
        )
        evaluation = Evaluation()
        logits = trained.model(dataclasses.replace(batch, sparse=sparse)).detach().float().numpy()
        assert batch.labels is not None
        evaluation.add(logits, batch.labels.numpy())
        increases.append((evaluation.quality().ne or 0.0) - found.ne)
    (x,) = (one for one in found.features if one.name == "x")
    assert x.ne_increase == pytest.approx(np.mean(increases), abs=1e-7)


def test_features_that_matter_come_first_and_one_without_information_is_zero(finished: Result) -> None:
    found = importance(str(finished.folder), permutations=4)
    increases = [one.ne_increase for one in found.features]
    assert increases == sorted(increases, reverse=True)
    assert found.features[0].low > 0
    by_name = {one.name: one for one in found.features}
    assert set(by_name) == {f"dense_{i}" for i in range(4)} | {f"sparse_{i}" for i in range(3)} | {"unused"}
    assert {by_name["dense_0"].kind, by_name["sparse_0"].kind} == {"dense", "sparse"}
    assert by_name["unused"].ne_increase == by_name["unused"].high == 0, "it has one value in every example"
    assert importance(str(finished.folder), permutations=4) == found, "the same seed gives the same"


def test_intervals_cover_the_mean_of_many_permutations_of_other_examples(finished: Result) -> None:
    trained = open_run(str(finished.folder))
    everything = Sample.read(trained.source(split="train"), 10**6)
    names = ([f"d{i}" for i in range(5)], ["x", "y", "z"])
    truth = {one.name: one.ne_increase for one in measure(trained.model, everything, *names, permutations=3).features}
    covered = total = 0
    for part in range(8):
        rows = np.arange(part, 6400, 8)
        sample = Sample(
            dense=everything.dense[rows],
            bags=tuple(take_bags(bags, rows) for bags in everything.bags),
            labels=everything.labels[rows],
            weights=everything.weights[rows],
        )
        for one in measure(trained.model, sample, *names, permutations=3, seed=part).features:
            covered += one.low <= truth[one.name] <= one.high
            total += 1
    assert covered >= 0.85 * total


def test_a_sample_is_evenly_spaced_and_bounded(finished: Result) -> None:
    source = open_run(str(finished.folder)).source()
    everything, part = Sample.read(source, 10**6), Sample.read(source, 300)
    assert len(part.labels) == 286  # every seventh of 2,000
    assert (part.dense == everything.dense[::7]).all()
    assert (part.labels == everything.labels[::7]).all()


def test_wrong_numbers_are_refused(finished: Result, tmp_path: Path) -> None:
    with pytest.raises(RowsteadError, match="permutations must be at least 2"):
        importance(str(finished.folder), permutations=1)
