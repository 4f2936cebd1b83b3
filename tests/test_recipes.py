"""Every shipped recipe says what it is, is parsed and takes two steps; those of published models have the published shapes."""

from __future__ import annotations

import dataclasses
import math
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rowstead import run
from rowstead.data import criteo, movielens
from rowstead.spec.parse import override, parse
from rowstead.spec.run import RECIPES, RunSpec, load_recipe, read_recipe, recipe_names

GENRES = ("Action", "Comedy", "Drama", "Horror", "Musical", "Romance", "Sci-Fi", "Western")


def write_criteo(folder: Path, num_lines: int = 400) -> None:
    """A small log in the layout of Criteo's text, every tenth field empty, converted to `folder`."""
    rng = np.random.default_rng(1)
    lines = []
    for _ in range(num_lines):
        integers = [str(n) for n in rng.poisson(5, 13) - 1]
        ids = [f"{n:08x}" for n in rng.integers(0, 1 << 32, 26)]
        fields = [field if rng.random() > 0.1 else "" for field in integers + ids]
        lines.append("\t".join([str(rng.integers(0, 2)), *fields]))
    text = folder.parent / "train.txt"
    text.write_text("\n".join(lines) + "\n")
    criteo.convert([text], folder)


def write_movielens(folder: Path, *, num_users: int = 40, num_items: int = 30, num_ratings: int = 400) -> None:
    """A small archive in the layout of ml-1m, converted to `folder`; each user has genres that he likes and others that he does not."""
    rng = np.random.default_rng(1)
    genres = [rng.choice(len(GENRES), rng.integers(1, 4), replace=False) for _ in range(num_items)]
    taste = rng.normal(0, 1.5, (num_users, len(GENRES)))
    appeal = rng.normal(0, 0.7, num_items)
    movies, users, ratings = [], [], []
    for item, of_item in enumerate(genres):
        movies.append(f"{item + 1}::Movie {item + 1} ({rng.integers(1930, 2001)})::{'|'.join(GENRES[g] for g in of_item)}")
    for user in range(num_users):
        age, occupation, code = rng.choice([1, 18, 25, 35, 45, 50, 56]), rng.integers(0, 21), rng.integers(10_000, 99_999)
        users.append(f"{user + 1}::{rng.choice(['F', 'M'])}::{age}::{occupation}::{code}")
    for pair in rng.choice(num_users * num_items, num_ratings, replace=False):
        user, item = divmod(int(pair), num_items)
        liking = taste[user, genres[item]].mean() + appeal[item] + rng.normal(0, 0.5)
        ratings.append(
            f"{user + 1}::{item + 1}::{int(np.clip(round(3.5 + liking), 1, 5))}::{978_300_000 + rng.integers(0, 10**7)}"
        )
    archive = folder.parent / "ml-1m.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name, lines in (("movies", movies), ("users", users), ("ratings", ratings)):
            files.writestr(f"ml-1m/{name}.dat", "\n".join(lines) + "\n")
    movielens.convert(archive, folder)


WRITERS: dict[str, Callable[[Path], None]] = {"data/criteo": write_criteo, "data/movielens": write_movielens}
"""What makes the files of the recipes that read Parquet, by the folder that they name."""


