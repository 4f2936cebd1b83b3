"""Problems with known solutions, trained by plain SGD under a policy, in FP64."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rowstead.training.flat_parameters import Replica
from rowstead.training.sync_base import SyncPolicy


class Bowl(nn.Module):
    """f(x) = |x - target|^2 / 2, whose gradient is x - target."""

    def __init__(self, target: Sequence[float], start: Sequence[float]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        self.target = torch.tensor(target, dtype=torch.float64)

    def forward(self) -> Tensor:
        return (self.x - self.target).square().sum() / 2


class Trainer:
    """Plain SGD on a bowl, in the order of a Stepper."""

    def __init__(
        self, policy: SyncPolicy, *, target: Sequence[float], start: Sequence[float] = (0.0,), lr: float = 0.5
    ) -> None:
        self.bowl, self.policy, self.step_number = Bowl(target, start), policy, 0
        self.optimizer = torch.optim.SGD(self.bowl.parameters(), lr=lr)
        self.replica = Replica(self.bowl, self.optimizer)
        policy.begin(self.replica)

    def step(self) -> None:
        self.step_number += 1
        self.optimizer.zero_grad()
        self.bowl().backward()  # type: ignore[no-untyped-call]
        self.policy.gradients_ready(self.step_number)
        self.optimizer.step()
        self.policy.after_step(self.step_number)

    @property
    def x(self) -> list[float]:
        return self.bowl.x.detach().tolist()


def together(*calls: Callable[[], None]) -> None:
    """Run all calls at once, each in a thread."""
    errors: list[BaseException] = []

    def one(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001, RUF100 - raised below
            errors.append(error)

    threads = [threading.Thread(target=one, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a trainer is blocked"
    if errors:
        raise errors[0]
