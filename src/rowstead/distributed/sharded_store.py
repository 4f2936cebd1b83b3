"""Tables sharded over the processes of a synchronous job: each process keeps its pieces in a local store of any kind.

A look-up sends ids to the owners of their rows, which pool them and send the vectors back; an update sends the vectors' gradients
the same way. An owner sees the bags of all processes in one update, so the gradients of a row are summed over processes before
the optimizer sees them. Every process makes the same calls in the same order, with its own share of the same batch.

Letters: B examples of this process, F features, T tables, N rows, D width.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse, check_batch
from rowstead.distributed.process_group import ProcessGroup
from rowstead.distributed.sharded_ids import IdExchange
from rowstead.distributed.sharded_pieces import Make, Pieces
from rowstead.distributed.sharded_sums import ColumnPieces, ReplicatedTables
from rowstead.distributed.sharding import ShardPiece, ShardPlan, features_of
from rowstead.kernels.layout import Layout
from rowstead.kernels.reference import clip_pooled
from rowstead.kernels.row_state import compute_dtype
from rowstead.spec.placement import Shard
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, SparseOptimizerSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.device import resolve_device
from rowstead.stores.snapshot import Snapshot, join_snapshots
from rowstead.stores.state import StatePart, in_order_of


@dataclass
class _ShardedBatch:
    """A batch that was prefetched or looked up."""

    sparse: Sparse
    exchanges: list[IdExchange]
    """One for each kind of pieces."""
    stage: int = 0
    """0: headers sent, 1: ids sent, 2: ids received."""


class ShardedStore(EmbeddingStore):
    """An EmbeddingStore whose tables are shared by the processes of a group.

    `make` makes the local stores, of rows of type `dtype`; `wire` is the type in which vectors and gradients travel. `lookup`,
    `update`, `prefetch`, `rows` and `state` are called by all processes together, `rows` with the same ids.
    """

    def __init__(
        self,
        plan: ShardPlan,
        optimizer: SparseOptimizerSpec | None,
        process_group: ProcessGroup,
        make: Make,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        wire: torch.dtype | None = None,
        check: bool = True,
    ) -> None:
        super().__init__(plan.layout, check=check)
        self.plan, self.optimizer, self.process_group = plan, optimizer, process_group
        layout = plan.layout
        self._device = resolve_device(device)
        self._dtype = compute_dtype(dtype)
        local = None if optimizer is None else dataclasses.replace(optimizer, clip=None)  # clipped before gradients are cut

        def build(kind: type[Pieces], shards: Sequence[Shard]) -> list[Pieces]:
            pieces = plan.pieces_of(shards)
            if not any(pieces):
                return []
            return [kind(layout, pieces, process_group, make, local, dtype=self._dtype, device=self._device, wire=wire)]

        if optimizer is not None and ROW_OPTIMIZERS[optimizer.kind].couples_columns:
            self._pieces = build(Pieces, ("table", "row")) + build(ColumnPieces, ("column",))
        else:
            self._pieces = build(Pieces, ("table", "row", "column"))
        self._copies = ReplicatedTables(layout, plan.copies, process_group, make, local, dtype=self._dtype, device=self._device)
        self._columns = _PooledColumns(layout, [*(own for kind in self._pieces for own in kind.pieces), plan.copies])
        self._split_means = [
            feature
            for kind in self._pieces
            for feature, is_split in enumerate(kind.router.is_split)
            if is_split and layout.is_mean[feature]
        ]
        """Features of mean pooling whose bags are summed by several processes."""
        self._prefetched: deque[_ShardedBatch] = deque()
        self._current: _ShardedBatch | None = None
        self._modules_within = nn.ModuleList(self.local_stores)
        for store in self.local_stores:  # larger sets would have processes agree again on how early batches are prefetched
            store.limit_prefetch(1)
        wanted = max((store.batches_ahead for store in self.local_stores), default=0)
        self._batches_ahead = 1 + max(process_group.gather(wanted))  # else some would prefetch batches that others do not

    @property
    def kernel(self) -> str:
        return next((store.kernel for store in self.local_stores), "none")

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def local_stores(self) -> list[EmbeddingStore]:
        """The stores that hold this process's pieces and copies."""
        stores = [*(kind.store for kind in self._pieces), self._copies.store]
        return [store for store in stores if store is not None]

    @property
    def batches_ahead(self) -> int:
        """One for the ids to travel, and what the local stores of any process want."""
        return self._batches_ahead

    def prefetch(self, sparse: Sparse) -> None:
        """Start to send the ids of a coming batch, while the batches before it are trained on."""
        self._advance()
        self._prefetched.append(self._start(sparse))

    def drop_prefetched(self) -> None:
        for batch in self._prefetched:
            for exchange in batch.exchanges:
                exchange.drop()
        self._prefetched.clear()
        for store in self.local_stores:
            store.drop_prefetched()

    def lookup(self, sparse: Sparse) -> Tensor:
        return self.start_lookup(sparse)()

    def start_lookup(self, sparse: Sparse) -> Callable[[], Tensor]:
        """Start a look-up; the returned function waits for it, so that other work can overlap."""
        batch = self._take(sparse)
        waits = [kind.start_lookup(exchange) for kind, exchange in zip(self._pieces, batch.exchanges, strict=True)]
        self._advance()
        copies = self._copies.lookup(sparse)
        self._current = batch

        def wait() -> Tensor:
            pooled = self._columns.join([*(block for one in waits for block in one()), copies])
            return self._divide_means(pooled, sparse)

        return wait

    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        self.start_update(sparse, grad)(lr, step)

    @torch.no_grad()
    def start_update(self, sparse: Sparse, grad: Tensor) -> Callable[[float, int], None]:
        """Start to send gradients [B, sum of widths] to the owners of the rows; the returned function waits and applies them."""
        assert self.optimizer is not None, "this store was made for look-ups only"
        batch, self._current = self._current, None
        if batch is None or not _is_same(batch.sparse, sparse):
            batch = self._take(sparse)
        if self.optimizer.clip is not None:
            grad = clip_pooled(grad, self.layout, self.optimizer.clip)
        size, applies = self.process_group.world_size, []
        copied = self._copies.start_update(sparse, self._columns.cut(grad, -1))
        grad = self._divide_means(grad, sparse)
        for index, (kind, exchange) in enumerate(zip(self._pieces, batch.exchanges, strict=True)):
            own = [self._columns.cut(grad, block) for block in range(index * size, (index + 1) * size)]
            applies.append(kind.start_update(exchange, own))

        @torch.no_grad()
        def apply(lr: float, step: int) -> None:
            for one in (*applies, copied):
                one(lr, step)
            self._advance()

        return apply

    def rows(self, table: str, ids: Tensor) -> Tensor:
        index = [each.name for each in self.tables].index(table)
        if self.plan.shards[index] == "replicate" and self._copies.store is not None:
            return self._copies.store.rows(table, ids).to(self._dtype)
        found = torch.zeros(ids.numel(), self.tables[index].width, dtype=self._dtype, device=self._device)
        for kind in self._pieces:
            for piece in kind.pieces[self.process_group.rank]:
                if piece.table != index or kind.store is None:
                    continue
                is_here = (ids >= piece.first_row) & (ids < piece.first_row + piece.num_rows)
                here = kind.store.rows(table, ids[is_here] - piece.first_row).to(self._dtype)
                found[is_here, piece.first_column : piece.first_column + piece.width] = here
        self.process_group.all_reduce(found)
        return found

    def parts(self) -> list[StatePart]:
        parts = [part for kind in self._pieces for part in kind.parts()]
        if self._copies.store is not None:
            parts += [dataclasses.replace(part, is_copy=self.process_group.rank > 0) for part in self._copies.store.parts()]
        return in_order_of(self.tables, parts)

    def snapshot(self) -> Snapshot | None:
        """This process's pieces, and in the first process also the copies, which it alone saves."""
        copies = [] if self._copies.store is None or self.process_group.rank > 0 else [self._copies.store]
        return join_snapshots(self.tables, [*self._pieces, *copies])

    def state(self) -> dict[str, Tensor]:
        """The whole state in the memory of every process: for small tables."""
        names: dict[str, tuple[tuple[int, int], torch.dtype]] = {}
        for given in self.process_group.gather([[part.name, part.shape, str(part.dtype)] for part in self.parts()]):
            names |= {name: (tuple(shape), getattr(torch, kind.removeprefix("torch."))) for name, shape, kind in given}
        whole = {name: torch.zeros(shape, dtype=kind, device=self._device) for name, (shape, kind) in names.items()}
        for part in self.parts():
            if not part.is_copy:
                rows = slice(part.first_row, part.first_row + part.num_rows)
                columns = slice(part.first_column, part.first_column + part.num_columns)
                whole[part.name][rows, columns] = part.read(0, part.num_rows).to(self._device)
        for name in sorted(whole):
            self.process_group.all_reduce(whole[name].view(torch.uint8))  # each byte comes from one process
        order = {table.name: index for index, table in enumerate(self.tables)}
        return dict(sorted(whole.items(), key=lambda item: order[item[0].rpartition(".")[0]]))

    def flush(self) -> None:
        for store in self.local_stores:
            store.flush()

    def close(self) -> None:
        for store in self.local_stores:
            store.close()

    def _start(self, sparse: Sparse) -> _ShardedBatch:
        fits = check_batch(sparse, self.layout, self._device) if self._check else sparse
        return _ShardedBatch(sparse, [IdExchange(fits, kind.router, self.process_group) for kind in self._pieces])

    def _take(self, sparse: Sparse) -> _ShardedBatch:
        """A batch whose ids are sent to their owners, prefetched or not."""
        found = next((batch for batch in self._prefetched if _is_same(batch.sparse, sparse)), None)
        if found is not None:
            self._prefetched.remove(found)
        return found or self._start(sparse)

    def _advance(self) -> None:
        """Bring every prefetched batch one stage further; what it waits for was started a while ago."""
        for batch in self._prefetched:
            if batch.stage == 0:
                for exchange in batch.exchanges:
                    exchange.send()
            elif batch.stage == 1:
                for kind, exchange in zip(self._pieces, batch.exchanges, strict=True):
                    kind.prefetch(exchange)
            batch.stage += 1

    def _divide_means(self, pooled: Tensor, sparse: Sparse) -> Tensor:
        """Divide the sums of features whose rows are split over processes and whose pooling is the mean; so with their gradients."""
        if not self._split_means or not pooled.numel():
            return pooled
        lengths = sparse.offsets.diff().view(self.layout.num_features, -1).clamp(min=1)
        pooled = pooled.clone()
        for feature in self._split_means:
            columns = slice(self.layout.columns[feature], self.layout.columns[feature + 1])
            pooled[:, columns] /= lengths[feature].unsqueeze(1)
        return pooled


