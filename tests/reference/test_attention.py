"""The definition of gated softmax attention: by hand, against SDPA, and its known limits."""

import math

import pytest
import torch
import torch.nn.functional as F

from seqmix.reference.attention import attention
from seqmix.reference.path import path_attention

DOUBLE = torch.float64


def random_inputs(B=2, T=7, H=4, G=2, K=5, V=3, seed=0):
    """Random q, k, v and log_forget."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=DOUBLE)

    q, k, v = normal(B, T, H, K), normal(B, T, G, K), normal(B, T, G, V)
    return [q, k, v, F.logsigmoid(normal(B, T, H) + 1)]


def sdpa(q, k, v, log_forget, scale):
    """The library's attention, with the gates as an additive mask from their running sum."""
    T = q.shape[1]
    total = log_forget.cumsum(1).transpose(1, 2)  # B H T
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    mask = (total[..., :, None] - total[..., None, :]).masked_fill(future, -math.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


def test_two_tokens_by_hand():
    q, k, v = (
        torch.tensor(x, dtype=DOUBLE).reshape(1, 2, 1, -1)
        for x in ([[9, 9], [2, 1]], [[1, 0], [0, 3]], [1, 0])
    )
    log_forget = torch.tensor([-5.0, -0.25], dtype=DOUBLE).reshape(1, 2, 1)
    y = attention(q, k, v, log_forget, scale=0.5)
    # logits: .5 * 2 - .25 = .75 on the first token, .5 * 3 = 1.5 on itself.
    weight = math.exp(0.75) / (math.exp(0.75) + math.exp(1.5))
    torch.testing.assert_close(y.flatten(), torch.tensor([1.0, weight], dtype=DOUBLE))


@pytest.mark.parametrize("gate", [False, True])
def test_it_equals_the_attention_of_the_library(gate):
    q, k, v, log_forget = random_inputs()
    y = attention(q, k, v, log_forget if gate else None, scale=0.7)
    expected = sdpa(q, k, v, log_forget * gate, scale=0.7)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_a_constant_gate_is_alibi():
    q, k, v, log_forget = random_inputs()
    slope = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=DOUBLE)
    y = attention(q, k, v, -slope.expand_as(log_forget), scale=0.7)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    bias = -slope[:, None, None] * distance
    mask = bias.masked_fill(distance < 0, -math.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.7, enable_gqa=True)
    torch.testing.assert_close(y, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_it_is_path_attention_without_transitions():
    q, k, v, log_forget = random_inputs()
    w, beta = torch.zeros_like(k), torch.ones_like(k[..., 0])
    y, _ = path_attention(q, k, v, w, beta, log_forget, scale=0.7)
    assert torch.equal(attention(q, k, v, log_forget, scale=0.7), y)


def test_a_closed_gate_hides_the_past_without_nan():
    q, k, v, log_forget = random_inputs()
    log_forget[:, 4] = -1e4
    y = attention(q, k, v, log_forget, scale=0.7)
    later = attention(*[x[:, 4:] for x in (q, k, v, log_forget)], scale=0.7)
    assert torch.equal(y[:, 4:], later)


def test_gradients_are_those_of_finite_differences():
    inputs = [x.requires_grad_() for x in random_inputs(B=1, T=4, H=2, G=1, K=3, V=2)]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, scale=0.7), inputs)


def test_the_past_does_not_see_the_future():
    inputs, others = random_inputs(seed=0), random_inputs(seed=1)
    mixed = [torch.cat([x[:, :4], o[:, 4:]], 1) for x, o in zip(inputs, others, strict=True)]
    y, y_mixed = attention(*inputs, scale=0.7), attention(*mixed, scale=0.7)
    assert torch.equal(y[:, :4], y_mixed[:, :4]) and not torch.equal(y[:, 4:], y_mixed[:, 4:])


def test_no_tokens_give_an_empty_result():
    assert attention(*random_inputs(T=0), scale=0.7).shape == (2, 0, 4, 3)
