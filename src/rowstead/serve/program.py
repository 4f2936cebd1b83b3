"""The program that is exported: raw features in, click probabilities out, with preprocessing and tables inside.

Letters: B examples, F features, Fd dense features, nnz ids, N rows of all tables of one width, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rowstead.data.transforms import DenseTransforms
from rowstead.kernels.layout import Layout
from rowstead.kernels.mix import mix64_tensor
from rowstead.nn.encoders import HistoryEncoder
from rowstead.nn.heads import Head, TaskLosses
from rowstead.nn.histories import HistoryNetwork
from rowstead.nn.network import Network
from rowstead.spec.features import SparseFeatureSpec

NO_LIMIT = 2**62
_LOW_63_BITS = (1 << 63) - 1


class DenseProgram(nn.Module):
    """The dense transforms of training as torch operations: clip, log, fill missing values, standardise."""

    low: Tensor
    high: Tensor
    log: Tensor
    fill: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, transforms: DenseTransforms) -> None:
        super().__init__()
        self.is_identity = transforms.is_identity
        self.any_log = bool(transforms.log.any())
        for name in () if self.is_identity else ("low", "high", "log", "fill", "shift", "scale"):
            self.register_buffer(name, torch.from_numpy(getattr(transforms, name).copy()))

    def forward(self, dense: Tensor) -> Tensor:
        """Transform raw features [B, Fd], NaN where missing."""
        if self.is_identity:
            return dense
        x = torch.clamp(dense, self.low, self.high)
        if self.any_log:
            # In float64, as in training: float32 logarithms differ between libraries.
            x = torch.where(self.log, torch.copysign(torch.log1p(x.double().abs()).float(), x), x)
        x = torch.where(torch.isnan(x), self.fill, x)
        return (x - self.shift) * self.scale


class FlatRows(nn.Module):
    """All tables of one width as one tensor, in FP32 or in 8 bits with a scale and an offset per row; a call dequantises only the rows it reads."""

    rows: Tensor
    scale: Tensor
    low: Tensor

    def __init__(self, tables: Sequence[Tensor], *, int8: bool) -> None:
        super().__init__()
        self.int8 = int8
        if int8:
            parts = [_quantise(table.detach().float().cpu()) for table in tables]
            for index, name in enumerate(("rows", "scale", "low")):
                self.register_buffer(name, torch.cat([part[index] for part in parts]))
        else:
            self.register_buffer("rows", torch.cat([table.detach().float().cpu() for table in tables]))

    def at(self, indices: Tensor) -> Tensor:
        """The rows at `indices` [...], as [..., D]."""
        rows = self.rows[indices]
        return rows.float() * self.scale[indices] + self.low[indices] if self.int8 else rows

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the rows at `indices` [nnz], each times its weight [nnz], to [bags, D]; bag i is offsets[i] to offsets[i+1]."""
        table = self.rows
        if self.int8:
            table = self.at(indices)
            indices = torch.arange(indices.shape[0], device=indices.device)
        return functional.embedding_bag(
            indices, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )


