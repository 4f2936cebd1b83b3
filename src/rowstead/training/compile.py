"""Compiles the CPU kernels of a run before its first step, in this process and a second one, and reports each.

Numba compiles a kernel at its first call, one at a time in a process, and keeps it on disk for all processes. So a run that finds
one missing starts a second process: both call kernels with a batch of one example, this one those that are needed first, the other
those that are needed last. `python -m rowstead.training.compile` is the second process. It reads a recipe and then names of
kernels, and writes a line when it is ready for a name.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numba.core import event

from rowstead.data.block import RawBlock
from rowstead.data.encode import Encoder
from rowstead.data.transforms import DenseTransforms
from rowstead.kernels.check import check_sparse
from rowstead.kernels.choose import kernels_for
from rowstead.kernels.cpu import interaction
from rowstead.kernels.layout import layout_of
from rowstead.kernels.row_state import new_row_state
from rowstead.records.usage import usable_cores
from rowstead.spec.parse import parse, to_plain
from rowstead.spec.run import RunSpec
from rowstead.training.build import ROW_DTYPES

COMPILING = "compiling kernels"
DEADLINE_S = 120.0
"""Longest wait for the second process: what it has not compiled by then, training compiles."""


def kernel_calls(spec: RunSpec) -> dict[str, Callable[[], object]]:
    """Calls that compile the kernels of a run on a CPU, in the order in which it needs them. Each takes less than a millisecond."""
    num_dense = len(spec.features.expanded_dense())
    layout, optimizer = layout_of(spec.features, spec.tables), spec.train.sparse_optimizer
    offsets = torch.arange(layout.num_features + 1)
    ids = torch.zeros(layout.num_features, dtype=torch.int64)
    rows = [torch.zeros(1, table.width, dtype=ROW_DTYPES[spec.model.row_format]) for table in layout.tables]
    grad = torch.zeros(1, layout.total_width, dtype=torch.float32)

    def encode() -> None:
        one, bag = np.zeros(1, np.float32), (np.zeros(1, np.int64), np.array([0, 1]))
        num_sparse = layout.num_features
        dense = np.zeros((1, num_dense), np.float32)
        block = RawBlock(dense=dense, ids=(bag[0],) * num_sparse, offsets=(bag[1],) * num_sparse, labels=one)
        Encoder(spec.features, spec.tables, DenseTransforms.learn(spec.features, [block])).encode(block)

    _, kernels = kernels_for("cpu", torch.device("cpu"))
    calls: dict[str, Callable[[], object]] = {"encoding of batches": encode}
    if layout.tables:
        states = [new_row_state(optimizer.kind, table) for table in rows]
        calls["check of ids"] = functools.partial(check_sparse, layout, ids, offsets)
        calls["look-up"] = functools.partial(kernels.lookup, rows, layout, ids, offsets)
    if spec.model.network == "dlrm" and spec.model.interaction.kind == "dot":
        width = spec.model.width
        first = torch.zeros(1, spec.model.interaction.num_dense_vectors * width) if num_dense else None
        shape = (first, grad, width, spec.model.interaction.pairs)
        calls["dot products"] = lambda: interaction.forward(*shape, torch.float32)
        calls["gradients of dot products"] = lambda: interaction.backward(*shape, interaction.forward(*shape, torch.float32))
    if layout.tables:
        calls["row update"] = functools.partial(
            kernels.update, rows, states, layout, ids, offsets, None, grad, optimizer=optimizer, lr=0.0, step=1
        )
    return calls


class KernelCompiler(event.Listener):
    """Compiles what is missing when `run` is called; from the first missing kernel on, which may be one of the log's, with help."""

    def __init__(self, spec: RunSpec, on_message: Callable[[str], None]) -> None:
        self._spec, self._on_message = spec, on_message
        self._calls = kernel_calls(spec)
        self._names = list(self._calls)
        self._left = deque(self._calls)
        self._lock = threading.Lock()
        self._num_done = 0
        self._is_missing = False
        self._started_s = 0.0
        self._helper: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> KernelCompiler:
        event.register("numba:compile", self)
        return self

    def __exit__(self, *_: object) -> None:
        event.unregister("numba:compile", self)
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()
        if self._thread is not None:
            self._thread.join()

    def on_start(self, event: object) -> None:
        """A kernel is missing on disk: the first one starts the second process."""
        with self._lock:
            is_first, self._is_missing = not self._is_missing, True
        if is_first:
            self._started_s = time.monotonic()
            self._on_message(f"{COMPILING}: the first run on a machine takes longer")
            if self._left and usable_cores() > 1 and sys.executable:
                self._thread = threading.Thread(target=self._feed_helper, name="compile", daemon=True)
                self._thread.start()

    def on_end(self, event: object) -> None: ...

    def run(self) -> None:
        """Compile all kernels that are missing; loads the others."""
        while self._left:
            with contextlib.suppress(IndexError):  # the other process took the last one
                name = self._left.popleft()
                self._calls[name]()
                self._report(name)
        if self._thread is not None:
            self._thread.join(DEADLINE_S)
        if self._is_missing:
            self._on_message(f"kernels are compiled, in {time.monotonic() - self._started_s:.0f} s")

    def _feed_helper(self) -> None:
        """Give the second process one kernel after another, those that are needed last first."""
        command = [sys.executable, "-m", "rowstead.training.compile"]
        with contextlib.suppress(OSError, ValueError):  # it could not start, or was killed
            self._helper = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            assert self._helper.stdin is not None
            assert self._helper.stdout is not None
            print(json.dumps(to_plain(self._spec)), file=self._helper.stdin, flush=True)
            name = None
            while self._helper.stdout.readline():
                if name is not None:
                    self._report(name)
                try:
                    name = self._left.pop()
                except IndexError:
                    break
                print(name, file=self._helper.stdin, flush=True)
            self._helper.stdin.close()

    def _report(self, name: str) -> None:
        with self._lock:
            self._num_done += 1
            num_done = self._num_done
        if self._is_missing:
            self._on_message(f"compiled kernels {num_done} of {len(self._names)}: {name}")


def _compile_as_told() -> None:
    """The second process."""
    torch.set_num_threads(1)
    calls = kernel_calls(parse(RunSpec, json.loads(sys.stdin.readline())))
    print("ready", flush=True)
    for line in sys.stdin:
        calls[line.strip()]()
        print("done", flush=True)


if __name__ == "__main__":
    _compile_as_told()
