"""What does it cost to train with a fleet instead of one process, and do its readers keep up?

On a CPU: M1 with 100,000 rows a table and batches of 200, from Parquet files, by `rowstead train` as a command: as one process, and as a
fleet of 2 trainers, 2 sparse servers, a dense server and a reader, all on this machine. Each is run over few steps and over many;
`cpu_s_per_1000_samples` is the difference of the processor time that all their processes used, over the difference of samples, so
that starting, compiling, evaluating and saving play no part. The two take turns; figures are medians over the rounds. The speed-up
of Hogwild's second thread is measured as in benchmarks.hogwild.

On a GPU: the steps of M3 with its tables shrunk, batches that are in memory already. `device` keeps the tables in GPU memory;
`remote` in two sparse servers on this machine's CPU, as the study did that found M3's tables too large for a GPU server: pooled vectors
and their gradients cross the wire, and the bus. The look-ups of the next batches are under way meanwhile (`staleness`). Beside the rates
stands what keeps the remote one busy: the share of the time that the servers computed, the bytes per second on the wire, and the share of the
time that the trainer waited for answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from benchmarks.harness import OtherLoad, arguments, noise_of, publish
from benchmarks.hogwild import Contenders
from benchmarks.hogwild import measure as measure_hogwild
from benchmarks.reach import Size, write_log
from benchmarks.step import Model, of_recipe
from rowstead.distributed.sharding import piece_layout
from rowstead.fleet.partition import Partition, partition_tables
from rowstead.fleet.remote_store import RemoteStore
from rowstead.fleet.rpc_client import Client
from rowstead.fleet.sparse_server import SparseServer
from rowstead.fleet.table_shard import TableShard
from rowstead.kernels.layout import Layout, layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.spec.data import DataSpec
from rowstead.spec.parse import to_plain
from rowstead.stores.device import DeviceStore
from rowstead.stores.host import HostStore
from rowstead.training.prefetch import prefetch_rows
from rowstead.training.step import Stepper

FLEET = "trainers=2,sparse=2,dense=1,readers=1"
NUM_TRAINERS = 2
STEPS, QUICK_STEPS = (100, 600), (20, 60)
ROUNDS, QUICK_ROUNDS = 3, 1
LOG, QUICK_LOG = (
    Size(num_rows=rows, num_names=names, shuffle_rows=2_048, num_samples=0) for rows, names in ((20_480, 6), (4_096, 4))
)
M1 = of_recipe("M1", "m1", num_rows=100_000, batch_size=200)
M3 = of_recipe("M3", "m3", num_rows=100_000, batch_size=800)
NUM_SERVERS, STALENESS = 2, 2
GPU_BATCHES, GPU_STEPS, QUICK_GPU_STEPS = 8, 60, 12


# On a CPU: whole commands


def figures_of_run(recipe: Path, out: Path, num_steps: int, *more: str) -> dict[str, float]:
    """The figures that `rowstead train` leaves in its record."""
    words = ["train", str(recipe), "--set", f"train.max_steps={num_steps}", "--out", str(out), *more]
    done = subprocess.run([sys.executable, "-m", "rowstead", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    figures: dict[str, float] = json.loads((out / "record.json").read_text())["figures"]
    return figures


def cost_rows(quick: bool) -> list[dict[str, Any]]:
    """A row for one process and one for the fleet."""
    contenders = {"one process": (), "fleet": ("--fleet", FLEET)}
    few, many = QUICK_STEPS if quick else STEPS
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder, OtherLoad() as others:
        (log_folder := Path(folder) / "log").mkdir()
        log = write_log(log_folder, QUICK_LOG if quick else LOG)
        spec = M1.spec()
        spec = dataclasses.replace(
            spec, data=DataSpec(parquet=log), train=dataclasses.replace(spec.train, epochs=1000), device="cpu"
        )
        recipe = Path(folder) / "m1.yaml"
        recipe.write_text(yaml.safe_dump(to_plain(spec)))
        for turn in range(QUICK_ROUNDS if quick else ROUNDS):
            for name, more in contenders.items():
                short, long = (
                    figures_of_run(recipe, Path(folder) / f"{name}-{turn}-{steps}", steps, *more) for steps in (few, many)
                )
                samples = long["num_samples"] - short["num_samples"]
                row = {
                    "cpu_s_per_1000_samples": 1000 * (long["cpu_s"] - short["cpu_s"]) / samples,
                    "samples_per_s": long["samples_per_s"],
                }
                if more:
                    waited_s = (long["trainer_waiting_s"] - short["trainer_waiting_s"]) / NUM_TRAINERS
                    row["trainers_wait_share"] = max(0.0, waited_s / (long["train_s"] - short["train_s"]))
                    row["queue_nonempty_share"] = long["queue_nonempty_share"]
                    for kind in ("trainer", "sparse", "dense", "reader", "coordinator"):
                        row[f"{kind}_cpu_s_per_1000_samples"] = (
                            1000 * (long.get(f"{kind}_cpu_s", 0) - short.get(f"{kind}_cpu_s", 0)) / samples
                        )
                found[name].append(row)
    return [
        {"who": name, **{key: statistics.median(row[key] for row in rows) for key in rows[0]}, "num_cores": os.cpu_count()}
        for name, rows in found.items()
    ] + [{"who": "everybody else", "cores_used_by_others": max(0.0, others.cores - (os.cpu_count() or 1))}]


def run_on_cpu(options: argparse.Namespace) -> None:
    rows = cost_rows(options.quick)
    one, fleet = rows[0], rows[1]
    threads = measure_hogwild(Contenders(2), rounds=3 if options.quick else 9, num_steps=12 if options.quick else 48)
    rows += threads
    by_name = {row["threads"]: row["samples_per_s"] for row in threads}
    summary = {
        "cpu_s_per_1000_samples_over_one_process": fleet["cpu_s_per_1000_samples"] / one["cpu_s_per_1000_samples"],
        "queue_nonempty_share": fleet["queue_nonempty_share"],
        "trainers_wait_share": fleet["trainers_wait_share"],
        "hogwild_2_threads_speedup": by_name["2 Hogwild threads"] / by_name["1 Hogwild thread"],
    }
    publish("fleet", rows, summary | noise_of(threads), options, packages=("pyzmq", "pyarrow"))


# On a GPU: steps of one trainer, its tables elsewhere


def layout_and_partition(model: Model) -> tuple[Layout, Partition]:
    spec = model.spec()
    layout = layout_of(spec.features, spec.tables)
    return layout, partition_tables(layout.tables, NUM_SERVERS)


def serve(number: int, num_threads: int) -> None:
    """Be a sparse server until whoever started this is gone."""
    torch.set_num_threads(num_threads)
    parent = os.getppid()
    layout, partition = layout_and_partition(M3)
    kept = TableShard(piece_layout(layout, partition.pieces_of(layout, number)), M3.spec().train.sparse_optimizer)
    with SparseServer(kept, name=f"sparse-{number}") as server:
        print(server.address, flush=True)
        server.serve(lambda: os.getppid() != parent)


@contextmanager
def servers() -> Iterator[list[tuple[str, psutil.Process]]]:
    """Sparse servers as processes, each with half of the cores that the trainer leaves; their addresses."""
    threads = max(1, ((os.cpu_count() or 2) - 2) // NUM_SERVERS)
    with ExitStack() as stack:
        started = []
        for number in range(NUM_SERVERS):
            command = [sys.executable, "-m", "benchmarks.fleet", "--serve", str(number), str(threads)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        yield [(process.stdout.readline().strip(), psutil.Process(process.pid)) for process in started if process.stdout]


def stepped(store: Any, device: str, num_steps: int) -> float:
    """Seconds per step, with batches prefetched as in `rowstead train`."""
    spec = M3.spec()
    with torch.random.fork_rng(devices=[]):
        model = DLRM(spec.model, spec.features, store).to(device)
    stepper = Stepper(model, spec.train, total_steps=1_000_000)
    batches = [M3.draw(device) for _ in range(GPU_BATCHES)]
    for _, batch, _ in prefetch_rows(((batch, batch, {}) for batch in batches), store):
        stepper.step(batch, 1)
    many = ((batches[index % GPU_BATCHES], batches[index % GPU_BATCHES], {}) for index in range(num_steps))
    start = time.perf_counter()
    for number, (_, batch, _) in enumerate(prefetch_rows(many, store), start=2):
        stepper.step(batch, number)
    return (time.perf_counter() - start) / num_steps


def remote_rows(device: str, num_steps: int) -> list[dict[str, Any]]:
    """A row for tables in the memory of the device, and one for each staleness of tables in sparse servers."""
    layout, partition = layout_and_partition(M3)
    optimizer = M3.spec().train.sparse_optimizer
    size = M3.shape.batch_size
    step_s = stepped(DeviceStore(layout, optimizer, device=device, check=False), device, num_steps)
    rows: list[dict[str, Any]] = [{"tables": "device", "samples_per_s": size / step_s, "step_ms": 1e3 * step_s}]
    print(
        f"tables in the device's memory: {1e3 * step_s:.1f} ms per step; starting {NUM_SERVERS} servers",
        file=sys.stderr,
        flush=True,
    )
    with servers() as started:
        for staleness in (0, STALENESS):
            clients: list[Client] = []

            def connect(number: int, clients: list[Client] = clients) -> Client:
                clients.append(Client(started[number][0], name=f"trainer-{staleness}-{len(clients)}", deadline_s=120.0))  # noqa: B023
                return clients[-1]

            far = RemoteStore(layout, optimizer, partition, connect, staleness=staleness, check=False)
            store = HostStore(far, device, check=False) if device == "cuda" else far
            stepped(store, device, 3)
            before = _used(started, clients)
            began = time.perf_counter()
            step_s = stepped(store, device, num_steps)
            wall_s = time.perf_counter() - began
            used = {name: after - before[name] for name, after in _used(started, clients).items()}
            per_step = 1 / (num_steps + GPU_BATCHES)
            rows.append(
                {
                    "tables": f"remote, staleness {staleness}",
                    "samples_per_s": size / step_s,
                    "step_ms": 1e3 * step_s,
                    "server_cores": used["cpu_s"] / wall_s,
                    "wire_mb_a_step": 1e-6 * used["bytes"] * per_step,
                    "wire_gb_per_s": 1e-9 * used["bytes"] * per_step / step_s,
                    "waiting_share": used["waited_s"] * per_step / step_s,
                }
            )
            print(f"{rows[-1]['tables']}: {1e3 * step_s:.1f} ms per step", file=sys.stderr, flush=True)
            far.close()
    return rows


def _used(started: list[tuple[str, psutil.Process]], clients: list[Client]) -> dict[str, float]:
    """What servers and clients have used so far."""
    return {
        "cpu_s": sum(sum(process.cpu_times()[:2]) for _, process in started),
        "bytes": float(sum(client.num_bytes_sent + client.num_bytes_received for client in clients)),
        "waited_s": sum(client.waited_s for client in clients),
    }


def run_on_gpu(options: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    rows = remote_rows("cuda" if torch.cuda.is_available() else "cpu", QUICK_GPU_STEPS if options.quick else GPU_STEPS)
    summary = {"remote_over_device_samples_per_s": max(row["samples_per_s"] for row in rows[1:]) / rows[0]["samples_per_s"]}
    publish("fleet", rows, summary, options, packages=("pyzmq", "triton"))


def main() -> None:
    parser = arguments(__doc__, devices=("cpu", "cuda"))
    parser.add_argument("--serve", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
    elif options.device == "cuda":
        run_on_gpu(options)
    else:
        run_on_cpu(options)


if __name__ == "__main__":
    main()