class _PooledColumns:
    """Which columns of the pooled output [B, sum of widths] each block of vectors has: blocks come from stores of some pieces."""

    def __init__(self, layout: Layout, blocks: Sequence[Sequence[ShardPiece]]) -> None:
        self._width = layout.total_width
        self._ranges: list[list[tuple[int, int, bool]]] = []
        """For each block its columns, as ranges in its own order, and whether an earlier block has them too (a table is cut by rows)."""
        filled: set[int] = set()
        for pieces in blocks:
            ranges: list[tuple[int, int, bool]] = []
            by_table = {piece.table: piece for piece in pieces}
            for feature in features_of(layout, pieces):
                piece = by_table[layout.table_of[feature]]
                start = layout.columns[feature] + piece.first_column
                is_filled = start in filled
                first = ranges.pop()[0] if ranges and ranges[-1][1:] == (start, is_filled) else start
                ranges.append((first, start + piece.width, is_filled))
                filled.add(start)
            self._ranges.append(ranges)

    def join(self, blocks: Sequence[Tensor]) -> Tensor:
        """The pooled output from all blocks; what several have is summed. The first block may become part of it."""
        is_whole = self._ranges[0] == [(0, self._width, False)]
        pooled = blocks[0] if is_whole else blocks[0].new_empty(len(blocks[0]), self._width)
        for block, ranges in list(zip(blocks, self._ranges, strict=True))[int(is_whole) :]:
            parts = block.split([stop - start for start, stop, _ in ranges], dim=1)
            for part, (start, stop, is_filled) in zip(parts, ranges, strict=True):
                if is_filled:
                    pooled[:, start:stop] += part
                else:
                    pooled[:, start:stop] = part
        return pooled

    def cut(self, grad: Tensor, block: int) -> Tensor:
        """The columns of one block, from [B, sum of widths]."""
        parts = [grad[:, start:stop] for start, stop, _ in self._ranges[block]]
        return parts[0] if len(parts) == 1 else torch.cat([grad[:, :0], *parts], dim=1)


def _is_same(one: Sparse, other: Sparse) -> bool:
    return one.ids is other.ids and one.offsets is other.offsets
