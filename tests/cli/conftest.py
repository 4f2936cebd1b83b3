"""A command line in this process, and a log and a run to give it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rowstead import run
from rowstead.cli.main import main
from rowstead.data.synth import write_parquet
from tests.cli.commands import Command, Done
from tests.small_runs import parquet_spec, small_spec


@pytest.fixture
def rowstead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["rowstead", *arguments])
        capfd.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        output = capfd.readouterr()
        done = Done(code, output.out, output.err)
        assert "Traceback" not in done.text
        return done

    return command


@pytest.fixture(scope="package")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small log as Parquet."""
    synth = small_spec("data.synth.num_train_samples=600", "data.synth.num_eval_samples=200").data.synth
    assert synth is not None
    folder = tmp_path_factory.mktemp("log")
    write_parquet(synth, folder)
    return folder


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Path:
    """A folder with one finished run, `small-001`, of the Parquet log."""
    root = tmp_path_factory.mktemp("runs")
    run.train(parquet_spec(log), root=root)
    return root
