"""`EmbeddingStore`: the contract of every store, wherever its rows live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse, check_batch
from rowstead.kernels.layout import Layout
from rowstead.spec.features import Table
from rowstead.stores.state import SavedState, StatePart, load_parts, whole_state

if TYPE_CHECKING:
    from rowstead.stores.backing import Backing
    from rowstead.stores.device import DeviceStore


class GraphRows(Protocol):
    """Rows that a captured CUDA graph can look up and update without the host."""

    @property
    def resident(self) -> DeviceStore:
        """The rows in the memory of the GPU."""

    generation: int
    """Rises whenever the memory of `resident` has moved: graphs captured before are invalid."""

    def check_batch(self, sparse: Sparse) -> Sparse: ...

    def enter(self, sparse: Sparse) -> Sparse:
        """The same batch with ids of `resident`; its rows stay there until `leave`."""

    def leave(self) -> None:
        """All work on the batch that was entered last is queued on the current stream."""


class EmbeddingStore(nn.Module, ABC):
    """Tables of embedding rows with pooled look-up and an optimizer fused with the backward pass.

    Subclasses implement `lookup`, `update`, `rows` and `parts`; everything else has a default. An update is exact: the
    gradients of one row are summed over repeated ids and over the features that share its table before the optimizer sees them.

    Concurrency: one thread at a time calls the store, unless `can_share_between_threads`. `parts`, `state` and `load_state` are
    called between steps only.
    """

    layout: Layout

    def __init__(self, layout: Layout, *, check: bool = True) -> None:
        """With `check`, a batch that does not fit the tables raises a DataError; without, it may crash the process."""
        super().__init__()
        self.layout = layout
        self._check = check

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.layout.tables

    @property
    def device(self) -> torch.device | None:
        """Where batches must be; None if any device will do."""
        return None

    @property
    def kernel(self) -> str:
        """Name of the kernels that run, or `none` without tables."""
        return "none"

    def check_batch(self, sparse: Sparse) -> Sparse:
        """The same batch, marked as one that fits the tables if this store checks batches."""
        return check_batch(sparse, self.layout, self.device) if self._check and self.tables else sparse

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> EmbeddingStore:
        """Rows stay where they are when the module around them is moved, unless `moves_with_module`."""
        return super()._apply(fn, recurse) if self.moves_with_module else self

    # Training

    @abstractmethod
    def lookup(self, sparse: Sparse) -> Tensor:
        """Pooled rows [B, sum of the features' widths], features in the order of the batch."""

    @abstractmethod
    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        """Apply the optimizer to every row in `sparse`.

        grad [B, sum of widths] is the gradient of what `lookup(sparse)` returned; `step` counts from 1.
        """

    def start_lookup(self, sparse: Sparse) -> Callable[[], Tensor]:
        """Start `lookup`; the returned function waits for the result. Looks up at once by default."""
        pooled = self.lookup(sparse)
        return lambda: pooled

    def start_update(self, sparse: Sparse, grad: Tensor) -> Callable[[float, int], None]:
        """Start to send the gradient; the returned function takes `lr` and `step`, and applies it."""
        return lambda lr, step: self.update(sparse, grad, lr=lr, step=step)

    runs_in_background: bool = False
    """Whether `start_lookup` and `update` return before the work is done, so that it pays to call them first."""

    def flush(self) -> None:
        """Wait until all updates so far are applied, wherever the rows are."""

    def close(self) -> None:
        """Release files, threads and connections; the store cannot be used afterwards."""

    # Prefetching

    @property
    def batches_ahead(self) -> int:
        """How many batches ahead of its look-up a batch should be prefetched."""
        return 0

    def prefetch(self, sparse: Sparse) -> None:
        """Hint that this batch comes after those prefetched before; a store may ignore it.

        Prefetched batches come in that order, with the same tensors. Look-ups between them are for evaluation only (`eval()`
        of the module that holds the store).
        """

    def drop_prefetched(self) -> None:
        """Forget the prefetched batches: they are not coming. The batch that was looked up last gets no update."""

    def limit_prefetch(self, num_batches: int) -> None:
        """Fetch the rows of at most this many batches at once, where several small batches could be fetched together."""

    # What kinds of execution ask

    @property
    def can_share_between_threads(self) -> bool:
        """Whether several threads may look up and update at once without locks (Hogwild)."""
        return False

    def copy_for_thread(self) -> EmbeddingStore:
        """A store over the same rows for another thread; the store itself where it holds nothing per thread."""
        return self

    def graph_rows(self) -> GraphRows | None:
        """The rows as CUDA graphs can train them; None if a step needs the host."""
        return None

    moves_with_module: bool = False
    """Whether `to(device)` of the module around the store moves the rows."""

    backings: Sequence[Backing] = ()
    """The larger memory behind a cache, one per group of tables; empty for other stores."""

    def figures(self) -> dict[str, float]:
        """Counts so far to log, by name."""
        return {}

    # State

    @abstractmethod
    def rows(self, table: str, ids: Tensor) -> Tensor:
        """Rows of one table, [len(ids), width]."""

    @abstractmethod
    def parts(self) -> list[StatePart]:
        """All tensors that a checkpoint holds, or this process's pieces of them; valid until the store's memory moves."""

    def state(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint holds: `<table>.rows` and the optimizer's `<table>.<name>`."""
        return whole_state(self.parts())

    def load_state(self, state: Mapping[str, Tensor] | SavedState, *, rows_only: bool = False) -> None:
        """Load the `state` of any store of the same tables; with `rows_only` the optimizer state is left as it is.

        A `SavedState` is read a few rows at a time.
        """
        load_parts(self.parts(), state, rows_only=rows_only)
