"""History encoders: the rows of a history, in the order of its ids, to one vector.

An encoder takes the rows of a batch one history after the other, without padding. Memory follows the ids. What is exported has padded
histories instead (`padded`): a traced program wants shapes that do not depend on the values of tensors.

Letters: B examples, nnz ids of their histories, L the longest history that is allowed, D width.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rowstead.nn import segments
from rowstead.spec.encoders import ENCODERS, EncoderSpec

GROWTH = 1.5
"""Histories are padded for self-attention to at most this many times their length."""


class HistoryEncoder(nn.Module):
    """Base class of encoders: define `forward` and `padded`, which compute the same. An empty history gives zeros.

    All parameters get gradients in every backward pass, zeros if no history has ids: processes whose shares of a batch differ in that must
    send the same gradients in the same order.
    """

    def __init__(self, width: int, max_ids: int, spec: EncoderSpec) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(max_ids, width)) if spec.positions else None
        """[L, D]: of the most recent id first."""
        if self.positions is not None:
            nn.init.normal_(self.positions, std=width**-0.5)

    def forward(self, rows: Tensor, offsets: Tensor, target: Tensor | None = None) -> Tensor:
        """One vector for each history, [B, D].

        rows [nnz, D], of each history from the oldest id to the most recent; offsets int64 [B + 1]; target [B, D] or None.
        """
        raise NotImplementedError

    def padded(self, rows: Tensor, is_id: Tensor, target: Tensor | None = None) -> Tensor:
        """The same from histories of L rows [B, L, D], the most recent last; is_id [B, L] is false where a shorter one has none."""
        raise NotImplementedError

    def with_positions(self, rows: Tensor, offsets: Tensor, bags: Tensor) -> Tensor:
        """rows [nnz, D] and the vectors of their positions; `bags` [nnz] is the history of each."""
        if self.positions is None:
            return rows
        ages = offsets[1:][bags] - 1 - torch.arange(rows.shape[0], device=rows.device)
        return rows + functional.embedding(ages.clamp_(max=self.positions.shape[0] - 1), self.positions)

    def with_padded_positions(self, rows: Tensor) -> Tensor:
        """The same for rows [B, l, D] whose last is the most recent."""
        return rows if self.positions is None else rows + self.positions[: rows.shape[1]].flip(0)


def build_encoder(spec: EncoderSpec, *, width: int, max_ids: int) -> HistoryEncoder:
    """The encoder of a history of at most `max_ids` ids, with fresh parameters."""
    encoder: HistoryEncoder = globals()[ENCODERS[spec.kind].module](width, max_ids, spec)
    return encoder


class DINEncoder(HistoryEncoder):
    """Target attention: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018, arXiv:1706.06978.

    An MLP, the activation unit, gives each id k of a history a weight from its row, the target's row t and their product:
    a(k) = MLP([k, t, k * t]); the vector is the sum of a(k) k. The authors' code also gives the MLP k - t, a linear function of the others.
    """

    def __init__(self, width: int, max_ids: int, spec: EncoderSpec) -> None:
        super().__init__(width, max_ids, spec)
        self.softmax = spec.softmax
        widths = (3 * width, *spec.hidden, 1)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(widths))
        self.activations = nn.ModuleList(nn.PReLU() for _ in spec.hidden)

    def forward(self, rows: Tensor, offsets: Tensor, target: Tensor | None = None) -> Tensor:
        assert target is not None
        bags = segments.bag_of_rows(offsets, rows.shape[0])
        scores = self._scores(self.with_positions(rows, offsets, bags), target, lambda x: segments.expand(x, offsets, bags))
        weights = segments.softmax(scores, offsets, bags) if self.softmax else scores
        return segments.weighted_sum(rows, weights.to(rows.dtype), offsets, bags)

    def padded(self, rows: Tensor, is_id: Tensor, target: Tensor | None = None) -> Tensor:
        assert target is not None
        scores = self._scores(self.with_padded_positions(rows), target, lambda x: x.unsqueeze(1))
        if self.softmax:
            scores = torch.softmax(scores.masked_fill(~is_id, torch.finfo(scores.dtype).min), dim=1)
        weights = scores * is_id
        return (weights.unsqueeze(2) * rows).sum(dim=1)

    def _scores(self, keys: Tensor, target: Tensor, expand: Callable[[Tensor], Tensor]) -> Tensor:
        """The weight of each id, [...], from keys [..., D] and target [B, D]; `expand` repeats values of a history for its ids.

        The first layer is applied to its three inputs in turn: they are never copied side by side, and the target's part is computed once
        for each history.
        """
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        of_key, of_target, of_product = first.weight.split(keys.shape[-1], dim=1)
        x = functional.linear(keys, of_key) + functional.linear(keys * expand(target), of_product)
        x = x + expand(functional.linear(target, of_target, first.bias))
        for activation, layer in zip(self.activations, self.layers[1:], strict=True):
            x = layer(activation(x))
        return x.squeeze(-1)


class AttentionEncoder(HistoryEncoder):
    """Self-attention: Kang and McAuley, "Self-Attentive Sequential Recommendation" (SASRec), ICDM 2018, arXiv:1808.09781.

    Each layer is self-attention and an MLP, both over normalised vectors and added to them. The vector of the most recent id is taken; since
    only that one is, no id needs to be hidden from those before it. Histories of similar lengths are computed together.
    """

    def __init__(self, width: int, max_ids: int, spec: EncoderSpec) -> None:
        super().__init__(width, max_ids, spec)
        self.layers = nn.ModuleList(_AttentionLayer(width, spec.heads) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, rows: Tensor, offsets: Tensor, target: Tensor | None = None) -> Tensor:
        bags = segments.bag_of_rows(offsets, rows.shape[0])
        rows = self.with_positions(rows, offsets, bags)
        groups = _group_by_length(offsets)
        sources = torch.cat([bags[:0], *(one.rows.flatten() for one in groups.padded)])
        spread = segments.spread(rows, sources, groups.slots)
        vectors = [rows.new_zeros(groups.num_empty, rows.shape[1])]
        for one, x in zip(groups.padded, spread.split([one.rows.numel() for one in groups.padded]), strict=True):
            vectors.append(self._encode(x.view(*one.rows.shape, -1), one.is_id).to(rows.dtype))
        if not groups.padded:  # parameters get zero gradients, in the same order as ever
            nothing = rows.sum(dim=0).view(1, 1, -1)
            vectors.append(self._encode(nothing, bags.new_ones(1, 1, dtype=torch.bool))[:0].to(rows.dtype))
        return segments.reorder(torch.cat(vectors), groups.order)

    def padded(self, rows: Tensor, is_id: Tensor, target: Tensor | None = None) -> Tensor:
        is_empty = ~is_id[:, -1:]
        is_last = torch.arange(rows.shape[1], device=rows.device) == rows.shape[1] - 1  # else a softmax over nothing
        return self._encode(self.with_padded_positions(rows), is_id | is_last).masked_fill(is_empty, 0)

    def _encode(self, x: Tensor, is_id: Tensor) -> Tensor:
        """Vectors [B, D] of histories x [B, l, D], the most recent row last; is_id [B, l] is true for that one."""
        mask = is_id[:, None, None, :]
        for layer in self.layers[:-1]:
            x = layer(x, x, mask)
        return self.norm(self.layers[-1](x[:, -1:], x, mask)).squeeze(1)


class _AttentionLayer(nn.Module):
    """One layer: some of the vectors of a history attend to all of them."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.norm_of_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_and_value, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, history: Tensor, mask: Tensor) -> Tensor:
        """x [B, n, D] are vectors of history [B, l, D]; mask [B, 1, 1, l] is true for those that are attended to."""
        keys, values = self.key_and_value(self.norm(history)).chunk(2, dim=2)
        q, k, v = (one.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for one in (self.query(self.norm(x)), keys, values))
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_of_mlp(x))