def _quantise(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise rows [N, D] to uint8 [N, D], with scale [N, 1] and lowest value [N, 1]."""
    low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
    return ((rows - low) / scale).round_().clamp_(0, 255).to(torch.uint8), scale, low


class ServingProgram(nn.Module):
    """A whole model over raw features: dense [B, Fd] with NaN for missing, raw 64-bit ids [nnz], offsets [F*B + 1].

    Offsets are feature-major as in a Batch. Text ids are their XXH64; integers are themselves.
    """

    num_rows: Tensor
    base: Tensor
    group: Tensor
    mixes: Tensor
    max_ids: Tensor

    def __init__(
        self,
        net: Network,
        tables: Sequence[Tensor],
        layout: Layout,
        features: Sequence[SparseFeatureSpec],
        transforms: DenseTransforms,
        *,
        head: Head | TaskLosses,
        log_keep_rate: float,
        int8: bool = False,
    ) -> None:
        super().__init__()
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.dense_program = DenseProgram(transforms)
        self.head, self.log_keep_rate = head, log_keep_rate
        self.num_dense = len(transforms.names)
        self.num_features = layout.num_features
        widths = sorted({table.width for table in layout.tables})
        members = [[t for t, table in enumerate(layout.tables) if table.width == width] for width in widths]
        self.groups = nn.ModuleList(FlatRows([tables[t] for t in group], int8=int8) for group in members)
        base, group_of = [0] * len(layout.tables), [0] * len(layout.tables)
        for index, group in enumerate(members):
            first = 0
            for t in group:
                base[t], group_of[t] = first, index
                first += layout.tables[t].num_rows
        self.feature_groups = [group_of[t] for t in layout.table_of]
        self.is_mean = layout.is_mean
        self.truncates = any(feature.max_ids is not None for feature in features)
        self._register("num_rows", [layout.tables[t].num_rows for t in layout.table_of])
        self._register("base", [base[t] for t in layout.table_of])
        self._register("group", self.feature_groups)
        self._register("mixes", [int(feature.hash == "mix") for feature in features])
        self._register("max_ids", [feature.max_ids or NO_LIMIT for feature in features])

    def _register(self, name: str, values: list[int]) -> None:
        """Register one integer per feature as a buffer [F]; none without features, since an archive cannot hold empty tensors."""
        if values:
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64))

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """Click probabilities [B], or the prediction of each task [B, T]."""
        logits = self.net(self.dense_program(dense), self.pooled(dense.shape[0], ids, offsets))
        return self.head.predict(logits + self.log_keep_rate)

    def pooled(self, num_samples: int, ids: Tensor, offsets: Tensor) -> Tensor:
        """Pooled rows [B, sum of widths]."""
        if not self.num_features:
            return torch.zeros(num_samples, 0)
        positions = torch.arange(ids.shape[0], device=ids.device)
        bag = torch.searchsorted(offsets, positions, right=True) - 1
        feature = bag // num_samples
        rows = self._row_of(ids, feature) + self.base[feature]
        kept = positions - offsets[bag] < self.max_ids[feature] if self.truncates else None
        # Tracing assumes 2 bags or more: an extra empty one lets a model of one feature serve one example.
        bounds = torch.cat([offsets, offsets[-1:]])
        by_group = []
        for index, group in enumerate(self.groups):
            mine, used = rows, kept
            if len(self.groups) > 1:
                in_group = self.group[feature] == index
                mine = torch.where(in_group, rows, 0)
                used = in_group if kept is None else in_group & kept
            summed = group(mine, bounds, None if used is None else used.float())
            by_group.append(self._by_feature(summed, num_samples))
        vectors = [by_group[g][f] for f, g in enumerate(self.feature_groups)]
        if any(self.is_mean):
            lengths = self._by_feature(bounds.diff(), num_samples)
            used_ids = torch.minimum(lengths, self.max_ids.unsqueeze(1)).clamp(min=1).unsqueeze(2)
            vectors = [v / used_ids[f] if self.is_mean[f] else v for f, v in enumerate(vectors)]
        if isinstance(self.net, HistoryNetwork):
            vectors = self._encode(self.net, vectors, ids, bounds, num_samples)
        return torch.cat(vectors, dim=1)

    def _encode(self, net: HistoryNetwork, pooled: list[Tensor], ids: Tensor, bounds: Tensor, num_samples: int) -> list[Tensor]:
        """The pooled vectors [B, D] of each feature, those of histories replaced by their encoders'.

        Histories are padded to the longest that is allowed, whatever is in the batch: the shapes of a traced program are fixed.
        """
        vectors = list(pooled)
        begins, ends = self._by_feature(bounds[:-1], num_samples), self._by_feature(bounds[1:], num_samples)
        padded = torch.cat([ids, ids.new_zeros(1)])
        for feature, target, max_ids, encoder in zip(net.histories, net.targets, net.max_ids, net.encoders, strict=True):
            ages = torch.arange(max_ids - 1, -1, -1, device=ids.device)
            positions = ends[feature].unsqueeze(1) - 1 - ages  # [B, L]: the last ids, which are the most recent
            is_id = positions >= begins[feature].unsqueeze(1)
            raw = padded[torch.where(is_id, positions, ids.shape[0])]
            index = self._row_of(raw, torch.full_like(raw, feature)) + self.base[feature]
            rows = cast(FlatRows, self.groups[self.feature_groups[feature]]).at(index)
            against = None if target is None else pooled[target]
            vectors[feature] = cast(HistoryEncoder, encoder).padded(rows, is_id, against)
        return vectors

    def _by_feature(self, bags: Tensor, num_samples: int) -> Tensor:
        """Values per bag without the extra one: [F*B + 1, …] as [F, B, …]."""
        return bags[: self.num_features * num_samples].unflatten(0, (self.num_features, num_samples))

    def _row_of(self, ids: Tensor, feature: Tensor) -> Tensor:
        """Row in its table of each raw id [nnz] of each feature [nnz], hashed as in training."""
        mixed = torch.bitwise_and(mix64_tensor(ids), _LOW_63_BITS)
        return torch.where(self.mixes[feature] == 1, mixed, ids) % self.num_rows[feature]


def trace_program(program: ServingProgram) -> torch.export.ExportedProgram:
    """Trace `program` for any number of examples from 1 on, and for any number of ids."""
    features = program.num_features
    samples, ids = 3, 4 * features
    offsets = torch.linspace(0, ids, features * samples + 1).long()
    arguments = (torch.zeros(samples, program.num_dense), torch.zeros(ids, dtype=torch.int64), offsets)
    batch, nnz = torch.export.Dim("batch", min=1), torch.export.Dim("nnz", min=0)
    shapes = ({0: batch}, {0: nnz} if features else None, {0: features * batch + 1} if features else None)
    with torch.no_grad():
        return torch.export.export(program.eval(), arguments, dynamic_shapes=shapes)
