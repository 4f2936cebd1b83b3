"""What every test runs under; commands that tests start inherit it."""

from __future__ import annotations

import os
import tempfile

os.environ["XDG_CONFIG_HOME"] = f"{tempfile.gettempdir()}/rowstead-tests"  # not where somebody has calibrated this machine
os.environ.pop("ROWSTEAD_MACHINE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: more threads than cores only wait for each other

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


LONG_S = 600
"""Tests that may take so long are begun first, so that no worker waits alone for the last of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first; all others in the order of files."""

    def is_short(item: pytest.Item) -> bool:
        mark = item.get_closest_marker("timeout")
        return mark is None or not mark.args or mark.args[0] < LONG_S

    items.sort(key=is_short)
