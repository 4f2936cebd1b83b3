"""The optimizer of dense parameters on a CUDA GPU: all of them in one launch.

The learning rate and everything else that changes between steps is read from GPU memory, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from rowstead.spec.train import DENSE_STATE, DenseOptimizerSpec

_CODES = {kind: code for code, kind in enumerate(DENSE_STATE)}
_ADAMW = tl.constexpr(_CODES["adamw"])
_BLOCK = 1024


class GpuDenseOptimizer(torch.optim.Optimizer):
    """SGD, Adagrad, Adam or AdamW as torch.optim has them, with the same state under the same names.

    With `copies`, BF16 parameters that run instead of these, a step reads the gradients of the copies, updates the parameters in FP32,
    and writes both.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], spec: DenseOptimizerSpec, copies: Iterable[nn.Parameter] | None = None
    ) -> None:
        super().__init__(parameters, {"lr": spec.lr})
        self._spec = spec
        self._parameters: list[nn.Parameter] = self.param_groups[0]["params"]
        self._copies = None if copies is None else list(copies)
        device = self._parameters[0].device
        self._step = torch.zeros(())
        if spec.kind != "sgd":
            for parameter in self._parameters:
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in DENSE_STATE[spec.kind]}
                self.state[parameter]["step"] = self._step
        blocks = [(owner, at) for owner, p in enumerate(self._parameters) for at in range(0, p.numel(), _BLOCK)]
        self._owners = torch.tensor([owner for owner, _ in blocks], dtype=torch.int32, device=device)
        self._starts = torch.tensor([at for _, at in blocks], dtype=torch.int64, device=device)
        self._sizes = torch.tensor([p.numel() for p in self._parameters], dtype=torch.int64, device=device)
        self._find_memory()

    def _find_memory(self) -> None:
        device = self._sizes.device
        states = [[self.state[p][name] for p in self._parameters] for name in DENSE_STATE[self._spec.kind]]
        addresses = [torch.tensor([t.data_ptr() for t in tensors], device=device) for tensors in (self._parameters, *states)]
        self._memory = (addresses + [self._sizes] * 2)[:3]
        copies = self._copies or self._parameters
        self._copies_at = torch.tensor([copy.data_ptr() for copy in copies], device=device)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            self._step = entry["step"] = entry["step"].cpu()
        for entry in self.state.values():
            entry["step"] = self._step
        self._find_memory()

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Write the copies anew, after parameters were replaced."""
        if self._copies is not None:
            for copy, parameter in zip(self._copies, self._parameters, strict=True):
                copy.copy_(parameter)

    def numbers(self, lr: float, step: int) -> list[float]:
        """The scalars of a step that `step_by` reads."""
        spec = self._spec
        corrections = [1 - spec.beta1**step, (1 - spec.beta2**step) ** 0.5]
        decay = lr * spec.weight_decay if spec.kind == "adamw" else spec.weight_decay
        return [lr, spec.eps, 1 - spec.beta1, 1 - spec.beta2, *corrections, decay]

    @torch.no_grad()
    def step_by(self, numbers: Tensor, guard: Tensor, gradients_at: Tensor) -> None:
        """One step with `numbers` in GPU memory; nothing changes if `guard`, one number, is not finite.

        `gradients_at`, int64 in GPU memory, holds the address of each parameter's gradient at the time of the launch.
        """
        _step_dense[(len(self._owners),)](
            self._memory[0], gradients_at, self._memory[1], self._memory[2], self._copies_at, self._owners, self._starts, self._sizes,
            numbers, guard, KIND=_CODES[self._spec.kind], COPIES=self._copies is not None, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip

    def gradient_addresses(self) -> Tensor:
        """Addresses of the gradients that a step reads, int64 in host memory."""
        addresses = []
        for parameter in self._copies or self._parameters:
            assert parameter.grad is not None
            assert parameter.grad.is_contiguous()
            addresses.append(parameter.grad.data_ptr())
        return torch.tensor(addresses, dtype=torch.int64)

    def count_step(self, number: int) -> None:
        """Record that step `number` is done."""
        self._step.fill_(number)


@triton.jit
def _floats_at(address):  # type: ignore[no-untyped-def]
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def _step_dense(  # type: ignore[no-untyped-def]
    weights, grads, firsts, seconds, copies, owners, starts, sizes, numbers, guard,
    KIND: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one parameter per program.

    numbers: learning rate, eps, 1 - beta1, 1 - beta2, 1 - beta1 ** step, the root of 1 - beta2 ** step, weight decay
    (of AdamW times the learning rate).
    """
    owner = tl.load(owners + tl.program_id(0))
    at = tl.load(starts + tl.program_id(0)) + tl.arange(0, BLOCK)
    loss = tl.load(guard)
    on = at < tl.where(loss - loss == 0.0, tl.load(sizes + owner), 0)
    param_at = _floats_at(tl.load(weights + owner)) + at
    param = tl.load(param_at, mask=on, other=0.0)
    lr, eps = tl.load(numbers), tl.load(numbers + 1)
    gradient_at = tl.load(grads + owner)
    if COPIES:
        grad = tl.load(gradient_at.to(tl.pointer_type(tl.bfloat16)) + at, mask=on, other=0.0).to(tl.float32)
    else:
        grad = tl.load(_floats_at(gradient_at) + at, mask=on, other=0.0)
    if KIND == _ADAMW:
        param -= tl.load(numbers + 6) * param
    else:
        grad += tl.load(numbers + 6) * param
    if KIND == 0:
        change = lr * grad
    else:
        first_at = _floats_at(tl.load(firsts + owner)) + at
        first = tl.load(first_at, mask=on, other=0.0)
        if KIND == 1:
            first += grad * grad
            change = lr * grad / (tl.sqrt(first) + eps)
        else:
            second_at = _floats_at(tl.load(seconds + owner)) + at
            second = tl.load(second_at, mask=on, other=0.0)
            first += tl.load(numbers + 2) * (grad - first)
            second += tl.load(numbers + 3) * (grad * grad - second)
            tl.store(second_at, second, mask=on)
            change = lr / tl.load(numbers + 4) * first / (tl.sqrt(second) / tl.load(numbers + 5) + eps)
        tl.store(first_at, first, mask=on)
    tl.store(param_at, param - change, mask=on)
    if COPIES:
        copy_at = tl.load(copies + owner).to(tl.pointer_type(tl.bfloat16)) + at
        tl.store(copy_at, (param - change).to(tl.bfloat16), mask=on)
