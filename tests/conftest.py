"""What every test runs under; commands that tests start inherit it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: more threads than cores only wait for each other

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
