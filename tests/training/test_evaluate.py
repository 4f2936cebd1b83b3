"""Evaluation within groups and by segment, from a log with such columns to records and events."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from numpy.typing import NDArray
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from rowstead.run import Result, train
from rowstead.serve.predict import predict
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import to_plain
from rowstead.training.trained import evaluate
from tests.small_runs import parquet_spec, small_spec, written_log

COUNTRIES = ("FR", "DE", None, "a country with a name that is far longer than sixty characters")


def write_log(folder: Path) -> Path:
    """The small log with a user and a country in each row."""
    written_log(folder)
    for number, file in enumerate(sorted(folder.glob("*.parquet"))):
        table, random = pq.read_table(file), np.random.default_rng(number)
        table = table.append_column("user", pa.array(random.integers(0, 60, table.num_rows)))
        country = [COUNTRIES[i] for i in random.choice(4, table.num_rows, p=[0.5, 0.3, 0.15, 0.05])]
        table = table.append_column("country", pa.array(country, pa.string()).dictionary_encode())
        pq.write_table(table, file, row_group_size=300)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def finished(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    columns = ("data.parquet.group=user", "data.parquet.segment=country", "train.eval_top_k=[3,10]")
    spec = parquet_spec(log, *columns, "data.parquet.test_fraction=0.1")
    return train(spec, out=tmp_path_factory.mktemp("runs") / "run")


def predicted(finished: Result, log: Path, out: Path) -> tuple[NDArray[np.float64], ...]:
    """What the model predicts for the evaluation split, with label, user and country of each row."""
    files = sorted(str(path) for path in log.glob("eval-*.parquet"))
    predict(str(finished.folder), out, data=files, keep=["user", "country"])
    table = pq.read_table(out)
    return (
        table["p"].to_numpy(),
        table["label"].to_numpy().astype(float),
        table["user"].to_numpy(),
        np.array(table["country"].to_pylist(), object),
    )


def test_a_runs_rankings_and_segments_are_scikit_learns_of_its_predictions(finished: Result, log: Path, tmp_path: Path) -> None:
    quality = finished.quality
    assert quality is not None
    assert quality.ranking is not None
    assert quality.segments is not None
    p, label, user, country = predicted(finished, log, tmp_path / "p.parquet")
    own = [user == one for one in np.unique(user)]
    ndcg = [ndcg_score(label[o][None], p[o][None].astype(float), k=10) for o in own if label[o].any()]
    assert quality.ranking.ndcg[10] == pytest.approx(np.mean(ndcg), abs=1e-9)
    assert quality.ranking.num_groups == len(ndcg)
    recall = [label[o][np.argsort(-p[o])[:3]].sum() / label[o].sum() for o in own if label[o].any()]
    assert quality.ranking.recall[3] == pytest.approx(np.mean(recall), abs=1e-9)
    mixed = [o for o in own if 0 < label[o].mean() < 1]
    gauc = np.average([roc_auc_score(label[o], p[o]) for o in mixed], weights=[o.sum() for o in mixed])
    assert quality.gauc == pytest.approx(gauc, abs=1e-9)
    rows = {row.name: row for row in quality.segments.rows}
    assert list(rows) == ["FR", "DE", "(none)", COUNTRIES[3][:59] + "…"]  # type: ignore[index]
    for name, value in (("FR", "FR"), ("DE", "DE"), ("(none)", None)):
        chosen = np.array([one == value for one in country])
        mean = label[chosen].mean()
        base = log_loss(label[chosen], np.full(chosen.sum(), mean))
        assert rows[name].weight == chosen.sum()
        assert rows[name].calibration == pytest.approx(p[chosen].mean() / mean, rel=1e-5)
        assert rows[name].ne == pytest.approx(log_loss(label[chosen], p[chosen].astype(float)) / base, rel=1e-5)


def test_records_and_events_have_them(finished: Result) -> None:
    assert finished.record is not None
    assert finished.outcome.test is not None
    assert finished.quality is not None
    assert finished.quality.segments is not None
    figures = finished.record.figures
    assert {"gauc", "recall_at_3", "recall_at_10", "ndcg_at_10", "test_ndcg_at_10", "ne(country=FR)"} <= set(figures)
    lines = [json.loads(line) for line in (finished.folder / "events.jsonl").read_text().splitlines()]
    (evaluated, tested) = (line for line in lines if line["kind"] == "segments")
    assert (evaluated["of"], tested["of"], evaluated["column"]) == ("evaluation", "test", "country")
    assert evaluated["rows"][0]["ne"] == figures["ne(country=FR)"] == finished.quality.segments.rows[0].ne


def test_other_columns_can_be_named_when_a_run_is_evaluated(finished: Result) -> None:
    run = str(finished.folder)
    by_user = evaluate(run, group="country", segment="user", top_k=[2])
    assert by_user.ranking is not None
    assert by_user.segments is not None
    assert by_user.ranking.num_groups == 3  # that of no country is not a group
    assert list(by_user.ranking.ndcg) == [2]
    assert (len(by_user.segments.rows), by_user.segments.num_values) == (20, 60)
    same = evaluate(run, group="country", segment="country").segments
    assert same is not None
    assert finished.quality is not None
    assert same == finished.quality.segments
    with pytest.raises(RowsteadError, match="no column `contry`: did you mean `country`"):
        evaluate(run, segment="contry")


def test_a_packed_log_gives_the_same(finished: Result, log: Path, tmp_path: Path) -> None:
    columns = ("data.parquet.group=user", "data.parquet.segment=country", "train.eval_top_k=[3,10]")
    spec = parquet_spec(log, *columns, "data.parquet.test_fraction=0.1", f"data.cache={tmp_path / 'pack'}")
    again = train(spec, out=tmp_path / "run")
    assert again.quality == finished.quality
    assert evaluate(str(again.folder), segment="user").segments == evaluate(str(finished.folder), segment="user").segments


def test_a_synthetic_log_has_no_columns_to_group_by(tmp_path: Path) -> None:
    result = train(small_spec("train.max_steps=2"), out=tmp_path / "run")
    assert dataclasses.asdict(result.quality)["ranking"] is None  # type: ignore[call-overload]
    with pytest.raises(RowsteadError, match="a synthetic log has no columns to group by"):
        evaluate(str(result.folder), group="user")


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--processes", "2"), ("--fleet", "trainers=1,sparse=1,dense=1,readers=1")])
def test_several_processes_and_fleets_measure_what_evaluate_does(log: Path, tmp_path: Path, options: tuple[str, str]) -> None:
    columns = ("data.parquet.group=user", "data.parquet.segment=country", "train.max_steps=10")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(to_plain(parquet_spec(log, *columns))))
    command = [sys.executable, "-m", "rowstead", "train", "mine.yaml", "--out", "run", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("By country, 4 values") == 1
    figures = json.loads((tmp_path / "run" / "record.json").read_text())["figures"]
    for name, value in evaluate(str(tmp_path / "run")).record_figures().items():
        assert figures["num_eval_samples" if name == "num_samples" else name] == pytest.approx(value, rel=1e-6), name
