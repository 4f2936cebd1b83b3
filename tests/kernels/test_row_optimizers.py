"""Rules of the optimizers that every kernel must keep to the last bits of FP32."""

from __future__ import annotations

import pytest
import torch

from rowstead.kernels.choose import kernels_for
from rowstead.kernels.layout import layout_of
from rowstead.kernels.row_optimizer import new_row_state
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import Kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("kernel", "device"), [("reference", DEVICE), ("cpu", "cpu"), ("gpu", DEVICE)])
def test_moments_of_adam_are_those_of_torch_in_double_precision(kernel: Kernel, device: str) -> None:
    """1 - 0.999 taken in FP32 would be off by more than 1e-5, and so would every row's second moment."""
    kernels = kernels_for(kernel, torch.device(device))[1]
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f", num_rows=5),))
    layout = layout_of(features, tables_of(features, width=20))
    optimizer = SparseOptimizerSpec(kind="adam")
    rows = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    exact = rows.double().requires_grad_()
    theirs = torch.optim.Adam([exact], lr=0.1, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)
    ours = rows.to(device)
    state = new_row_state("adam", ours)
    ids, offsets = torch.arange(5, device=device), torch.arange(6, device=device)
    for step in range(1, 6):
        grad = torch.randn(5, 20, generator=torch.Generator().manual_seed(step)) + 1
        kernels.update([ours], [state], layout, ids, offsets, None, grad.to(device), optimizer=optimizer, lr=0.1, step=step)
        exact.grad = grad.double()
        theirs.step()
    for name, known in (("moment1", "exp_avg"), ("moment2", "exp_avg_sq")):
        torch.testing.assert_close(state[name].cpu().double(), theirs.state[exact][known], rtol=1e-6, atol=1e-8)
