"""The five figures of the README and of docs/performance.md, and where a peer is faster."""

from __future__ import annotations

import math

from docs import tables


def headlines(root: str) -> str:
    """The five figures of this page and of the README, each with its command and the file that it is from; `root` leads to the repository's root."""
    lines = ["| what | measured | on | command, and its result |", "|---|---|---|---|"]
    for what, benchmark, device, text in _HEADLINES:
        result, file = tables.latest(benchmark, device), tables.latest_file(benchmark, device)
        if result is None or file is None:
            raise ValueError(f"no result of benchmarks.{benchmark} on {device}")
        machine = result["machine"]
        on = machine.get("gpu") or f"{machine['num_cores']} cores of {machine['cpu'].split(' (')[0]}"
        path = f"benchmarks/results/{file.name}"
        option = "" if benchmark == "reader" else f" --device {device}"  # it has none
        lines.append(
            f"| {what} | {text.format(**result['summary'])} | {on} | [`python -m benchmarks.{benchmark}{option}`]({root}{path}) |"
        )
    return "\n".join(lines)


_HEADLINES = (
    (
        "whole training step, three production models",
        "step",
        "cuda",
        "**{step_vs_fbgemm_geomean:.2f} times** the speed of FBGEMM with torch.compile ({step_vs_fbgemm_min:.2f} at least)",
    ),
    (
        "embedding look-up + exact row-wise Adagrad",
        "embedding",
        "cuda",
        "**{lookup_update_vs_fbgemm_geomean:.2f} times** FBGEMM as TorchRec calls it ({lookup_update_vs_fbgemm_min:.2f} at least)",
    ),
    (
        "tables in system memory, a tenth cached on the GPU",
        "cache",
        "cuda",
        "**{criteo_vs_fbgemm_caching_min:.1f} times at least** FBGEMM's cache without its prefetching (Criteo-like ids)",
    ),
    (
        "whole training step on a CPU",
        "step",
        "cpu",
        "**{step_vs_fbgemm_geomean:.2f} times** FBGEMM, {step_vs_torch_geomean:.2f} times nn.EmbeddingBag",
    ),
    (
        "Parquet files to batches, per core",
        "reader",
        "cpu",
        "**{samples_per_s_per_core_vs_pandas:.1f} times** pandas ({samples_per_s_per_core_vs_pandas_on_pyarrow_defaults:.1f} on a file as pyarrow writes it)",
    ),
)
"""What was measured, benchmark, device, and the figures of its summary."""


def slower() -> str:
    """Where a peer is faster, or where something else limits training."""
    result = tables.latest("embedding_jagged", "cuda")
    ratio = result["summary"]["embedding_bags_eager_vs_fbgemm_geomean"] if result is not None else math.nan
    return f"""Not everything is faster. `EmbeddingBags` called eagerly in a PyTorch program on a GPU, with bags of varying lengths, reaches {ratio:.2f} times
FBGEMM's speed (`python -m benchmarks.embedding --device cuda`, 2026-11-18), since its launches cost the host more. Training from Parquet files on a GPU
waits for the cores that decode ([Training from files](#training-from-files)); [packed logs](data.md#packed-logs) are the remedy."""
