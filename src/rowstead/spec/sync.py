"""How the trainers of a fleet synchronise, and how many threads each has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rowstead.spec.errors import SpecError, require

SyncMode = Literal["auto", "none", "allreduce", "easgd", "shadow"]
SyncRule = Literal["easgd", "average", "bmuf"]


@dataclass(frozen=True, kw_only=True)
class SyncSpec:
    """How several trainers synchronise their dense parameters, and how many threads share those of one trainer. See [Synchronisation](synchronisation.md)."""

    mode: SyncMode = "auto"
    """`none` (one trainer), `allreduce` (mean of gradients, every step), `easgd` (elastic averaging between steps), `shadow`
    (in the background, by `rule`); `auto` is `none` for one trainer and `easgd` for several."""
    period: int = 4
    """Steps of a thread between two exchanges (`easgd`), or the minimum number of steps of the trainer (`shadow`)."""
    alpha: float | None = None
    """Fraction of the difference by which an exchange moves parameters. Default: 0.9 / trainers with `easgd`, 0.5 with the other
    rules of `shadow`."""
    rule: SyncRule = "easgd"
    """For `shadow`: elastic averaging against the dense server, model averaging, or blockwise model-update filtering."""
    block_momentum: float | None = None
    """For `bmuf`: momentum of the updates of the shared model. Default: 1 - 1 / trainers."""
    block_lr: float = 1.0
    """For `bmuf`: learning rate of the shared model towards the mean."""
    hogwild_threads: int = 1
    """Threads that train one copy of the model concurrently, each on its own batches, without locks (Hogwild)."""
    staleness: int = 0
    """Maximum number of batches whose row updates a look-up on a sparse server may miss; 0 is synchronous."""

    def __post_init__(self) -> None:
        require(self.period >= 1, "period", f"must be at least 1, got {self.period}")
        require(self.alpha is None or 0 < self.alpha <= 1, "alpha", f"must be above 0 and at most 1, got {self.alpha}")
        momentum = self.block_momentum
        require(momentum is None or 0 <= momentum < 1, "block_momentum", f"must be at least 0 and below 1, got {momentum}")
        require(self.block_lr > 0, "block_lr", f"must be above 0, got {self.block_lr}")
        require(self.hogwild_threads >= 1, "hogwild_threads", f"must be at least 1, got {self.hogwild_threads}")
        require(self.staleness >= 0, "staleness", f"must not be negative, got {self.staleness}")

    def mode_for(self, num_trainers: int) -> SyncMode:
        """Resolve `mode` for a number of trainers."""
        if num_trainers == 1:
            return "none"
        if self.mode == "none":
            raise SpecError(
                "train.sync.mode",
                f"`none` would give {num_trainers} trainers {num_trainers} different models: choose `easgd`, `shadow` or `allreduce`",
            )
        return "easgd" if self.mode == "auto" else self.mode

    def alpha_for(self, num_trainers: int) -> float:
        """Resolve `alpha` for a number of trainers."""
        if self.alpha is not None:
            return self.alpha
        is_elastic = self.mode_for(num_trainers) == "easgd" or self.rule == "easgd"
        return 0.9 / max(num_trainers, 1) if is_elastic else 0.5

    def block_momentum_for(self, num_trainers: int) -> float:
        """Resolve `block_momentum` for a number of trainers."""
        return self.block_momentum if self.block_momentum is not None else 1 - 1 / max(num_trainers, 1)
