"""Gated linear attention's definition: by hand, by a second formulation, by its gradients."""

import pytest
import torch

from seqmix.reference.linear import gated_linear_attention


def random_inputs(T, *, B=2, H=3, K=4, V=5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    log_decay = -torch.rand(B, T, H, generator=generator, dtype=torch.float64)
    q, k, w = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
    return [q, k, w, log_decay, normal(B, H, V, K)]


def run(q, k, w, log_decay, state, scale=0.7):
    return gated_linear_attention(q, k, w, log_decay, scale=scale, state=state)


def test_two_tokens_are_as_computed_by_hand():
    q = torch.tensor([[1.0, 1.0], [1.0, 2.0]])[None, :, None]
    k = torch.tensor([[2.0, 3.0], [1.0, 0.0]])[None, :, None]
    w = torch.tensor([[1.0, -1.0], [4.0, 6.0]])[None, :, None]
    log_decay = torch.tensor([0.25, 0.5])[None, :, None].log()
    state = torch.tensor([[8.0, 0.0], [0.0, 4.0]])[None, None]
    y, last = run(q, k, w, log_decay, state, scale=10.0)
    # after token 1: [[4, 3], [-2, -2]]; after token 2: [[6, 1.5], [5, -1]]
    torch.testing.assert_close(y[0, :, 0], torch.tensor([[70.0, -40.0], [90.0, 30.0]]))
    torch.testing.assert_close(last[0, 0], torch.tensor([[6.0, 1.5], [5.0, -1.0]]))


def test_it_is_attention_with_decaying_scores():
    q, k, w, log_decay, state = random_inputs(9)
    y, _ = run(q, k, w, log_decay, torch.zeros_like(state))
    total = log_decay.cumsum(1)
    decay = (total[:, :, None] - total[:, None]).exp()  # B t s H
    scores = torch.einsum("bthk,bshk->btsh", q, k) * decay
    scores = scores * torch.ones(9, 9).tril()[None, :, :, None]
    expected = 0.7 * torch.einsum("btsh,bshv->bthv", scores, w)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_gradients_agree_with_finite_differences():
    inputs = [x.requires_grad_() for x in random_inputs(4, B=1, H=2, K=2, V=3)]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("cut", [0, 1, 5, 8])
def test_two_calls_equal_one_bitwise(cut):
    q, k, w, log_decay, state = random_inputs(8)
    y, last = run(q, k, w, log_decay, state)
    first, middle = run(q[:, :cut], k[:, :cut], w[:, :cut], log_decay[:, :cut], state)
    second, end = run(q[:, cut:], k[:, cut:], w[:, cut:], log_decay[:, cut:], middle)
    assert torch.equal(torch.cat([first, second], dim=1), y)
    assert torch.equal(end, last)


def test_the_past_does_not_see_the_future_bitwise():
    inputs = random_inputs(8)
    *changed, state = random_inputs(8, seed=1)
    mixed = [torch.cat([x[:, :5], z[:, 5:]], dim=1) for x, z in zip(inputs, changed, strict=False)]
    y, _ = run(*inputs)
    y_mixed, _ = run(*mixed, inputs[-1])
    assert torch.equal(y[:, :5], y_mixed[:, :5])
    assert not torch.equal(y[:, 5], y_mixed[:, 5])


def test_no_tokens_give_back_the_state():
    q, k, w, log_decay, state = random_inputs(0)
    y, last = run(q, k, w, log_decay, state)
    assert y.shape == w.shape and torch.equal(last, state)
