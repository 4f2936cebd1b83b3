"""What checking ids and offsets costs, beside the look-up and the update of the same batch.

python -m benchmarks.check [--device cpu|cuda] [--quick] [--json]

Shape M1: 30 tables of 100,000 rows of 64, 28 ids each, batch 200; row-wise Adagrad; fresh ids every round. On a CPU the check
is one pass over ids and offsets, and seconds are of processor time, all threads together, so that other work on the machine does not
count. On a GPU the check also waits for the device, which is why `rowstead train` checks batches on the CPU.
"""

from __future__ import annotations

import time

import torch

from benchmarks.harness import alternate, arguments, publish, spread
from rowstead.data.batch import Sparse
from rowstead.kernels.check import check_sparse
from rowstead.kernels.layout import layout_of
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.device import DeviceStore

NUM_TABLES, NUM_ROWS, WIDTH, NUM_IDS, BATCH = 30, 100_000, 64, 28, 200


def main() -> None:
    options = arguments(__doc__, devices=("cpu", "cuda")).parse_args()
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=NUM_TABLES, num_rows=NUM_ROWS),))
    layout = layout_of(features, tables_of(features, width=WIDTH))
    store = DeviceStore(layout, SparseOptimizerSpec(), device=options.device, check=False)
    repeats = 20 if options.quick else 200
    rows = []
    for dtype in (torch.int64, torch.int32):
        seconds = measured(store, dtype, options.device, repeats)
        check_s, rest_s = (spread(seconds[name])["median"] for name in ("check", "look-up + update"))
        kind = str(dtype).removeprefix("torch.")
        rows.append({"ids": kind, "check_s": check_s, "lookup_update_s": rest_s, "share": check_s / rest_s})
    publish("check", rows, {"check_share_max": max(row["share"] for row in rows)}, options)


def measured(store: DeviceStore, dtype: torch.dtype, device: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of each round, the two taking turns on the same fresh batches."""
    random = torch.Generator().manual_seed(1)
    offsets = torch.arange(0, NUM_TABLES * BATCH * NUM_IDS + 1, NUM_IDS, device=device)
    grad = torch.randn(BATCH, NUM_TABLES * WIDTH, generator=random).to(device)
    drawn = torch.rand(64, NUM_TABLES * BATCH * NUM_IDS, generator=random) ** 3
    batches = [Sparse(ids=(NUM_ROWS * one).to(dtype).to(device), offsets=offsets, num_features=NUM_TABLES) for one in drawn]
    turn = 0

    def check() -> None:
        batch = batches[turn % len(batches)]
        check_sparse(store.layout, batch.ids, batch.offsets, num_features=batch.num_features)

    def lookup_update() -> None:
        nonlocal turn
        batch = batches[turn % len(batches)]
        turn += 1
        store.lookup(batch)
        store.update(batch, grad, lr=0.01, step=turn)

    def clock() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    return alternate({"check": check, "look-up + update": lookup_update}, repeats=repeats, warmups=5, clock=clock)


if __name__ == "__main__":
    main()
