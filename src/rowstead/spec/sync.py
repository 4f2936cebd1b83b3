"""How the trainers of a fleet synchronise: one registry of modes and one of rules, which specs, policies and docs read.

A new mode is an entry in `SYNC_MODES`, its policy in `training/sync.py` and a test. A new rule of `shadow` is an entry in `SYNC_RULES`, and its
arithmetic in `Shadow.exchange` and in the dense server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from rowstead.spec.bounds import AboveZero, AtLeastOne, BelowOne, Count, Processes, Share, Spec, ZeroToOne
from rowstead.spec.errors import SpecError

SyncMode = Literal["auto", "none", "allreduce", "easgd", "shadow"]
SyncRule = Literal["easgd", "average", "bmuf"]
WARMUP_STEPS = 24
"""Per Hogwild thread: of threads that look a row up at once, each takes Adagrad's long first steps."""
MAX_FACTOR = 8.0
"""Of the dense learning rate: beyond it, more made training worse."""


@dataclass(frozen=True, kw_only=True)
class SyncSpec(Spec):
    """How several trainers synchronise their dense parameters, and how many threads share those of one trainer. See [Synchronisation](synchronisation.md)."""

    mode: SyncMode = "auto"
    """Which way."""
    period: AtLeastOne = 4
    """Steps of a thread between two exchanges (`easgd`), or the minimum number of steps of the trainer (`shadow`)."""
    alpha: Share | None = None
    """Fraction of the difference by which an exchange moves parameters. Default: 0.9 / trainers with rule `easgd`, 0.5 with
    the others."""
    rule: SyncRule = "easgd"
    """How `shadow` exchanges."""
    block_momentum: BelowOne | None = None
    """For `bmuf`: momentum of the updates of the shared model. Default: (1 - 1 / trainers) / 2."""
    block_lr: AboveZero = 1.0
    """For `bmuf`: learning rate of the shared model towards the mean."""
    dense_lr_factor: AboveZero | None = None
    """Multiplies the dense learning rate of each trainer. Default: what lets the shared model learn from each sample as much as that of a
    single trainer, at most 8. See [Learning rates](synchronisation.md#learning-rates)."""
    factor_warmup: ZeroToOne = 0.2
    """Fraction of the run over which `dense_lr_factor` rises from 1."""
    warmup_steps: Count | None = None
    """Steps over which the learning rates of Hogwild threads rise; `train.schedule` may ask for more. Default: 24 per thread, at most a sixth
    of the run, and 0 for one thread."""
    hogwild_threads: Processes = 1
    """Threads that train one copy of the model concurrently, each on its own batches, without locks (Hogwild)."""
    staleness: Count = 0
    """Maximum number of batches whose row updates a look-up on a sparse server may miss; 0 is synchronous."""

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

    def rule_for(self, num_trainers: int) -> SyncRuleEntry | None:
        """The rule by which parameters are exchanged; None where they are not."""
        name = SYNC_MODES[self.mode_for(num_trainers)].rule
        return None if name is None else SYNC_RULES[self.rule if name == "chosen" else name]

    def resolve(self, num_trainers: int, *, lr_exponent: float = 1.0) -> SyncSpec:
        """Fill in what depends on the number of trainers.

        `lr_exponent`: with T steps at learning rate lr the dense optimizer gets as far as lr * T ** lr_exponent.
        """
        rule, alpha, momentum, speed = self.rule_for(num_trainers), self.alpha, self.block_momentum, 1.0
        if momentum is None:
            momentum = 0.5 * (1 - 1 / num_trainers)
        if rule is not None:
            alpha = rule.alpha(num_trainers) if alpha is None else alpha
            speed = rule.speed(num_trainers, alpha, momentum, self.block_lr)
        factor, warmup, threads = self.dense_lr_factor, self.warmup_steps, self.hogwild_threads
        return dataclasses.replace(
            self,
            mode=self.mode_for(num_trainers),
            alpha=alpha,
            block_momentum=momentum,
            dense_lr_factor=min(num_trainers**lr_exponent / speed, MAX_FACTOR) if factor is None else factor,
            warmup_steps=WARMUP_STEPS * threads * (threads > 1) if warmup is None else warmup,
        )


@dataclass(frozen=True, kw_only=True)
class SyncModeEntry:
    """One way to synchronise trainers."""

    description: str
    """One line for the docs."""
    rule: SyncRule | Literal["chosen"] | None = None
    """The rule by which it exchanges parameters; `chosen`: that of `train.sync.rule`."""
    every_step: bool = False
    """Whether each step exchanges and waits for all trainers, instead of every `period` steps."""
    in_background: bool = False
    """Whether training continues during an exchange."""


@dataclass(frozen=True, kw_only=True)
class SyncRuleEntry:
    """One way to exchange parameters with the dense server. Letters as in docs/synchronisation.md: p trainers, v their step, V that of c."""

    description: str
    """One line for the docs."""
    alpha: Callable[[int], float]
    """Default of `alpha` for p trainers."""
    speed: Callable[[int, float, float, float], float]
    """V / v for p trainers that all step in one direction, with `alpha`, `block_momentum` and `block_lr`."""
    needs_round: bool
    """Whether an exchange waits for all trainers."""
    has_momentum: bool = False
    """Whether `block_momentum` and `block_lr` apply."""


def _bmuf_speed(num_trainers: int, alpha: float, momentum: float, lr: float) -> float:
    """V = v + alpha (c - m), where c - m = V - (1 - momentum) V / lr."""
    return 1 / (1 - alpha * (1 - (1 - momentum) / lr))


SYNC_MODES: dict[SyncMode, SyncModeEntry] = {
    "auto": SyncModeEntry(description="`none` for one trainer, `easgd` for several"),
    "none": SyncModeEntry(description="for one trainer"),
    "allreduce": SyncModeEntry(description="the mean of gradients, every step", every_step=True),
    "easgd": SyncModeEntry(description="elastic averaging between steps", rule="easgd"),
    "shadow": SyncModeEntry(description="in a background thread, by `rule`", rule="chosen", in_background=True),
}
assert tuple(SYNC_MODES) == get_args(SyncMode)

SYNC_RULES: dict[SyncRule, SyncRuleEntry] = {
    "easgd": SyncRuleEntry(
        description="elastic averaging with the dense server",
        alpha=lambda num_trainers: 0.9 / num_trainers,
        speed=lambda num_trainers, *_: num_trainers / (num_trainers + 1),  # an exchange conserves the sum of all x and c
        needs_round=False,
    ),
    "average": SyncRuleEntry(
        description="the mean of all trainers", alpha=lambda num_trainers: 0.5, speed=lambda *_: 1.0, needs_round=True
    ),
    "bmuf": SyncRuleEntry(
        description="blockwise model-update filtering, a mean with momentum",
        alpha=lambda num_trainers: 0.5,
        speed=_bmuf_speed,
        needs_round=True,
        has_momentum=True,
    ),
}
assert tuple(SYNC_RULES) == get_args(SyncRule)
