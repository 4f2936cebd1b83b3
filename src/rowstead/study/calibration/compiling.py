"""Compiles the GPU kernels of the interaction in parallel; each process runs `python -m rowstead.study.calibration.compiling NUMBER COUNT`.

Each pair of vectors and width needs two kernels; compiling them one after the other would take as long as the measurements. The processes
fill Triton's disk cache, which calibration reads. If a process fails, calibration compiles its kernels when it needs them.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

import torch

from rowstead.kernels.choose import has_triton
from rowstead.records.usage import usable_cores
from rowstead.study.calibration.dense import INTERACTING, VECTORS, WIDTHS, interact_once
from rowstead.training.device import container_cores

MOST_PROCESSES, LIMIT_S = 8, 60.0
"""`LIMIT_S` bounds the time of all processes together."""


def compile_interactions() -> None:
    """Compile all kernels that `interaction_times` needs on a GPU into Triton's cache."""
    count = min(MOST_PROCESSES, usable_cores() // 2, container_cores() or MOST_PROCESSES)
    if count < 2 or not has_triton():
        return
    command = [sys.executable, "-m", "rowstead.study.calibration.compiling"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + LIMIT_S
    try:
        for number in range(count):
            own = [*command, str(number), str(count)]
            quiet = subprocess.DEVNULL
            processes.append(subprocess.Popen(own, env=environment, stdin=quiet, stdout=quiet, stderr=quiet))
        for process in processes:
            process.wait(max(0.0, end - time.monotonic()))
    except (OSError, subprocess.TimeoutExpired):
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Compile the share of this process."""
    number, count = map(int, sys.argv[1:])
    device = torch.device("cuda")
    shapes = [("fp32", VECTORS["cuda"][-2], WIDTHS["cuda"][0])]  # the slowest first
    shapes += [("tf32", *pair) for pair in sorted(itertools.product(VECTORS["cuda"], WIDTHS["cuda"]), key=sum, reverse=True)]
    for precision, vectors, width in shapes[number::count]:
        interact_once(INTERACTING["cuda"][0], vectors, width, precision, device)


if __name__ == "__main__":
    main()
