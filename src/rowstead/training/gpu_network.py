"""The network as a GPU trains it: compiled by torch.compile, and in BF16 with weights of its own beside the model's FP32 ones.

Letters: B examples, Fd dense features.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rowstead.nn.network import Network


class GpuNetwork:
    """A model's network for training steps on a GPU.

    With `bf16` it is a copy whose parameters are BF16, so that no step casts weights: gradients are those of the copy, and the
    dense optimizer updates the model's own parameters and writes the copy's. Batches of `batch_size` examples run compiled, if the
    network is to be compiled; others, such as the last batch of an epoch, run as the network is written.
    """

    def __init__(self, net: Network, *, bf16: bool, batch_size: int, report: Callable[[str], None]) -> None:
        self.module = bf16_copy(net) if bf16 else net
        self.is_copy = self.module is not net
        self._dtype = torch.bfloat16 if self.is_copy else None
        self._batch_size, self._report = batch_size, report
        self._is_compiled = net.compiles
        self._has_projection = type(net).project is not Network.project
        self._project, self._join = self._compile(self._run_project), self._compile(self._run_join)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that get gradients, in the order of the model's."""
        return list(self.module.parameters())

    @property
    def pooled_dtype(self) -> torch.dtype | None:
        """The type in which pooled rows and their gradients are handed over; None for that of the sums."""
        return self._dtype

    def project(self, dense: Tensor) -> Tensor | None:
        """`Network.project` of dense features [B, Fd]."""
        if self._has_projection and self._takes(dense):
            return self._call(self._project, self._run_project, dense)
        return self.module.project(dense)

    def join(self, projected: Any, pooled: Tensor) -> Tensor:
        """`Network.join` of what `project` returned and pooled rows."""
        if self._takes(pooled):
            return self._call(self._join, self._run_join, projected, pooled)
        return self.module.join(projected, pooled)

    def _takes(self, values: Tensor) -> bool:
        return self._is_compiled and len(values) == self._batch_size

    def _run_project(self, dense: Tensor) -> Tensor | None:
        return self.module.project(self._cast(dense))

    def _run_join(self, projected: Any, pooled: Tensor) -> Tensor:
        return self.module.join(self._cast(projected), self._cast(pooled))

    def _cast(self, values: Any) -> Any:
        return values.to(self._dtype) if self._dtype is not None and isinstance(values, Tensor) else values

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self._is_compiled:
            return function
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache_folder()))
        # Random numbers as in eager mode, so that a network draws the same ones in compiled and in other batches.
        return torch.compile(function, dynamic=False, options={"fallback_random": True})

    def _call(self, compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any) -> Any:
        try:
            return compiled(*inputs)
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            self._is_compiled = False
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._report(f"torch.compile failed; the network runs uncompiled from now on: {reason}")
            return plain(*inputs)


def bf16_copy(net: Network) -> Network:
    """A copy of a network with BF16 parameters, which shares the network's buffers."""
    twin = copy.deepcopy(net)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for own, shared in zip(twin.modules(), net.modules(), strict=True):
        own._buffers = shared._buffers
    return twin


def _cache_folder() -> Path:
    """Where compiled networks are kept, so that the next run finds them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rowstead" / "inductor"
