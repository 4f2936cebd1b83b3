"""The tables that others would use: FBGEMM's, as TorchRec has them (`make peers` installs them for a CPU), and plain PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse

LARGEST = 0.01
"""Initial rows are even between minus and plus this."""


def has_fbgemm() -> bool:
    """Whether FBGEMM is installed."""
    try:
        import fbgemm_gpu  # noqa: F401
    except ImportError:
        return False
    return True


def fbgemm_tables(
    num_tables: int, num_rows: int, width: int, device: str, *, location: str | None = None, cache_share: float = 0.2
) -> Any:
    """`fbgemm_tables_of` with tables of one size."""
    return fbgemm_tables_of([num_rows] * num_tables, [width] * num_tables, device, location=location, cache_share=cache_share)


def fbgemm_tables_of(
    num_rows: Sequence[int], widths: Sequence[int], device: str, *, location: str | None = None, cache_share: float = 0.2
) -> Any:
    """A module from ids [nnz] and offsets [F*B + 1] to sums [B, F*D], whose backward pass updates the rows.

    `location` is one of FBGEMM's names for where rows are; the memory of the device unless given. MANAGED_CACHING keeps
    `cache_share` of the rows in a GPU's memory.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

    on_gpu = device == "cuda"
    chosen = EmbeddingLocation[location or ("DEVICE" if on_gpu else "HOST")]
    compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, chosen, compute) for rows, width in zip(num_rows, widths, strict=True)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=PoolingMode.SUM,
        learning_rate=0.01,
        cache_load_factor=cache_share,
        device=torch.device(device),
    )
    module.init_embedding_weights_uniform(-LARGEST, LARGEST)
    return module


class EmbeddingBags(nn.Module):
    """One nn.EmbeddingBag per table, with sparse gradients; over tables that are there already, or its own."""

    def __init__(self, num_tables: int, num_rows: int, width: int, device: str, tables: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        if tables is None:
            tables = [torch.empty(num_rows, width, device=device).uniform_(-LARGEST, LARGEST) for _ in range(num_tables)]
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum", sparse=True, include_last_offset=True)
            for rows in tables
        )

    def forward(self, sparse: Sparse) -> Tensor:
        """Sums [B, F*D] of bags that are all equally long."""
        parts, bounds = sparse.ids.chunk(len(self.bags)), sparse.offsets[: sparse.num_samples + 1]
        return torch.cat([bag(part, bounds) for bag, part in zip(self.bags, parts, strict=True)], dim=1)
