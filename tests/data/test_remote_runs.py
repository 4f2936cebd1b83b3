"""Whole commands over logs behind http:// and s3://: training, resuming, fleets, evaluation and description, as with local files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rowstead.run import resume, train
from tests.remote_servers import s3_server, serve
from tests.small_runs import RecordingCallback, assert_same_weights, parquet_spec, small_plain, written_log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_log(tmp_path_factory.mktemp("log"))


@pytest.fixture(params=["http", "s3"])
def url(request: pytest.FixtureRequest, log: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The log's URL on a server of this machine."""
    if request.param == "http":
        pytest.importorskip("aiohttp")
        with serve(log) as server:
            yield server.url
        return
    with s3_server(log.parent) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{log.name}"


def run(*arguments: object) -> str:
    command = [sys.executable, "-m", "rowstead", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def recipe_of(folder: Path, url: str) -> Path:
    plain = small_plain()
    plain["data"] = {"parquet": {"train": f"{url}/train-*.parquet", "eval": f"{url}/eval-*.parquet", "true_p": "true_p"}}
    path = folder / "remote.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


def test_training_ends_at_the_weights_of_a_local_run_also_when_it_was_resumed(url: str, log: Path, tmp_path: Path) -> None:
    settings = ("train.max_steps=60", "data.parquet.shuffle_rows=700")
    train(parquet_spec(log, *settings), out=tmp_path / "local")
    spec = parquet_spec(url, *settings)  # type: ignore[arg-type]
    train(spec, out=tmp_path / "straight")
    assert_same_weights(tmp_path / "local", tmp_path / "straight")
    train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=25))
    resume(str(tmp_path / "stopped"))
    assert_same_weights(tmp_path / "local", tmp_path / "stopped")


@pytest.mark.slow
def test_commands_read_remote_logs(url: str, log: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, url)
    run("train", recipe, "--set", "train.max_steps=30", "--out", tmp_path / "one")
    assert "NE" in run("evaluate", tmp_path / "one", "--data", f"{url}/eval-*.parquet")
    described = [json.loads(run("data", "describe", f"{where}/train-*.parquet", "--json")) for where in (url, log)]
    assert described[0] == described[1]
    assert described[0]["num_rows"] == 6400


@pytest.mark.slow
def test_readers_of_a_fleet_read_remote_logs(url: str, tmp_path: Path) -> None:
    out, roles = tmp_path / "fleet", "trainers=1,sparse=1,dense=1,readers=2"
    run("train", recipe_of(tmp_path, url), "--fleet", roles, "--out", out)
    figures = json.loads((out / "record.json").read_text())["figures"]
    assert (figures["num_samples"], figures["num_restarts"], figures["num_batches_repeated"]) == (6400, 0, 0)
