"""Tracks the current speed of a shared machine with reference work: a small fixed workload timed beside each measurement.

The same work on a virtual machine can take twice as long from one minute to the next, as other tenants come and go. Times taken at
different moments become comparable once each is divided by the slowdown of its moment. Reference work also depends a little on what ran
just before it, so only reference times taken in the same way, between training steps, are compared.
"""

from __future__ import annotations

import statistics
import time

import torch

NUM_FIRST, NUM_WARM = 30, 5
ROWS, WIDTH, TAKEN = 1 << 19, 64, 8192
"""Rows read and written at random: more than caches hold."""
EXAMPLES, INPUTS, OUTPUTS = 256, 1024, 512
FLUSH_BYTES = 32 << 20
"""Bytes written before each reference run to flush the caches."""


class MachineSpeed:
    """Times reference work that resembles a training step: matmuls, activations, and random access to rows."""

    def __init__(self, standard_s: float | None = None) -> None:
        """`standard_s` is the time of the reference work at slowdown 1; by default its current time."""
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
        """Run the reference work once and return its seconds."""
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
        """Return the median of reference times over the standard time."""
        return statistics.median(references_s) / self.standard_s
