"""Fused pairwise dot products against plain torch: Numba everywhere, Triton on a GPU or in its interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rowstead.kernels.cpu import interaction as interaction_cpu
from rowstead.kernels.interaction import InteractionKernels, fused_pairwise_dots, pairwise_dots, reference_pairwise_dots
from rowstead.nn.layers import Dot
from rowstead.spec.errors import DataError
from rowstead.spec.interactions import InteractionInputs, InteractionSpec, Pairs

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def triton_kernels() -> InteractionKernels:
    from rowstead.kernels.gpu import interaction as interaction_gpu

    return interaction_gpu


def inputs(
    num_samples: int, num_vectors: int, width: int, num_dense: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor | None, Tensor]:
    """Random vectors of length about 1."""
    g = torch.Generator().manual_seed(num_samples + 7 * num_vectors + 91 * width)
    numbers = torch.randn(num_samples, num_vectors * width, generator=g, dtype=dtype) / width**0.5
    first = num_dense * width
    dense, pooled = (
        part.to(device, copy=True).requires_grad_() for part in numbers.split([first, numbers.shape[1] - first], 1)
    )
    return (dense if num_dense else None), pooled


def gradients(out: Tensor, dense: Tensor | None, pooled: Tensor) -> list[Tensor]:
    """Gradients of a weighted sum of the results, scaled so that it does not grow with the number of vectors."""
    g = torch.Generator().manual_seed(out.numel())
    weights = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out) / (pooled.shape[1] + 1) ** 0.5
    return list(torch.autograd.grad(out, [pooled] if dense is None else [dense, pooled], weights))


def obvious_dots(dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs) -> Tensor:
    """The dense vectors, and one product after the other."""
    of_dense = () if dense is None else dense.split(width, dim=1)
    of_sparse = pooled.split(width, dim=1) if pooled.shape[1] else ()
    products = [] if dense is None else [dense]
    for index, vector in enumerate(of_sparse):
        partners = [*(of_dense if pairs != "sparse_sparse" else ()), *(of_sparse[:index] if pairs != "dense_sparse" else ())]
        products += [(vector * other).sum(dim=1, keepdim=True) for other in partners]
    return torch.cat(products, dim=1) if products else pooled[:, :0]


def trimmed_dots(
    dense: Tensor | None, pooled: Tensor, width: int, kernels: InteractionKernels, pairs: Pairs = "both"
) -> Tensor:
    """Without the columns of zeros that kernels may add."""
    used = obvious_dots(dense, pooled, width, pairs).shape[1]
    out = fused_pairwise_dots(dense, pooled, width, kernels, pairs)
    assert not out[:, used:].any()
    return out[:, :used]


def check(kernels: InteractionKernels, dense: Tensor | None, pooled: Tensor, width: int, pairs: Pairs = "both") -> None:
    """Results and gradients are those of plain torch."""
    ours, plain = trimmed_dots(dense, pooled, width, kernels, pairs), reference_pairwise_dots(dense, pooled, width, pairs)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    for mine, other in zip(gradients(ours, dense, pooled), gradients(plain, dense, pooled), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_the_dense_vector_comes_first_then_the_triangle_row_by_row() -> None:
    dense, pooled = torch.tensor([[1.0, 10]]), torch.tensor([[2.0, 20, 3, 30]])
    assert pairwise_dots(dense, pooled, 2).tolist() == [[1, 10, 202, 303, 606]]
    assert pairwise_dots(dense, pooled, 2, "dense_sparse").tolist() == [[1, 10, 202, 303]]
    assert pairwise_dots(dense, pooled, 2, "sparse_sparse").tolist() == [[1, 10, 606]]
    two = torch.tensor([[1.0, 10, 4, 40]])
    assert pairwise_dots(two, pooled, 2).tolist() == [[1, 10, 4, 40, 202, 808, 303, 1212, 606]]
    assert pairwise_dots(None, torch.cat([dense, pooled], 1), 2).tolist() == [[202, 303, 606]]


SHAPES = {"num_dense": st.integers(0, 12), "num_sparse": st.integers(0, 24), "pairs": st.sampled_from(get_args(Pairs))}


@given(num_samples=st.sampled_from([0, 1, 5]), width=st.integers(1, 9), **SHAPES)
@settings(max_examples=60, deadline=None)
def test_plain_torch_agrees_with_one_product_after_the_other(
    num_samples: int, width: int, num_dense: int, num_sparse: int, pairs: Pairs
) -> None:
    dense, pooled = inputs(num_samples, num_dense + num_sparse, width, num_dense, dtype=torch.float64)
    ours, obvious = (dots(dense, pooled, width, pairs) for dots in (reference_pairwise_dots, obvious_dots))
    torch.testing.assert_close(ours, obvious)
    if obvious.requires_grad:
        tensors = [pooled] if dense is None else [dense, pooled]
        mine, others = (
            torch.autograd.grad(out.cos().sum(), tensors, allow_unused=True, materialize_grads=True) for out in (ours, obvious)
        )
        for one, other in zip(mine, others, strict=True):
            torch.testing.assert_close(one, other)


@given(num_samples=st.sampled_from([0, 1, 37]), width=st.sampled_from([1, 4, 15, 16, 33, 64]), **SHAPES)
@settings(max_examples=60, deadline=None)
def test_the_cpu_kernel_agrees_for_every_number_of_dense_vectors_and_choice_of_pairs(
    num_samples: int, width: int, num_dense: int, num_sparse: int, pairs: Pairs
) -> None:
    assume(num_dense + num_sparse >= 2)
    check(interaction_cpu, *inputs(num_samples, num_dense + num_sparse, width, num_dense), width, pairs)


@given(num_samples=st.sampled_from([0, 3]), width=st.sampled_from([4, 16, 33]), **SHAPES)
@settings(max_examples=15, deadline=None)
def test_the_gpu_kernel_agrees_for_every_number_of_dense_vectors_and_choice_of_pairs(
    num_samples: int, width: int, num_dense: int, num_sparse: int, pairs: Pairs
) -> None:
    assume(num_dense + num_sparse >= 2)
    check(triton_kernels(), *inputs(num_samples, num_dense + num_sparse, width, num_dense, GPU), width, pairs)


@pytest.mark.parametrize("pairs", get_args(Pairs))
@pytest.mark.parametrize("num_dense", [3, 70])
def test_the_gpu_kernel_agrees_where_dense_vectors_need_several_tiles(num_dense: int, pairs: Pairs) -> None:
    check(triton_kernels(), *inputs(2, num_dense + 66, 20, num_dense, GPU), 20, pairs)


@given(
    num_samples=st.sampled_from([0, 1, 2, 37]),
    num_vectors=st.integers(2, 70),
    width=st.integers(4, 128),
    has_dense=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_cpu_kernel_agrees_with_plain_torch(num_samples: int, num_vectors: int, width: int, has_dense: bool) -> None:
    check(interaction_cpu, *inputs(num_samples, num_vectors, width, has_dense), width)


@given(
    num_samples=st.sampled_from([0, 1, 3]), num_vectors=st.integers(2, 40), width=st.integers(4, 70), has_dense=st.booleans()
)
@settings(max_examples=25, deadline=None)
def test_the_gpu_kernel_agrees_with_plain_torch(num_samples: int, num_vectors: int, width: int, has_dense: bool) -> None:
    check(triton_kernels(), *inputs(num_samples, num_vectors, width, has_dense, GPU), width)


@pytest.mark.parametrize(("num_vectors", "width"), [(65, 16), (128, 64), (130, 20), (17, 130)])
@pytest.mark.parametrize("has_dense", [True, False])
def test_the_gpu_kernel_agrees_where_an_example_needs_several_tiles(num_vectors: int, width: int, has_dense: bool) -> None:
    check(triton_kernels(), *inputs(2, num_vectors, width, has_dense, GPU), width)


def test_the_number_of_threads_changes_no_bit(three_threads: None) -> None:
    dense, pooled = inputs(50, 64, 64, True)
    several = pairwise_dots(dense, pooled, 64)
    several_gradients = gradients(several, dense, pooled)
    torch.set_num_threads(1)
    one = pairwise_dots(dense, pooled, 64)
    assert torch.equal(several, one)
    for mine, other in zip(several_gradients, gradients(one, dense, pooled), strict=True):
        assert torch.equal(mine, other)


def test_non_contiguous_tensors_are_accepted() -> None:
    both = torch.randn(6, 2 * 5 * 8)
    dense, pooled = torch.randn(8, 6).T, both[:, ::2]
    assert not dense.is_contiguous()
    assert not pooled.is_contiguous()
    dense.requires_grad_()
    pooled.requires_grad_()
    ours, plain = pairwise_dots(dense, pooled, 8), reference_pairwise_dots(dense, pooled, 8)
    torch.testing.assert_close(ours, plain)
    # The gradient of a sum is one number, repeated without memory of its own.
    for mine, other in zip(
        torch.autograd.grad(ours.sum(), [dense, pooled]), torch.autograd.grad(plain.sum(), [dense, pooled]), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_dense", [True, False])
def test_double_precision_passes_a_check_of_its_gradients(has_dense: bool) -> None:
    dense, pooled = inputs(3, 5, 4, has_dense, dtype=torch.float64)
    tensors = (pooled,) if dense is None else (dense, pooled)
    assert torch.autograd.gradcheck(lambda *given: pairwise_dots(given[0] if has_dense else None, given[-1], 4), tensors)


def test_a_single_dense_vector_has_no_products() -> None:
    dense = torch.randn(3, 4, requires_grad=True)
    out = pairwise_dots(dense, torch.zeros(3, 0), 4)
    assert torch.equal(out, dense)
    assert torch.equal(torch.autograd.grad(out.sum(), dense)[0], torch.ones(3, 4))


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_under_autocast_the_result_has_its_type_and_each_gradient_that_of_its_input(name: str) -> None:
    # Triton's interpreter multiplies the bits of bfloat16 numbers, not the numbers.
    low = torch.float16 if name == "gpu" and GPU == "cpu" else torch.bfloat16
    kernels, device = (interaction_cpu, "cpu") if name == "cpu" else (triton_kernels(), GPU)
    exact_dense, pooled = inputs(5, 9, 16, True, device)
    assert exact_dense is not None
    dense = exact_dense.detach().to(low).requires_grad_()
    with torch.autocast(device, dtype=low):
        out = trimmed_dots(dense, pooled, 16, kernels)
    assert out.dtype == low
    mine = gradients(out, dense, pooled)
    assert [grad.dtype for grad in mine] == [low, torch.float32]
    plain = reference_pairwise_dots(dense.float(), pooled, 16)
    torch.testing.assert_close(out.float(), plain, rtol=2e-2, atol=2e-2)
    for grad, other in zip(mine, gradients(plain, dense, pooled), strict=True):
        torch.testing.assert_close(grad.float(), other.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("pairs", get_args(Pairs))
@pytest.mark.parametrize("num_dense", [0, 1, 3])
def test_a_model_that_is_exported_holds_torch_operations_only(num_dense: int, pairs: Pairs) -> None:
    if not num_dense and pairs == "dense_sparse":
        return  # no pairs: `RunSpec` refuses it

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inputs = InteractionInputs(width=8, dense_width=8 * num_dense, pooled_width=24)
            self.dot = Dot(inputs, InteractionSpec(num_dense_vectors=max(1, num_dense), pairs=pairs))

        def forward(self, pooled: Tensor, dense: Tensor | None = None) -> Tensor:
            return self.dot(dense, pooled)

    def arguments(num_samples: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(num_samples, width) for width in ((24, 8 * num_dense) if num_dense else (24,)))

    batch = torch.export.Dim("batch", min=1)
    shapes = ({0: batch}, {0: batch}) if num_dense else ({0: batch},)
    program = torch.export.export(Net(), arguments(3), dynamic_shapes=shapes)
    calls = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.bmm.default" in calls
    others = arguments(7)
    torch.testing.assert_close(program.module()(*others), Net()(*others))


@needs_gpu
@pytest.mark.parametrize("num_vectors", [2, 14, 31, 64, 128, 256, 300])
@pytest.mark.parametrize("width", [4, 16, 36, 64, 128, 256, 300])
def test_every_shape_agrees_on_a_gpu(num_vectors: int, width: int) -> None:
    dense, pooled = inputs(33, num_vectors, width, True, GPU)
    plain = reference_pairwise_dots(dense, pooled, width)
    ours = pairwise_dots(dense, pooled, width)[:, : plain.shape[1]]
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    for mine, other in zip(gradients(ours, dense, pooled), gradients(plain, dense, pooled), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@needs_gpu
def test_a_captured_graph_replays_forward_and_backward() -> None:
    dense, pooled = inputs(16, 31, 64, True, GPU)
    assert dense is not None
    weights = torch.randn_like(pairwise_dots(dense, pooled, 64))
    torch.autograd.grad(pairwise_dots(dense, pooled, 64), [dense, pooled], weights)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pairwise_dots(dense, pooled, 64)
        grads = torch.autograd.grad(out, [dense, pooled], weights)
    with torch.no_grad():
        dense.normal_(), pooled.normal_()
    graph.replay()
    plain = reference_pairwise_dots(dense, pooled, 64)
    used = plain.shape[1]
    torch.testing.assert_close(out[:, :used], plain, rtol=1e-4, atol=1e-4)
    for mine, other in zip(grads, torch.autograd.grad(plain, [dense, pooled], weights[:, :used]), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_as_many_dense_vectors_as_pooled_ones_are_needed() -> None:
    for dense in (torch.randn(2, 8), torch.randn(5, 4), torch.randn(0, 8)):
        with pytest.raises(DataError, match="do not match 5 pooled examples"):
            pairwise_dots(dense, torch.randn(5, 24), 8)
    with pytest.raises(DataError, match="cannot be split into vectors of width 8"):
        pairwise_dots(torch.randn(5, 8), torch.randn(5, 20), 8)
