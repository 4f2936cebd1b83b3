"""The dense parameters of a model as one flat tensor that shares their memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def flatten_parameters(module: nn.Module) -> Tensor:
    """All parameters of a module as one flat tensor over their own memory, which is made contiguous if it is not yet.

    Autograd does not notice changes made through it: it has its own version counter.
    """
    parameters = list(module.parameters())
    first = parameters[0]
    assert all(p.dtype == first.dtype and p.device == first.device for p in parameters), (
        "parameters must have one dtype and one device"
    )
    sizes = [p.numel() for p in parameters]
    address = first.data_ptr()
    for parameter, size in zip(parameters, sizes, strict=True):
        if parameter.data_ptr() != address or not parameter.is_contiguous():
            break
        address += size * first.element_size()
    else:
        flat = first.detach().new_empty(0)
        return flat.set_(first.untyped_storage(), first.storage_offset(), (sum(sizes),), (1,))
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        parameter.data = part.view_as(parameter)
    return flat


def named_parts(module: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """A flat tensor split into the parameters of a module, by name."""
    named = dict(module.named_parameters())
    parts = flat.split([parameter.numel() for parameter in named.values()])
    return {name: part.view_as(parameter) for (name, parameter), part in zip(named.items(), parts, strict=True)}


class Replica:
    """What a sync policy may touch of a trainer: dense parameters, gradients and optimizer state, each as one flat tensor.

    `parameters` is the trainer's own memory: a policy adds to it in place, between steps or, as Hogwild does, during one.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._own, self._optimizer = list(module.parameters()), optimizer
        self.parameters = flatten_parameters(module)

    def gradients(self) -> Tensor:
        """A copy of the gradients."""
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad.detach()).flatten() for p in self._own])

    def set_gradients(self, gradients: Tensor) -> None:
        gradients = gradients.to(self.parameters.device, self.parameters.dtype)
        for parameter, part in zip(self._own, gradients.split([p.numel() for p in self._own]), strict=True):
            parameter.grad = part.view_as(parameter)

    def optimizer_state(self) -> Tensor:
        """A copy of the dense optimizer's state; empty if it has none."""
        flat = [value.detach().flatten().to("cpu", torch.float64) for value in self._state()]
        return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def set_optimizer_state(self, state: Tensor) -> None:
        """Load the `optimizer_state` of another trainer."""
        start_optimizer(self._optimizer)
        values = self._state()
        sizes = [value.numel() for value in values]
        if state.numel() != sum(sizes):
            return  # of another optimizer, or of one that has made no step
        for value, part in zip(values, state.split(sizes), strict=True):
            value.copy_(part.view_as(value))

    def _state(self) -> list[Tensor]:
        entries: list[Mapping[str, object]] = [self._optimizer.state.get(p, {}) for p in self._own]
        return [value for entry in entries for _, value in sorted(entry.items()) if isinstance(value, Tensor)]


@torch.no_grad()
def start_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that Adam and AdamW would create at its first step; the other optimizers have theirs from the start."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