@dataclass(frozen=True)
class _Padded:
    """Histories of similar lengths, padded to the longest of them."""

    rows: Tensor
    """int64 [B, l]: the row of each of their ids, the most recent last; any row where there is none."""
    is_id: Tensor
    """[B, l]."""


@dataclass(frozen=True)
class _Groups:
    """The histories of a batch in groups of similar lengths."""

    order: Tensor
    """[B]: the histories from the shortest to the longest, which is the order of the groups."""
    num_empty: int
    padded: list[_Padded]
    slots: Tensor
    """[nnz]: where each row is among those of all groups."""


def _group_by_length(offsets: Tensor) -> _Groups:
    """Group histories so that none is padded to more than GROWTH times its length; on a GPU the host waits for the lengths."""
    lengths, order = torch.sort(offsets.diff(), stable=True)
    ends, by_length = offsets[1:][order], lengths.tolist()
    num_empty = start = bisect_right(by_length, 0)
    padded, slots, num_slots = [], [], 0
    while start < len(by_length):
        stop = bisect_right(by_length, int(by_length[start] * GROWTH), lo=start)
        longest = by_length[stop - 1]
        ages = torch.arange(longest - 1, -1, -1, device=offsets.device)
        is_id = ages < lengths[start:stop, None]
        rows = (ends[start:stop, None] - 1 - ages).clamp_(min=0)
        padded.append(_Padded(rows, is_id))
        slots.append(torch.stack([rows[is_id], num_slots + is_id.flatten().nonzero().squeeze(1)]))
        num_slots += rows.numel()
        start = stop
    row_of, slot_of = torch.cat([order.new_zeros(2, 0), *slots], dim=1)
    return _Groups(order, num_empty, padded, torch.empty_like(slot_of).index_put_((row_of,), slot_of))
