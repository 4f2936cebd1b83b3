"""The optimizer that a `TableModule` fuses with the backward pass, as torch.optim and TorchRec see it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.kernels.row_state import RowState
from rowstead.spec.errors import CheckpointError, RowsteadError


class FusedOptimizer(torch.optim.Optimizer):
    """Learning rate, state of rows and number of updates of an optimizer that `backward()` applies.

    `param_groups[0]["lr"]` is the learning rate of the next backward pass, so learning rate schedulers work. `step` and
    `zero_grad` change nothing. `params` has the tables by name, and so has `state_dict`, as in TorchRec's KeyedOptimizer.
    """

    params: dict[str, nn.Parameter]
    """The tables by their names in the module: `embedding_bags.<table>.weight`, or `embeddings.<table>.weight`."""

    def __init__(self, params: Mapping[str, nn.Parameter], row_states: Sequence[RowState], *, lr: float) -> None:
        self.num_updates = torch.zeros((), dtype=torch.int64, device="cpu")
        super().__init__(list(params.values()), {"lr": lr})
        self.defaults["_save_param_groups"] = False  # TorchRec's CombinedOptimizer reads it
        self.tie(params, row_states)

    def tie(self, params: Mapping[str, nn.Parameter], row_states: Sequence[RowState]) -> None:
        """Have these tables and state tensors from now on; the tensors are shared with the store, not copied."""
        self.params = dict(params)
        self.param_groups[0]["params"] = list(params.values())
        self.state = defaultdict(dict)
        for rows, row_state in zip(params.values(), row_states, strict=True):
            self.state[rows] = {**row_state, "num_updates": self.num_updates}

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        lr = float(self.param_groups[0]["lr"])
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr must be at least 0 and finite, got {lr}")
        return lr

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `closure`, if there is one, and change nothing: rows are updated by `backward()`."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Change nothing: the tables have no gradients."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise RowsteadError("a fused optimizer has the tables of its module and no other parameters")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """State of rows and number of updates by the table's name, and the learning rate; tensors are shared, not copied."""
        group = {**self.param_groups[0], "params": list(self.params)}
        return {"state": {name: dict(self.state[rows]) for name, rows in self.params.items()}, "param_groups": [group]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, so that training continues bit for bit; loads nothing if a part does not fit."""
        loaded = state_dict.get("state", {})
        copies: list[tuple[Tensor, Tensor]] = []
        for name, rows in self.params.items():
            if name not in loaded:
                raise CheckpointError(
                    f"no state of `{name}`: the optimizer was saved for {', '.join(map(str, loaded)) or 'no tables'}"
                )
            if set(loaded[name]) != set(self.state[rows]):
                raise CheckpointError(
                    f"the state of `{name}` has {', '.join(sorted(loaded[name]))}, but this optimizer has "
                    f"{', '.join(sorted(self.state[rows]))}: load it into the same optimizer"
                )
            for key, value in self.state[rows].items():
                given = torch.as_tensor(loaded[name][key])
                if given.shape != value.shape:
                    raise CheckpointError(f"`{key}` of `{name}` is {list(given.shape)}, but must be {list(value.shape)}")
                copies.append((value, given))
        for value, given in copies:
            value.copy_(given)
        for group in state_dict.get("param_groups", [])[:1]:
            self.param_groups[0].update({key: value for key, value in group.items() if key != "params"})

    def post_load_state_dict(self) -> None:
        """No-op, called by TorchRec: state is loaded in place."""

    def save_param_groups(self, save: bool) -> None:
        """Whether TorchRec's CombinedOptimizer saves the learning rate."""
        self.defaults["_save_param_groups"] = save

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "params": self.params, "num_updates": self.num_updates}
