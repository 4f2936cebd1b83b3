"""The interaction's GPU programs compiled by several processes at once: `python -m rowstead.study.calibration.compiling NUMBER COUNT` is one.

Each pair of vectors and width is two programs, and one after the other they would take as long as all that is measured with them. What a
process has compiled is in Triton's cache on disk, where calibration finds it. Should a process fail, its programs are compiled later.
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
"""And how long all of them together may take."""


def compile_interactions() -> None:
    """Have all programs that `interaction_times` needs on a GPU in Triton's cache."""
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
    """Compile this process's share."""
    number, count = map(int, sys.argv[1:])
    device = torch.device("cuda")
    shapes = [("fp32", VECTORS["cuda"][-2], WIDTHS["cuda"][0])]  # the slowest first
    shapes += [("tf32", *pair) for pair in sorted(itertools.product(VECTORS["cuda"], WIDTHS["cuda"]), key=sum, reverse=True)]
    for precision, vectors, width in shapes[number::count]:
        interact_once(INTERACTING["cuda"][0], vectors, width, precision, device)


if __name__ == "__main__":
    main()
