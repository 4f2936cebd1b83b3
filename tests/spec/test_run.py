"""A whole recipe: sizes, sources, what fits together, and recipes by name or path."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import yaml

from rowstead.data.interests import InterestsLog
from rowstead.spec.errors import RowsteadError, SpecError
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.parse import override, parse
from rowstead.spec.run import RunSpec, find_gpu_recipe, find_recipe, load_recipe, recipe_names
from tests.small_runs import small_plain, small_spec


def problem_of(*assignments: str) -> str:
    with pytest.raises(SpecError) as caught:
        small_spec(*assignments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "path"),
    [
        ("train.batch_size=0", "train.batch_size"),
        ("train.batch_size=-1", "train.batch_size"),
        ("train.epochs=0", "train.epochs"),
        ("train.max_steps=0", "train.max_steps"),
        ("train.eval_every=0", "train.eval_every"),
        ("train.eval_samples=-3", "train.eval_samples"),
        ("train.checkpoint_every=0", "train.checkpoint_every"),
        ("train.keep_checkpoints=0", "train.keep_checkpoints"),
        ("train.full_checkpoint_every=0", "train.full_checkpoint_every"),
        ("train.checkpoint_format=int8", "train.checkpoint_format"),
        ("train.log_every=0", "train.log_every"),
        ("train.sparse_optimizer.lr=0", "train.sparse_optimizer.lr"),
        ("train.sparse_optimizer.lr=.inf", "train.sparse_optimizer.lr"),
        ("train.sparse_optimizer.eps=-1", "train.sparse_optimizer.eps"),
        ("train.dense_optimizer.lr=-0.1", "train.dense_optimizer.lr"),
        ("train.dense_optimizer.beta1=1", "train.dense_optimizer.beta1"),
        ("train.dense_optimizer.beta2=-0.1", "train.dense_optimizer.beta2"),
        ("train.dense_optimizer.clip=0", "train.dense_optimizer.clip"),
        ("train.dense_optimizer.weight_decay=-1", "train.dense_optimizer.weight_decay"),
        ("train.schedule.warmup_steps=-1", "train.schedule.warmup_steps"),
        ("train.schedule.final=1.5", "train.schedule.final"),
        ("model.width=0", "model.width"),
        ("model.top=[8, 0]", "model.top"),
        ("model.bottom=[-8]", "model.bottom"),
        ("model.interaction.cross_layers=0", "model.interaction.cross_layers"),
        ("model.interaction.num_dense_vectors=0", "model.interaction.num_dense_vectors"),
        ("model.interaction.pairs=none", "model.interaction.pairs"),
        ("model.interaction.cross_rank=0", "model.interaction.cross_rank"),
        ("data.synth.num_train_samples=0", "data.synth.num_train_samples"),
        ("data.synth.num_dense=-1", "data.synth.num_dense"),
        ("data.synth.num_skewed_dense=5", "data.synth.num_skewed_dense"),
        ("data.synth.num_ids=0", "data.synth.num_ids"),
        ("data.synth.num_ids=[1, 2]", "data.synth.num_ids"),
        ("data.synth.mean_ids=.inf", "data.synth.mean_ids"),
        ("data.synth.click_rate=1", "data.synth.click_rate"),
        ("data.synth.drift=2", "data.synth.drift"),
        ("data.synth.signal=.inf", "data.synth.signal"),
        ("data.synth.seed=-1", "data.synth.seed"),
        ("data.negative_keep_rate=0", "data.negative_keep_rate"),
        ("data.negative_keep_rate=1.1", "data.negative_keep_rate"),
        ("data.statistics_rows=0", "data.statistics_rows"),
        ("scale=0", "scale"),
        ("scale=.inf", "scale"),
        ("seed=-1", "seed"),
        ("seed=99999999999999999999", "seed"),
        ("threads=0", "threads"),
        ("name=../escape", "name"),
        ("name=", "name"),
        ("name=.hidden", "name"),
    ],
)
def test_a_size_that_cannot_be_is_refused_by_its_path(assignment: str, path: str) -> None:
    assert problem_of(assignment).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("parquet", "path"),
    [
        ("{train: []}", "data.parquet.train"),
        ("{}", "data.parquet.train"),
        ("{train: a, eval_fraction: 1}", "data.parquet.eval_fraction"),
        ("{train: a, shuffle_rows: -1}", "data.parquet.shuffle_rows"),
        ("{train: a, decode_threads: 0}", "data.parquet.decode_threads"),
        ("{train: a, on_bad_row: ignore}", "data.parquet.on_bad_row"),
    ],
)
def test_a_parquet_log_that_cannot_be_is_refused_by_its_path(parquet: str, path: str) -> None:
    assert problem_of("data.synth=null", f"data.parquet={parquet}").startswith(f"{path}: ")


def test_exactly_one_log_must_be_given() -> None:
    says = "data: give exactly one of `synth`, `interests`, `parquet` and `csv`, got "
    assert problem_of("data.parquet.train=a.parquet") == says + "synth and parquet"
    assert problem_of("data.synth=null") == says + "none"


def test_early_stopping_needs_evaluations() -> None:
    assert problem_of("train.early_stop.patience=2") == "train.early_stop: needs `eval_every` to be set"
    assert "patience" in problem_of("train.eval_every=5", "train.early_stop.patience=0")


def test_a_table_width_that_does_not_fit_the_dot_interaction_is_named() -> None:
    problem = problem_of("features.sparse.0.width=4")
    assert "table `sparse_0` has width 4" in problem
    assert "model.width, 8" in problem
    assert "`concat` or `cross`" in problem
    for kind in ("concat", "cross"):
        assert small_spec("features.sparse.0.width=4", f"model.interaction.kind={kind}").tables[0].width == 4


def test_the_dot_interaction_needs_a_pair() -> None:
    alone = ("features.dense=[]", "features.sparse.0.repeat=1")
    assert "needs two vectors" in problem_of(*alone)
    small_spec(*alone, "model.interaction.kind=concat")
    small_spec("features.dense=[]", "features.sparse.0.repeat=2")
    small_spec("features.sparse=[]")


def test_the_chosen_pairs_must_exist() -> None:
    assert "`dense_sparse` needs dense features" in problem_of("features.dense=[]", "model.interaction.pairs=dense_sparse")
    one = ("features.sparse.0.repeat=1", "model.interaction.pairs=sparse_sparse")
    assert problem_of(*one).startswith("model.interaction.pairs: `sparse_sparse` needs two sparse features")
    small_spec("features.dense=[]", "model.interaction.pairs=sparse_sparse")
    small_spec("features.sparse.0.repeat=1", "model.interaction.pairs=dense_sparse")


def test_scale_reaches_the_tables() -> None:
    assert [table.num_rows for table in small_spec("scale=0.1").tables] == [5, 5, 5]


def test_recipes_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert "quickstart" in recipe_names()
    assert load_recipe("quickstart").name == "quickstart"
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(small_plain()))
    assert load_recipe(str(mine), ["seed=5"]) == parse(RunSpec, override(small_plain(), ["seed=5"]))


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RowsteadError, match="`quickstrat`, shipped or as a file: did you mean `quickstart`"):
        find_recipe("quickstrat")


def test_a_mistake_in_a_recipe_names_its_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(small_plain() | {"sede": 1}))
    with pytest.raises(SpecError, match=r"^mine\.yaml: sede: unknown key: did you mean `seed`\?$"):
        load_recipe(str(mine))


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "- a\n- b\n", "just text"])
def test_a_recipe_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    with pytest.raises(SpecError, match=r"mine\.yaml: expected a mapping of keys"):
        load_recipe(str(mine))


def test_a_recipe_changes_its_base(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(small_plain()))
    (tmp_path / "second.yaml").write_text("{base: first.yaml, name: second, train: {batch_size: 7}}")
    changes = {"name": "second", "train": {**small_plain()["train"], "batch_size": 7}}
    assert load_recipe(str(tmp_path / "second.yaml")) == parse(RunSpec, small_plain() | changes)
    (tmp_path / "shipped.yaml").write_text("{base: quickstart, seed: 5}")
    assert load_recipe(str(tmp_path / "shipped.yaml")) == load_recipe("quickstart", ["seed=5"])


def test_a_base_that_cannot_be_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("{base: mine.yaml, seed: 5}")
    with pytest.raises(SpecError, match="names this recipe itself"):
        load_recipe(str(mine))
    mine.write_text("{base: quickstrat, seed: 5}")
    with pytest.raises(RowsteadError, match="did you mean `quickstart`"):
        load_recipe(str(mine))


def test_a_recipe_may_have_a_set_up_for_gpus_beside_it(tmp_path: Path) -> None:
    for name in ("mine", "mine-gpu"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(small_plain()))
    assert find_gpu_recipe(str(tmp_path / "mine.yaml")) == tmp_path / "mine-gpu.yaml"
    assert find_gpu_recipe("quickstart") is None


@pytest.mark.parametrize(
    ("scale", "counts"),
    [(1.0, (20, 15, 1, 6)), (0.25, (10, 8, 1, 3)), (0.01, (2, 2, 1, 2)), (1e-6, (2, 2, 1, 2))],
)
def test_a_fleet_that_follows_the_scale_shrinks_by_its_square_root(scale: float, counts: tuple[int, ...]) -> None:
    whole = FleetSpec(num_trainers=20, num_sparse=15, num_dense=1, num_readers=6, follows_scale=True)
    fleet = whole.at_scale(scale)
    assert (fleet.num_trainers, fleet.num_sparse, fleet.num_dense, fleet.num_readers) == counts
    assert fleet.at_scale(scale) == fleet  # once
    fixed = dataclasses.replace(whole, follows_scale=False)
    assert fixed.at_scale(scale) == fixed


def test_a_dict_is_a_recipe_with_numbers_of_numpy_and_specs_in_it() -> None:
    plain = small_plain()
    assert RunSpec.from_dict(plain) == small_spec()
    assert RunSpec.from_dict(small_spec().to_dict()) == small_spec()
    plain["train"] = {"batch_size": np.int64(64), "epochs": np.int32(1)}
    plain["features"] = small_spec().features
    assert RunSpec.from_dict(plain) == small_spec()
    assert RunSpec.from_dict(plain, ["train.batch_size=32"]).train.batch_size == 32
    with pytest.raises(SpecError, match=r"train\.batch_sise: unknown key: did you mean `batch_size`"):
        RunSpec.from_dict({**plain, "train": {"batch_sise": 3}})
    with pytest.raises(SpecError, match=r"batch_size: expected whole number"):
        RunSpec.from_dict({**plain, "train": {"batch_size": np.float32(1.5)}})


def test_a_dict_may_be_based_on_a_shipped_recipe() -> None:
    spec = RunSpec.from_dict({"base": "quickstart", "train": {"batch_size": 99}})
    assert spec.train.batch_size == 99
    assert spec.model == load_recipe("quickstart").model
    with pytest.raises(RowsteadError, match="no recipe `quickstrt`"):
        RunSpec.from_dict({"base": "quickstrt"})


def test_an_encoder_that_does_not_fit_its_table_is_no_error_of_the_placement() -> None:
    encoder = {"kind": "attention", "heads": 3}
    history = {"name": "history", "num_rows": 9, "pooling": "none", "max_ids": 5, "encoder": encoder}
    with pytest.raises(SpecError, match=r"^features\.sparse `history`\.encoder\.heads: 3 heads do not divide 8"):
        RunSpec.from_dict(small_plain() | {"features": {"sparse": [history]}})


def test_the_mean_length_of_histories_is_that_of_the_log() -> None:
    spec = load_recipe("din").data.interests
    assert spec is not None
    lengths = np.diff(InterestsLog(spec).rows(0, 20_000).offsets[1])
    for most in (1, 7, 20):
        assert spec.mean_ids("history", most) == pytest.approx(np.minimum(lengths, most).mean(), rel=0.03)
    assert spec.mean_ids("history") == spec.mean_ids("history", 10**6) == spec.mean_ids("history", 20)
    assert spec.mean_ids("item") == 1