def small(name: str) -> RunSpec:
    """A recipe with its tables shrunk, a batch that takes moments and a single process, and nothing else changed."""
    plain = read_recipe(name)
    largest = max(table.num_rows for table in parse(RunSpec, plain).tables)
    changes = [f"scale={min(1.0, 100 / largest)}", "train.batch_size=8", "train.max_steps=2", "data.statistics_rows=64"]
    for log in {"synth", "interests"} & set(plain["data"]):
        changes += [f"data.{log}.num_train_samples=24", f"data.{log}.num_eval_samples=8"]
    return dataclasses.replace(parse(RunSpec, override(plain, changes)), fleet=None)


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_takes_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the paths in a recipe start at the working folder
    spec = small(name)
    if spec.data.parquet is not None:
        folder = Path(spec.data.parquet.train[0]).parent
        assert str(folder) in WRITERS, f"say in WRITERS how to make a small log for {name}"
        folder.parent.mkdir(parents=True)
        WRITERS[str(folder)](folder)
    result = run.train(spec, out=tmp_path / "run")
    assert result.outcome.position.step == 2
    assert result.quality is not None
    assert math.isfinite(result.quality.log_loss)


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_begins_with_what_it_is(name: str) -> None:
    first = (RECIPES / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    assert len(first) > 20


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_is_named_as_its_file(name: str) -> None:
    assert load_recipe(name).name == name


def test_movielens_learns_taste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    write_movielens(Path("data/movielens"), num_users=300, num_items=200, num_ratings=20_000)
    changes = ["train.batch_size=128", "threads=1", "train.checkpoint_every=null"]
    quality = run.train(load_recipe("movielens", changes), out=tmp_path / "run").quality
    assert quality is not None
    assert quality.ne is not None
    assert quality.ne < 0.9


PAPER_MODELS = {
    "m1": (30, 800, 28, 5_700_000, (512,), (512, 512, 512)),
    "m2": (13, 504, 17, 7_300_000, (1024,), (1024, 1024, 512)),
    "m3": (127, 809, 49, 3_700_000, (512,), (512, 256, 512, 256, 512)),
}
"""Sparse and dense features, mean length, mean hash size, bottom and top MLP."""


@pytest.mark.parametrize("suffix", ["", "-gpu"])
@pytest.mark.parametrize("name", list(PAPER_MODELS))
def test_the_papers_models(name: str, suffix: str) -> None:
    num_sparse, num_dense, mean_ids, num_rows, bottom, top = PAPER_MODELS[name]
    spec = load_recipe(name + suffix)
    rows, synth = np.array([table.num_rows for table in spec.tables]), spec.data.synth
    assert synth is not None
    assert (len(rows), len(spec.features.expanded_dense())) == (synth.num_sparse, synth.num_dense) == (num_sparse, num_dense)
    assert (spec.model.bottom, spec.model.top, spec.model.interaction.kind) == (bottom, top, "dot")
    assert rows.mean() == num_rows
    assert (rows.min(), rows.max()) == (30, 20_000_000)
    assert synth.num_ids == tuple(rows)
    assert isinstance(synth.mean_ids, tuple)
    assert np.mean(synth.mean_ids) == pytest.approx(mean_ids)


@pytest.mark.parametrize("name", list(PAPER_MODELS))
def test_lengths_follow_a_power_law_that_table_sizes_do_not_follow(name: str) -> None:
    spec = load_recipe(name)
    assert spec.data.synth is not None
    lengths, rows = np.array(spec.data.synth.mean_ids), np.array([table.num_rows for table in spec.tables])
    falling = np.sort(lengths)[::-1]
    slope, _ = np.polyfit(np.log(np.arange(1, len(falling) + 1)), np.log(falling), 1)
    assert -1.0 < slope < -0.3
    assert abs(np.corrcoef(np.log(lengths), np.log(rows))[0, 1]) < 0.2
    most_accessed = np.argsort(lengths)[::-1][: max(3, len(lengths) // 10)]
    assert rows[most_accessed].min() < rows.mean() / 10  # some of the most accessed tables are small


@pytest.mark.parametrize(
    ("name", "num_trainers", "num_servers", "hogwild_threads", "gpu_batch"),
    [("m1", 6, 8, 1, 1600), ("m2", 20, 16, 1, 3200), ("m3", 8, 8, 4, 800)],
)
def test_the_papers_set_ups(name: str, num_trainers: int, num_servers: int, hogwild_threads: int, gpu_batch: int) -> None:
    spec, on_gpu = load_recipe(name), load_recipe(f"{name}-gpu")
    assert spec.fleet is not None
    assert spec.fleet.num_trainers == num_trainers
    assert spec.fleet.num_sparse + spec.fleet.num_dense == num_servers
    assert (spec.train.sync.mode, spec.train.sync.hogwild_threads) == ("easgd", hogwild_threads)
    assert (spec.train.batch_size, on_gpu.train.batch_size) == (200, gpu_batch)
    if name == "m3":
        assert on_gpu.fleet is not None
        assert (on_gpu.fleet.num_trainers, on_gpu.fleet.num_sparse, on_gpu.fleet.tables) == (1, 18, "remote")
    else:
        assert on_gpu.fleet is None
        assert on_gpu.placement == "auto"


@pytest.mark.parametrize("name", list(PAPER_MODELS))
def test_scale_makes_the_papers_fleets_small(name: str) -> None:
    spec = load_recipe(name, ["scale=0.01"])
    fleet = spec.scaled_fleet
    assert fleet is not None
    assert (fleet.num_trainers, fleet.num_sparse, fleet.num_dense, fleet.num_readers) == (2, 2, 1, 2)
    assert sum(table.num_elements for table in spec.tables) * 8 < 6e9
    whole = load_recipe(name).scaled_fleet
    assert whole == dataclasses.replace(spec.fleet, follows_scale=False)  # type: ignore[type-var]


def test_m3_does_not_fit_the_papers_gpus() -> None:
    spec = load_recipe("m3")
    assert spec.train.sparse_optimizer.kind == "adagrad"
    num_bytes = 2 * 4 * sum(table.num_elements for table in spec.tables)
    assert num_bytes == pytest.approx(481e9, rel=0.001)
    assert num_bytes > 8 * 32e9


def test_mlperf_is_dlrm_dcnv2() -> None:
    rows = "40000000 39060 17295 7424 20265 3 7122 1543 63 40000000 3067956 405282 10 2209 11938 155 4 976 14 40000000 40000000 40000000"
    rows += " 590152 12973 108 36"
    ids = "3 2 1 2 6 1 1 1 1 7 3 8 1 6 9 5 1 1 1 12 100 27 10 3 1 1"
    spec = load_recipe("mlperf")
    synth = spec.data.synth
    assert synth is not None
    assert [table.num_rows for table in spec.tables] == [int(n) for n in rows.split()]
    assert synth.num_ids == tuple(int(n) for n in rows.split())
    assert synth.mean_ids == tuple(float(n) for n in ids.split())
    assert synth.lengths == "fixed"
    assert sum(synth.mean_ids) == 214
    assert {table.width for table in spec.tables} == {128}
    assert len(spec.features.expanded_dense()) == 13
    assert (spec.model.bottom, spec.model.width, spec.model.top) == ((512, 256), 128, (1024, 1024, 512, 256))
    interaction = spec.model.interaction
    assert (interaction.kind, interaction.cross_layers, interaction.cross_rank) == ("cross", 3, 512)
