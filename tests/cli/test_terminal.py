"""What a terminal shows: help, usage, progress, and how a command ends."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from rowstead import __version__, run
from rowstead.training.compile import COMPILING
from rowstead.training.progress import Progress
from rowstead.training.progress_bar import ProgressBar, Throttle, progress_callback
from tests.cli.commands import Command, assert_refused, recipe
from tests.small_runs import small_plain


def test_recipes_are_listed_and_shown(rowstead: Command) -> None:
    listed = rowstead("recipes")
    assert listed.code == 0
    assert re.search(r"^quickstart +A small click log", listed.out, re.MULTILINE)
    shown = rowstead("recipes", "quickstart")
    assert yaml.safe_load(shown.out)["name"] == "quickstart"
    Path("binary").write_bytes(b"\xff\xfe")
    assert rowstead("recipes", "binary").code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU other kernels run")
def test_train_says_which_kernels_run(rowstead: Command) -> None:
    assert "kernels: cpu (Numba, 1 thread)\n" in rowstead("train", recipe("train.max_steps=2")).out
    assert "kernels: cpu (Numba, 2 threads)\n" in rowstead("train", recipe("train.max_steps=2", "threads=2")).out
    assert (
        "kernels: reference (plain torch, 1 thread)\n" in rowstead("train", recipe("train.max_steps=2", "kernel=reference")).out
    )


def test_train_profile_shows_where_the_time_went_and_goes_on(rowstead: Command) -> None:
    done = rowstead("train", recipe("train.max_steps=35"), "--profile")
    assert re.search(r"^  row update +[\d.]+ +\d+%$", done.out, re.MULTILINE)
    assert "finished after 35 steps" in done.out
    assert done.err == ""
    assert Path("runs/small-001/trace.json").is_file()


def test_an_unknown_option_or_command_prints_usage(rowstead: Command) -> None:
    for arguments in (("trian",), ("train", "--sett", "a=1"), ("evaluate",)):
        done = rowstead(*arguments)
        assert done.code == 2
        assert done.err.startswith("Usage: ")
        assert "Error: " in done.err


def test_ctrl_c_before_training_ends_with_130(rowstead: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "train", interrupted)
    done = rowstead("train", recipe())
    assert done.code == 130
    assert "interrupted" in done.err


def test_running_out_of_memory_is_said_plainly(rowstead: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise MemoryError("Unable to allocate 3.7 TiB")

    monkeypatch.setattr(run, "train", full)
    assert_refused(rowstead("train", recipe()), "out of memory while allocating 3.7 TiB. 1. make the model smaller")


def test_where_output_is_no_terminal_lines_are_plain(rowstead: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rowstead.training.progress_bar", "rowstead.cli.console"):
        monkeypatch.setattr(f"{module}.PLAIN_EVERY_S", 0.0)
    done = rowstead("train", recipe("train.max_steps=20", "train.eval_every=10"))
    assert done.code == 0
    assert "\x1b" not in done.text
    line = r"^step \d+ of 20 · [\d,]+ samples/s · loss \d\.\d+ · NE \d\.\d+ · waiting for data \d+% · \d+ s left$"
    assert len(re.findall(line, done.out, re.MULTILINE)) == 19
    assert re.search(r"^step 10: NE \d\.\d+ · log loss", done.out, re.MULTILINE)
    for row in ("NE", "best possible NE", "AUC", "calibration", "samples/s", "where the time went"):
        assert re.search(rf"│ {row} +│", done.out), row
    assert done.out.endswith(
        "model: runs/small-001\nnext:\n  rowstead evaluate runs/small-001\n  rowstead export runs/small-001 --to exported\n"
    )
    evaluated = rowstead("evaluate", "last")
    assert "2,000 of 2,000 examples" in evaluated.out


def test_commands_can_be_pasted_and_words_stay_whole_in_60_columns(rowstead: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = "a-rather-long-folder/with-another-one-in-it/and-a-run-of-a-long-name"
    done = rowstead("train", recipe("train.max_steps=2"), "--out", out)
    lines = done.out.splitlines()
    assert lines[-4:] == [f"model: {out}", "next:", f"  rowstead evaluate {out}", f"  rowstead export {out} --to exported"]
    cells = [cell.strip() for line in lines if line.startswith("│") for cell in line.strip("│").split("│")]
    words = set(" ".join(cells).split())
    assert {"backward", "evaluation", "prediction", "label"} <= words


def test_the_bar_says_that_a_run_starts_until_there_is_a_step() -> None:
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    with progress_callback(console) as callback:
        assert isinstance(callback, ProgressBar)
        bar = callback._bar  # what is shown
        console.print(bar.get_renderable())
        before = console.export_text(clear=True)
        callback.on_message(f"{COMPILING}: the first run on a machine takes longer")
        console.print(bar.get_renderable())
        compiling = console.export_text(clear=True)
        callback.on_step(Progress(step=3, total_steps=3, num_samples=9, loss=0.5, samples_per_s=10.0, waiting_share=0.0))
        console.print(bar.get_renderable())
        after = console.export_text()
    assert "starting" in before
    assert re.search(rf"{COMPILING} +━", compiling)
    assert "ETA" not in before
    assert "?" not in before
    assert "training" in after
    assert "3/3" in after
    assert "ETA" in after


@pytest.mark.parametrize("width", [60, 89, 90, 144, 145, 200])
def test_the_bar_fits_a_terminal_of_any_width(width: int) -> None:
    console = Console(force_terminal=True, width=width, record=True, file=io.StringIO())
    shown = {"step": 1_200_000, "total_steps": 1_221_000, "num_samples": 9, "samples_per_s": 35_609.0, "waiting_share": 1.0}
    with progress_callback(console) as callback:
        assert isinstance(callback, ProgressBar)
        callback._throttle = Throttle(0.0)
        callback.on_step(Progress(loss=0.4266, ne=0.7612, **shown))  # type: ignore[arg-type]
        console.export_text(clear=True)
        console.print(callback._bar.get_renderable())
        text = console.export_text()
    assert "…" not in text
    for part in ("training ━", "1200000/1221000", "NE 0.7612", "ETA "):
        assert part in text
    assert ("samples/s" in text) == (width >= 90)
    assert ("waiting for data 100%" in text) == (width >= 145)


ODD = "a:x:[red]b"
"""A name that a console could take for an emoji and for markup."""


def test_names_in_errors_are_printed_as_they_are(rowstead: Command) -> None:
    assert_refused(rowstead("train", f"{ODD}.yaml"), f"`{ODD}.yaml`")


def test_names_of_runs_and_files_are_printed_as_they_are(rowstead: Command) -> None:
    trained = rowstead("train", recipe("train.max_steps=2"), "--out", ODD)
    assert trained.code == 0
    assert f"{ODD}: finished after 2 steps" in trained.out
    assert f"predictions in {ODD}.parquet" in rowstead("predict", ODD, "--out", f"{ODD}.parquet").out


def test_help_answers_without_torch() -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('heavy:', sorted({'torch', 'numba', 'pyarrow', 'numpy'} & set(sys.modules))))\n"
        "sys.argv = ['rowstead', '--help']\n"
        "from rowstead.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "heavy: []" in done.stdout
    for command in ("train", "evaluate", "predict", "export", "data", "recipes"):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE), command


def test_a_mistake_in_a_recipe_shows_before_torch_is_imported() -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "sys.argv = ['rowstead', 'train', '--set', 'nonsense']\n"
        "from rowstead.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_on_a_terminal_a_progress_bar_appears(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(small_plain()))
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"}
    for name in ("NO_COLOR", "CI"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "rowstead", "train", "mine.yaml", "--set", "train.eval_every=50"],
        cwd=tmp_path,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    output = b""
    with contextlib.suppress(OSError):  # the terminal closes when the process ends
        while part := os.read(master, 1 << 16):
            output += part
    os.close(master)
    assert process.wait() == 0
    text = output.decode()
    assert "\x1b[" in text
    assert "━" in text
    assert re.search(r"samples/s.*loss.*NE.*waiting for data", text)
    assert "ETA" in text
    assert "step 50: NE" in text


def test_the_version_is_that_of_the_package(rowstead: Command) -> None:
    done = rowstead("--version")
    assert (done.code, done.out) == (0, f"rowstead {__version__}\n")
    assert importlib.metadata.version("rowstead") == __version__
