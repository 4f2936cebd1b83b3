"""History encoders equal their papers' equations for histories of any lengths, padded or not, and are what the planner thinks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rowstead.nn import segments
from rowstead.nn.encoders import HistoryEncoder, build_encoder
from rowstead.spec.encoders import ENCODERS, EncoderSpec
from rowstead.spec.errors import SpecError
from rowstead.spec.parse import parse
from tests.nn.plain_encoders import PLAIN_ENCODERS

WIDTH, MAX_IDS = 4, 9
SPECS = [
    EncoderSpec(target="item", hidden=(5,)),
    EncoderSpec(target="item", hidden=(5, 3), softmax=True, positions=False),
    EncoderSpec(target="item", hidden=()),
    EncoderSpec(kind="attention"),
    EncoderSpec(kind="attention", layers=2, heads=2, positions=False),
]
EACH = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}-{len(spec.hidden)}-{spec.layers}")
LENGTHS = st.lists(st.one_of(st.just(0), st.integers(0, MAX_IDS)), max_size=12)


def encoder_of(spec: EncoderSpec) -> HistoryEncoder:
    torch.manual_seed(1)
    encoder = build_encoder(spec, width=WIDTH, max_ids=MAX_IDS).double()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.5)
    return encoder


def drawn(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, offsets and targets of histories of these lengths."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.randn(sum(lengths), WIDTH, dtype=torch.float64, requires_grad=True)
    return rows, offsets, torch.randn(len(lengths), WIDTH, dtype=torch.float64, requires_grad=True)


@EACH
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS)
def test_vectors_and_gradients_are_those_of_the_papers_equations(spec: EncoderSpec, lengths: list[int]) -> None:
    encoder = encoder_of(spec)
    rows, offsets, target = drawn(lengths)
    given_target = target if spec.target else None
    found = encoder(rows, offsets, given_target)
    assert found.shape == (len(lengths), WIDTH)
    named = dict(encoder.named_parameters())
    plain = [
        PLAIN_ENCODERS[spec.kind](named, spec, rows[first:last], target[index])
        for index, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    ]
    expected = torch.stack([target.new_zeros(WIDTH), *plain])[1:]
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    inputs = [rows, target, *encoder.parameters()]
    gradients = [
        torch.autograd.grad((result * weights).sum() + 0 * sum(x.sum() for x in inputs), inputs) for result in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@EACH
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
def test_all_parameters_get_zero_gradients_where_no_history_has_ids(spec: EncoderSpec, lengths: list[int]) -> None:
    encoder = encoder_of(spec)
    rows, offsets, target = drawn(lengths)
    vectors = encoder(rows, offsets, target if spec.target else None)
    assert torch.equal(vectors, torch.zeros(len(lengths), WIDTH, dtype=torch.float64))
    vectors.sum().backward()
    for value in (rows, *encoder.parameters()):
        assert value.grad is not None
        assert torch.equal(value.grad, torch.zeros_like(value))


@EACH
@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS)
def test_padded_histories_give_the_same_vectors(spec: EncoderSpec, lengths: list[int]) -> None:
    encoder = encoder_of(spec)
    rows, offsets, target = drawn(lengths)
    padded = torch.full((len(lengths), MAX_IDS, WIDTH), 7.0, dtype=torch.float64)
    is_id = torch.zeros(len(lengths), MAX_IDS, dtype=torch.bool)
    for index, length in enumerate(lengths):
        padded[index, MAX_IDS - length :] = rows[offsets[index] : offsets[index + 1]]
        is_id[index, MAX_IDS - length :] = True
    given_target = target if spec.target else None
    torch.testing.assert_close(encoder.padded(padded, is_id, given_target), encoder(rows, offsets, given_target))


@EACH
def test_an_encoder_is_what_the_planner_thinks(spec: EncoderSpec) -> None:
    encoder, few, many = encoder_of(spec).requires_grad_(False), 4, 1000

    def flops_of(num_samples: int) -> int:
        rows, offsets, target = drawn([5] * num_samples)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            encoder(rows.detach(), offsets, target.detach() if spec.target else None)
        return counter.get_total_flops()

    work = ENCODERS[spec.kind].work(spec, WIDTH, MAX_IDS, 5.0)
    assert work.num_parameters == sum(parameter.numel() for parameter in encoder.parameters())
    assert work.flops == (flops_of(many) - flops_of(few)) / (many - few)


def test_histories_longer_than_the_positions_share_the_last_one() -> None:
    rows, offsets, target = drawn([MAX_IDS + 3])
    for spec in (SPECS[0], SPECS[3]):
        assert torch.isfinite(encoder_of(spec)(rows, offsets, target)).all()


def test_the_softmax_of_large_scores_is_finite() -> None:
    scores, offsets = torch.tensor([1e4, -1e4, 1e4, 3.0]), torch.tensor([0, 3, 3, 4])
    found = segments.softmax(scores, offsets, segments.bag_of_rows(offsets, 4))
    torch.testing.assert_close(found, torch.tensor([0.5, 0.0, 0.5, 1.0]))


@pytest.mark.parametrize(
    ("plain", "problem"),
    [
        ({"kind": "din"}, "target: `din` needs a target"),
        ({"kind": "attention", "target": "item"}, "target: `attention` compares the history with nothing else"),
        ({"kind": "attention", "hidden": [3]}, "hidden: does not apply to `attention`"),
        ({"kind": "din", "target": "item", "heads": 2}, "heads: does not apply to `din`"),
        ({"kind": "dinn", "target": "item"}, "did you mean"),
    ],
)
def test_options_that_do_not_go_together_are_refused(plain: dict[str, object], problem: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(EncoderSpec, plain)
    assert problem in str(refused.value)
