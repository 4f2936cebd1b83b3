"""Kernels of a run are compiled before its first step, and named; nothing that is on disk is compiled again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rowstead.training.compile import KernelCompiler, kernel_calls
from tests.small_runs import small_spec

TRAIN = """
import sys, threading
from numba.core import event
from rowstead import run
from rowstead.training.progress import Callback
from tests.small_runs import small_spec

class Late(event.Listener):
    depth = 0
    def on_start(self, event):
        self.depth += 1
        if self.depth == 1 and Messages.is_compiled:
            print("late:", event.data["dispatcher"].py_func.__module__)
    def on_end(self, event):
        self.depth -= 1

class Messages(Callback):
    is_compiled = False
    def on_message(self, text):
        print(text, flush=True)
        Messages.is_compiled |= "6 of 6" in text

event.register("numba:compile", Late())
run.train(small_spec("train.max_steps=3"), out=sys.argv[1], callback=Messages())
"""


def trained(folder: Path, cache: Path) -> Sequence[str]:
    """What a run in a new process says, with kernels kept in `cache`."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(folder)], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU other kernels run")
def test_a_first_run_compiles_each_kernel_once_before_its_first_step_and_a_second_run_none(tmp_path: Path) -> None:
    first = trained(tmp_path / "one", tmp_path / "cache")
    said = [line for line in first if line.startswith("compil")]
    assert said[0].startswith("compiling kernels")
    numbers = [int(found[1]) for line in said if (found := re.match(r"compiled kernels (\d) of 6: ", line))]
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert sorted(line.split(": ")[1] for line in said[1:]) == sorted(kernel_calls(small_spec()))
    assert any(re.fullmatch(r"kernels are compiled, in \d+ s", line) for line in first)
    assert not [line for line in first if re.match(r"late: rowstead\.kernels\.", line)]  # those that training needs
    assert not [line for line in trained(tmp_path / "two", tmp_path / "cache") if line.startswith(("compil", "late"))]


@pytest.mark.parametrize(
    "changes",
    [
        (),
        pytest.param(
            ("model.row_format=bf16", "train.sparse_optimizer.kind=adam"), marks=pytest.mark.slow
        ),  # its kernels are others
        ("model.interaction.kind=concat", "features.dense=[]"),
        ("model.interaction.pairs=sparse_sparse", "features.sparse.0.pooling=mean"),
        ("model.interaction.kind=concat", "features.sparse=[]"),
        ("features.dense.0.standardise=true", "features.sparse.0.max_ids=2"),
    ],
)
def test_kernels_of_any_recipe_can_be_called(changes: Sequence[str]) -> None:
    calls = kernel_calls(small_spec(*changes))
    for call in calls.values():
        call()
    messages: list[str] = []
    with KernelCompiler(small_spec(*changes), messages.append) as compiler:
        compiler.run()
    assert messages == []  # they are all in memory
