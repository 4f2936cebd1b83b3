"""A recipe with histories trains, resumes, evaluates, predicts and is exported like any other, wherever its tables are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import rowstead
from rowstead.data.synth import write_parquet
from rowstead.distributed.process_group import SingleProcess
from rowstead.nn.dlrm import build_model_network
from rowstead.nn.encoders import HistoryEncoder
from rowstead.plan.work import step_work
from rowstead.run import resume, train
from rowstead.spec.encoders import ENCODERS
from rowstead.spec.errors import CheckpointError
from rowstead.spec.parse import override, parse
from rowstead.spec.run import RunSpec
from tests.distributed.sharded_training import Settings, in_processes, trained
from tests.small_runs import RecordingCallback, assert_same_weights, figures_of, small_plain, tensors_in

SPARSE: list[dict[str, Any]] = [
    {"name": "item", "column": "sparse_0", "table": "items"},
    {
        "name": "clicked",
        "column": "sparse_1",
        "table": "items",
        "pooling": "none",
        "max_ids": 4,
        "encoder": {"kind": "din", "target": "item", "hidden": [8]},
    },
    {"name": "shops", "column": "sparse_2", "num_rows": 50, "pooling": "none", "max_ids": 3, "encoder": {"kind": "attention"}},
    {"name": "pooled", "column": "sparse_2", "num_rows": 50},
]


def plain_of() -> dict[str, Any]:
    plain = small_plain()
    plain["data"]["synth"] |= {"num_train_samples": 3200, "mean_ids": [1.0, 5.0, 2.0]}
    plain["features"] |= {"tables": [{"name": "items", "num_rows": 50}], "sparse": SPARSE}
    return plain


def spec_of(*overrides: str) -> RunSpec:
    return parse(RunSpec, override(plain_of(), overrides))


def parquet_spec_of(folder: Path, *overrides: str) -> RunSpec:
    synth = spec_of().data.synth
    assert synth is not None
    write_parquet(synth, folder, rows_per_file=1500, rows_per_group=400)
    log = {"parquet": {"train": [f"{folder}/train-*.parquet"], "eval": [f"{folder}/eval-*.parquet"], "true_p": "true_p"}}
    return parse(RunSpec, override({**plain_of(), "data": log}, overrides))


def test_a_run_resumes_bit_for_bit_and_evaluate_predict_and_export_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parquet_spec_of(tmp_path / "log", "train.max_steps=12", "train.batch_size=300")
    straight = train(spec, out=tmp_path / "straight")
    train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=6))
    ended = resume(str(tmp_path / "stopped"))
    assert_same_weights(straight.folder, ended.folder)
    run = str(ended.folder)
    assert rowstead.evaluate(run).figures() == figures_of(straight)
    rowstead.predict(run, tmp_path / "run.parquet")
    p = pq.read_table(tmp_path / "run.parquet").column("p").to_numpy()
    rowstead.export(run, tmp_path / "exported")
    exported = rowstead.load_exported(tmp_path / "exported")
    rows = pq.read_table(sorted((tmp_path / "log").glob("eval-*.parquet")))
    np.testing.assert_allclose(exported.predict(rows), p, rtol=0, atol=1e-6)
    np.testing.assert_allclose(exported.predict(rows.slice(0, 1)), p[:1], rtol=0, atol=1e-6)
    assert exported.rows_at_once == (1 << 20) // (4 + 3)
    exported.rows_at_once = 300  # 2,000 rows are 7 parts, the last one shorter
    module, sizes = exported._module, list[int]()
    monkeypatch.setattr(exported, "_module", lambda dense, *rest: (sizes.append(len(dense)), module(dense, *rest))[1])
    np.testing.assert_allclose(exported.predict(rows), p, rtol=0, atol=1e-6)
    assert sizes == 6 * [300] + [200]
    none = {name: rows.column(name).slice(0, 2) for name in rows.column_names} | {"sparse_1": [[], []], "sparse_2": [[], []]}
    np.testing.assert_allclose(exported.predict(none), rowstead.load(run).predict(none), rtol=0, atol=1e-6)
    rowstead.export(run, tmp_path / "int8", int8=True)
    np.testing.assert_allclose(rowstead.load_exported(tmp_path / "int8").predict(rows), p, rtol=0, atol=0.05)


@pytest.mark.parametrize("hashing", ["mix", "none"])
def test_the_most_recent_ids_are_those_that_count(hashing: str, tmp_path: Path) -> None:
    spec = spec_of("train.max_steps=2", "features.sparse.1.hash=" + hashing)
    run = str(train(spec, out=tmp_path / "run").folder)
    rowstead.export(run, tmp_path / "exported")
    ids = [7, 3, 9, 1, 5, 2]
    before = [10**6] if hashing == "none" else [8]  # no row, but not read either
    for model in (rowstead.load(run), rowstead.load_exported(tmp_path / "exported")):

        def predict(history: list[int], model: Any = model) -> float:
            dense = {f"dense_{index}": [0.5] for index in range(4)}
            return float(model.predict({**dense, "sparse_0": [4], "sparse_1": [history], "sparse_2": [[1, 2]]})[0])

        assert predict(ids) == predict(ids[-4:]) == predict(before + ids)
        assert predict(ids) != predict(ids[:4])
        assert predict(ids[-4:]) != predict(ids[:-5:-1])  # in order


@pytest.mark.parametrize("where", ["cached", "ssd"])
def test_tables_behind_a_cache_and_on_ssd_train_the_same_weights(where: str, tmp_path: Path) -> None:
    changes = [
        "train.max_steps=10",
        f"memory.folder={tmp_path}",
        f"placement={{items: {{where: {where}, cache_fraction: 0.9}}}}",
    ]
    expected = train(spec_of(changes[0]), out=tmp_path / "device")
    found = train(spec_of(*changes), out=tmp_path / where)
    for name, value in tensors_in(expected.folder).items():
        torch.testing.assert_close(tensors_in(found.folder)[name], value, rtol=1e-5, atol=1e-6)


def test_threads_train_one_model_without_locks(tmp_path: Path) -> None:
    result = train(
        spec_of("train.sync.hogwild_threads=2", "train.dense_optimizer={kind: adam, lr: 0.01}"), out=tmp_path / "run"
    )
    assert figures_of(result)["ne"] < 0.99


def sharded(shards: str | dict[str, str]) -> Settings:
    features = [f"features.{key}={value}" for key, value in plain_of()["features"].items() if key != "dense"]
    changes = ["data.synth.num_sparse=3", *features, "train.sparse_optimizer.clip=0.01"]
    return {"shards": shards, "num_steps": 6, "changes": changes}


MIX = {"items": "row", "shops": "table", "pooled": "replicate"}


def test_several_processes_train_the_weights_of_one(tmp_path: Path) -> None:
    settings = [sharded(shards) for shards in ("table", "column", MIX)]
    alone = trained(settings[0], SingleProcess())
    for together in in_processes(2, settings, tmp_path):
        assert together.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(together[name], value, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_another_encoder_is_another_model(tmp_path: Path) -> None:
    spec = spec_of("train.max_steps=1")
    run = train(spec, out=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"features\.sparse.*softmax"):
        train(spec_of("features.sparse.1.encoder.softmax=true"), out=tmp_path / "next", init_from=str(run.folder))


def test_the_planner_counts_parameters_and_products_of_encoders() -> None:
    spec, pooled = spec_of(), spec_of("features.sparse.1={name: clicked, column: sparse_1, table: items}")
    net = build_model_network(spec.model, spec.features, spec.tables)
    work = step_work(spec)
    assert work.num_parameters == sum(parameter.numel() for parameter in net.parameters())
    assert work.flops > step_work(pooled).flops


def test_every_encoder_stands_in_the_page_with_its_paper() -> None:
    page = (Path(__file__).parents[2] / "docs" / "histories.md").read_text(encoding="utf-8")
    table = page.split("| `encoder.kind` |", 1)[1].partition("\n\n")[0]
    for name, entry in ENCODERS.items():
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}`")]
        authors, _, arxiv = entry.paper.partition(", ")
        assert authors in row
        assert f"https://arxiv.org/abs/{arxiv.removeprefix('arXiv:')}" in row
        encoder = getattr(__import__("rowstead.nn.encoders", fromlist=[entry.module]), entry.module)
        assert issubclass(encoder, HistoryEncoder)
        assert arxiv in (encoder.__doc__ or "")
