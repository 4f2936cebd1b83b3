"""How fast a shared machine is at the moment: a small piece of work that is always the same, timed beside whatever is timed.

The processors of a virtual machine may take twice as long for the same work from one minute to the next, as others on the same
hardware come and go. Times that were taken at different moments can be put together once each is divided by the pace of its own. What it
takes also depends a little on what was done just before, so only beats that were taken in the same way, between training steps, are compared.
"""

from __future__ import annotations

import statistics
import time

import torch

NUM_FIRST, NUM_WARM = 30, 5
ROWS, WIDTH, TAKEN = 1 << 19, 64, 8192
"""Of rows that are read and changed at random: more than caches hold."""
EXAMPLES, INPUTS, OUTPUTS = 256, 1024, 512
FLUSH_BYTES = 32 << 20
"""What goes through the caches before each beat, so that it finds the same whatever was done before it."""


class MachineSpeed:
    """Times what a training step is made of: products, activations that are written and read again, and rows at random."""

    def __init__(self, standard_s: float | None = None) -> None:
        """`standard_s` is what one beat takes at the pace that counts as 1; without it, what beats take now."""
        self._inputs, self._weights = torch.rand(EXAMPLES, INPUTS), torch.rand(INPUTS, OUTPUTS)
        self._product, self._gradient = torch.empty(EXAMPLES, OUTPUTS), torch.empty(INPUTS, OUTPUTS)
        self._rows, self._taken = torch.zeros(ROWS, WIDTH), torch.empty(TAKEN, WIDTH)
        self._ids = torch.randint(0, ROWS, (64, TAKEN), generator=torch.Generator().manual_seed(1))
        self._flushed = torch.zeros(FLUSH_BYTES // 4)
        self._num_references = 0
        for _ in range(NUM_WARM):
            self.time_reference()
        self.standard_s = (
            statistics.median(self.time_reference() for _ in range(NUM_FIRST)) if standard_s is None else standard_s
        )

    def time_reference(self) -> float:
        """Seconds of the work, once."""
        ids = self._ids[self._num_references % len(self._ids)]
        self._num_references += 1
        self._flushed.add_(1.0)
        start = time.perf_counter()
        torch.index_select(self._rows, 0, ids, out=self._taken)
        torch.mm(self._inputs, self._weights, out=self._product)
        self._product.relu_()
        torch.mm(self._inputs.t(), self._product, out=self._gradient)
        self._weights.add_(self._gradient, alpha=1e-12)
        self._rows.index_copy_(0, ids, self._taken)
        return time.perf_counter() - start

    def slowdown(self, references_s: list[float]) -> float:
        """How many times as long as at the standard pace work takes, by the beats that were taken beside it."""
        return statistics.median(references_s) / self.standard_s
