"""The program that is exported: raw fields in, click probability out, preprocessing and tables inside.

Letters: B examples, F features, Fd dense features, nnz ids, W widths that differ, N rows of all tables of one width, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rowstead.kernels.layout import Layout
from rowstead.kernels.mix import mix64
from rowstead.model.dlrm import DenseNet
from rowstead.spec.features import SparseFeatureSpec

NO_LIMIT = 2**62


class FlatRows(nn.Module):
    """All tables of one width as one, in FP32 or as int8 with a scale and an offset a row."""

    def __init__(self, tables: Sequence[Tensor], *, int8: bool) -> None:
        super().__init__()
        self.int8 = int8
        rows = torch.cat([table.detach().float().cpu() for table in tables])
        if int8:
            low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
            scale = ((high - low) / 255).clamp(min=1e-12)
            self.register_buffer("rows", ((rows - low) / scale).round().clamp(0, 255).to(torch.uint8))
            self.register_buffer("scale", scale)
            self.register_buffer("low", low)
        else:
            self.register_buffer("rows", rows)

    def forward(self, places: Tensor) -> Tensor:
        """Rows [n, D] at `places` [n]."""
        rows = self.get_buffer("rows")[places]
        if self.int8:
            return rows.float() * self.get_buffer("scale")[places] + self.get_buffer("low")[places]
        return rows


class ServingProgram(nn.Module):
    """A whole model from raw fields: dense [B, Fd] with NaN for missing, raw 64-bit ids [nnz], offsets [F*B + 1].

    Offsets are feature-major as in a Batch. Text ids are their XXH64; integers are themselves.
    """

    def __init__(
        self,
        net: DenseNet,
        tables: Sequence[Tensor],
        layout: Layout,
        features: Sequence[SparseFeatureSpec],
        dense_transforms: nn.Module,
        *,
        log_keep_rate: float,
        int8: bool = False,
    ) -> None:
        super().__init__()
        self.net = net
        self.dense_transforms = dense_transforms
        self.log_keep_rate = log_keep_rate
        self.num_features = layout.num_features
        self.widths = sorted({table.width for table in layout.tables})
        self.columns = layout.columns
        groups, bases, group_of = [], [0] * len(layout.tables), [0] * len(layout.tables)
        for place, width in enumerate(self.widths):
            members = [t for t, table in enumerate(layout.tables) if table.width == width]
            groups.append(FlatRows([tables[t] for t in members], int8=int8))
            base = 0
            for t in members:
                bases[t], group_of[t] = base, place
                base += layout.tables[t].num_rows
        self.groups = nn.ModuleList(groups)
        self.feature_groups = [group_of[t] for t in layout.table_of]
        self._facts("num_rows", [layout.tables[t].num_rows for t in layout.table_of])
        self._facts("base", [bases[t] for t in layout.table_of])
        self._facts("group", self.feature_groups)
        self._facts("mixes", [int(feature.hash == "mix") for feature in features])
        self._facts("max_ids", [feature.max_ids or NO_LIMIT for feature in features])
        self._facts("is_mean", [int(mean) for mean in layout.is_mean])

    def _facts(self, name: str, values: list[int]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64))

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """Click probabilities [B]."""
        log_odds = self.net(self.dense_transforms(dense), self.pooled(dense.shape[0], ids, offsets))
        return torch.sigmoid(log_odds + self.log_keep_rate)

    def pooled(self, num_samples: int, ids: Tensor, offsets: Tensor) -> Tensor:
        """Pooled rows [B, sum of widths]."""
        if not self.num_features:
            return torch.zeros(num_samples, 0)
        num_bags = num_samples * self.num_features
        places = torch.arange(ids.shape[0], device=ids.device)
        bag = torch.searchsorted(offsets, places, right=True) - 1
        feature = bag // num_samples
        limit = self.get_buffer("max_ids")[feature]
        kept = places - offsets[bag] < limit
        rows = self.get_buffer("base")[feature] + self._row_of(ids, feature)
        share = kept.to(torch.float32)
        is_mean = self.get_buffer("is_mean")[feature]
        used = torch.minimum(offsets[1:] - offsets[:-1], _per_bag(self.get_buffer("max_ids"), num_samples))
        share = torch.where(is_mean == 1, share / used[bag].to(torch.float32), share)
        by_group = []
        for place, group in enumerate(self.groups):
            mine = self.get_buffer("group")[feature] == place
            found = group(torch.where(mine, rows, 0)) * (share * mine.to(torch.float32)).unsqueeze(1)
            summed = torch.zeros(num_bags, found.shape[1], device=found.device).index_add(0, bag, found)
            by_group.append(summed.unflatten(0, (self.num_features, num_samples)))
        return torch.cat([by_group[g][f] for f, g in enumerate(self.feature_groups)], dim=1)

    def _row_of(self, ids: Tensor, feature: Tensor) -> Tensor:
        """The row of each raw id in its table: the rule of training."""
        mixed = torch.bitwise_and(mix64(ids), (1 << 63) - 1)
        chosen = torch.where(self.get_buffer("mixes")[feature] == 1, mixed, ids)
        return chosen % self.get_buffer("num_rows")[feature]


def _per_bag(per_feature: Tensor, num_samples: int) -> Tensor:
    """A fact of each feature [F], once for each of its bags [F*B]."""
    return per_feature.unsqueeze(1).expand(-1, num_samples).reshape(-1)


class DenseProgram(nn.Module):
    """The dense transforms of training as torch operations: clip, log, missing, standardise. All vectors [Fd]."""

    def __init__(self, *, low: Tensor, high: Tensor, log: Tensor, fill: Tensor, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        for name, value in (("low", low), ("high", high), ("log", log), ("fill", fill), ("mean", mean), ("scale", scale)):
            self.register_buffer(name, value)

    def forward(self, dense: Tensor) -> Tensor:
        """Transformed features [B, Fd]."""
        x = torch.clamp(dense, self.get_buffer("low"), self.get_buffer("high"))
        x = torch.where(self.get_buffer("log"), torch.sign(x) * torch.log1p(x.abs()), x)
        x = torch.where(torch.isnan(x), self.get_buffer("fill"), x)
        return (x - self.get_buffer("mean")) * self.get_buffer("scale")
