"""Measures all-to-all between two processes by message size; each process runs `python -m rowstead.study.calibration.exchange`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import torch

from rowstead.distributed.process_group import open_process_group
from rowstead.records.temporary import temporary_folder
from rowstead.spec.curve import Curve, CurveAxis
from rowstead.spec.job import RENDEZVOUS_FILE

MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
LIMIT_S = 60.0
ROUNDS = 9


def measure_exchange() -> Curve | None:
    """Measure all-to-all between two processes, as sharded tables use it; None if the processes fail or time out."""
    with temporary_folder() as folder:
        processes = []
        for rank in range(2):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
            environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
            environment[RENDEZVOUS_FILE] = str(folder / "rendezvous")
            command = [sys.executable, "-m", "rowstead.study.calibration.exchange"]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            )
        try:
            end = time.monotonic() + LIMIT_S
            outputs = [process.communicate(timeout=max(0.1, end - time.monotonic()))[0] for process in processes]
        except subprocess.TimeoutExpired:
            return None
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        if any(process.returncode for process in processes):
            return None
    axis = CurveAxis(name="bytes", sizes=tuple(map(float, MESSAGE_BYTES)))
    return Curve(axes=(axis,), seconds=tuple(json.loads(outputs[0].splitlines()[-1])))


def main() -> None:
    """Exchange messages with the other process and print the median seconds per size."""
    device = torch.device("cpu")
    found = []
    with open_process_group(device) as process_group:
        for num_bytes in MESSAGE_BYTES:
            sent, sizes = torch.zeros(num_bytes // 4), [num_bytes // 8] * 2
            received = torch.empty_like(sent)
            seconds = []
            for _ in range(3 + ROUNDS):
                process_group.barrier()
                start = time.perf_counter()
                process_group.start_all_to_all(received, sent, sizes, sizes).wait()
                seconds.append(time.perf_counter() - start)
            found.append(sorted(seconds[3:])[ROUNDS // 2])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
