"""What a trainer does about the other trainers of its fleet, and its own threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rowstead.spec.errors import SpecError, require

SyncMode = Literal["auto", "none", "allreduce", "easgd", "shadow"]
SyncRule = Literal["easgd", "average", "bmuf"]


@dataclass(frozen=True, kw_only=True)
class SyncSpec:
    """How the dense parameters of several trainers stay together, and how many threads share those of one. See [Synchronisation](synchronisation.md)."""

    mode: SyncMode = "auto"
    """`none` (one trainer), `allreduce` (mean of gradients, every step), `easgd` (elastic averaging between steps), `shadow`
    (in the background, by `rule`); `auto` is `none` for one trainer and `easgd` for several."""
    period: int = 4
    """Steps of a thread between two exchanges (`easgd`), or at least so many of the trainer (`shadow`)."""
    alpha: float | None = None
    """Share of the difference by which an exchange moves parameters: with `easgd` 0.9 / trainers when left out, with the other
    rules of `shadow` 0.5."""
    rule: SyncRule = "easgd"
    """Of `shadow`: elastic averaging against a centre, model averaging, or blockwise model-update filtering."""
    block_momentum: float | None = None
    """Of `bmuf`: how much of the last change of the common model is repeated; 1 - 1 / trainers when left out."""
    block_lr: float = 1.0
    """Of `bmuf`: by how much of the way to the mean the common model moves."""
    hogwild_threads: int = 1
    """Threads that train one copy of the model at once, each on batches of its own, without locks."""
    staleness: int = 0
    """Batches whose row updates a look-up on a sparse server need not have seen yet; 0 is synchronous."""

    def __post_init__(self) -> None:
        require(self.period >= 1, "period", f"must be at least 1, got {self.period}")
        require(self.alpha is None or 0 < self.alpha <= 1, "alpha", f"must be above 0 and at most 1, got {self.alpha}")
        momentum = self.block_momentum
        require(momentum is None or 0 <= momentum < 1, "block_momentum", f"must be at least 0 and below 1, got {momentum}")
        require(self.block_lr > 0, "block_lr", f"must be above 0, got {self.block_lr}")
        require(self.hogwild_threads >= 1, "hogwild_threads", f"must be at least 1, got {self.hogwild_threads}")
        require(self.staleness >= 0, "staleness", f"must not be negative, got {self.staleness}")

    def mode_for(self, num_trainers: int) -> SyncMode:
        """What `mode` comes to for so many trainers."""
        if num_trainers == 1:
            return "none"
        if self.mode == "none":
            raise SpecError(
                "train.sync.mode",
                f"`none` leaves {num_trainers} trainers with {num_trainers} models: choose `easgd`, `shadow` or `allreduce`",
            )
        return "easgd" if self.mode == "auto" else self.mode

    def alpha_for(self, num_trainers: int) -> float:
        """What `alpha` comes to for so many trainers."""
        if self.alpha is not None:
            return self.alpha
        is_elastic = self.mode_for(num_trainers) == "easgd" or self.rule == "easgd"
        return 0.9 / max(num_trainers, 1) if is_elastic else 0.5

    def block_momentum_for(self, num_trainers: int) -> float:
        """What `block_momentum` comes to for so many trainers."""
        return self.block_momentum if self.block_momentum is not None else 1 - 1 / max(num_trainers, 1)
