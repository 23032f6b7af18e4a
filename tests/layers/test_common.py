"""Shared parts: short convolutions over pieces and packed documents, norms, positions."""

import pytest
import torch

from seqmix.layers.common import RMSNorm, ShortConv, documents, l2_normalize


def convolution(width: int = 4, **options) -> ShortConv:
    conv = ShortConv(3, width, bias=True, **options).double()
    torch.nn.init.constant_(conv.bias, 1.0)
    return conv


def test_a_tap_reaches_back_as_far_as_its_index():
    conv = ShortConv(1, 3).double()
    conv.weight.data[0, 0] = torch.tensor([100.0, 10.0, 1.0])
    y, _ = conv(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]).double())
    assert y.flatten().tolist() == [1, 12, 123, 234]


def test_it_equals_pytorchs_convolution():
    conv, x = convolution(activation="silu"), torch.randn(2, 9, 3).double()
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    wanted = torch.nn.functional.conv1d(padded, conv.weight, conv.bias, groups=3)
    torch.testing.assert_close(conv(x)[0], torch.nn.functional.silu(wanted.transpose(1, 2)))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_pieces_equal_the_whole_bitwise_with_every_gradient(width):
    conv, x = convolution(width), torch.randn(2, 12, 3).double().requires_grad_()
    state = torch.randn(2, width - 1, 3).double().requires_grad_()
    whole, last = conv(x, state)
    pieces, going = [], state
    for a, b in [(0, 1), (1, 1), (1, 3), (3, 4), (4, 12)]:
        y, going = conv(x[:, a:b], going)
        pieces.append(y)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(going, last)
    wanted = [x, state, *conv.parameters()]
    loss = lambda y, s: y.square().sum() + (s * torch.arange(width - 1.0)[:, None]).sum()  # noqa: E731
    a = torch.autograd.grad(loss(whole, last), wanted)
    b = torch.autograd.grad(loss(torch.cat(pieces, 1), going), wanted)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_packed_documents_equal_separate_ones_with_every_gradient(width):
    conv, offsets = convolution(width), [0, 1, 1, 3, 9]
    x = torch.randn(1, 9, 3).double().requires_grad_()
    state = torch.randn(4, width - 1, 3).double().requires_grad_()
    y, last = conv(x, state, torch.tensor(offsets))
    parts = [
        conv(x[:, a:b], state[n : n + 1])
        for n, (a, b) in enumerate(zip(offsets[:-1], offsets[1:], strict=True))
    ]
    torch.testing.assert_close(y, torch.cat([part for part, _ in parts], 1))
    torch.testing.assert_close(last, torch.cat([end for _, end in parts]))
    wanted = [x, state, *conv.parameters()]
    loss = lambda y, s: y.square().sum() + s.pow(3).sum()  # noqa: E731
    apart = torch.cat([part for part, _ in parts], 1), torch.cat([end for _, end in parts])
    torch.testing.assert_close(
        torch.autograd.grad(loss(y, last), wanted), torch.autograd.grad(loss(*apart), wanted)
    )


def test_documents_count_their_own_tokens():
    where = documents(torch.tensor([0, 2, 2, 5]), 6)
    assert where.document.tolist() == [0, 0, 2, 2, 2, 2]
    assert where.position.tolist() == [0, 1, 0, 1, 2, 3]
    assert where.lengths.tolist() == [2, 0, 3]


def test_norms_compute_in_float32_and_return_the_dtype():
    x = (1000 * torch.randn(4, 64)).bfloat16()
    assert RMSNorm(64)(x).dtype == torch.bfloat16
    torch.testing.assert_close(
        RMSNorm(64)(x.double()), torch.nn.functional.rms_norm(x.double(), (64,), eps=1e-6)
    )
    assert l2_normalize(x).dtype == torch.float32
    torch.testing.assert_close(l2_normalize(x).norm(dim=-1), torch.ones(4))
    assert not l2_normalize(torch.zeros(3)).any()


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="ShortConv: activation must be None or 'silu', got 'x'"):
        ShortConv(3, 4, activation="x")
