"""What every test runs under; commands that tests start inherit it."""

from __future__ import annotations

import os
import tempfile

os.environ["XDG_CONFIG_HOME"] = f"{tempfile.gettempdir()}/rowstead-tests"  # not where somebody has calibrated this machine
os.environ.pop("ROWSTEAD_MACHINE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: more threads than cores only wait for each other

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
