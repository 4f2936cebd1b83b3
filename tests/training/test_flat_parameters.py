"""Parameters as one tensor: the memory of the module itself."""

from __future__ import annotations

import torch
from torch import nn

from rowstead.training.flat_parameters import Replica, flatten_parameters, named_parts


def test_flat_parameters_are_the_memory_of_the_module() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = flatten_parameters(module)
    assert flatten_parameters(module).data_ptr() == flat.data_ptr(), "they are moved once"
    assert all(torch.equal(named_parts(module, flat)[name], value) for name, value in before.items())
    loss = module(torch.ones(1, 3)).sum()
    flat.add_(1.0)  # while autograd remembers them
    loss.backward()
    assert all(torch.equal(value, before[name] + 1) for name, value in module.state_dict().items())


def test_gradients_go_to_the_policy_and_back() -> None:
    module = nn.Linear(2, 1)
    replica = Replica(module, torch.optim.SGD(module.parameters(), lr=1.0))
    module(torch.tensor([[1.0, 2.0]])).sum().backward()
    assert replica.gradients().tolist() == [1.0, 2.0, 1.0]
    replica.set_gradients(torch.tensor([5.0, 6.0, 7.0]))
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[5.0, 6.0]]
