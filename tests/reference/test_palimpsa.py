"""Palimpsa's definition: by hand, by Eq. 5, by its gradients, by the limits that are known."""

import pytest
import torch

from seqmix.reference.linear import gated_linear_attention
from seqmix.reference.palimpsa import full_gaussian, palimpsa, readout_variance

SCALE = 0.7


def random_inputs(T, *, B=2, H=3, K=4, V=6, M=6, seed=0):
    """q, k, w, beta, log_decay, prior, content, excess in float64, states not zero."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    return [
        normal(B, T, H, K),
        normal(B, T, H, K),
        normal(B, T, H, V),
        uniform(B, T, H, M),
        -uniform(B, T, H),
        0.5 + uniform(H),
        normal(B, H, V, K),
        uniform(B, H, M, K),
    ]


def run(q, k, w, beta, log_decay, prior, content, excess):
    return palimpsa(q, k, w, beta, log_decay, prior, scale=SCALE, content=content, excess=excess)


def cut_tokens(inputs, tokens):
    """The same inputs with only some of the tokens, without the states."""
    *per_token, prior, _, _ = inputs
    return [x[:, tokens] for x in per_token] + [prior]


def test_two_tokens_are_as_computed_by_hand():
    q = torch.tensor([[1.0, 1.0], [1.0, 2.0]])[None, :, None]
    k = torch.tensor([[2.0, 3.0], [1.0, 0.0]])[None, :, None]
    w = torch.tensor([[1.0, -1.0], [4.0, 6.0]])[None, :, None]
    beta = torch.tensor([[1.0, 2.0], [3.0, 0.0]])[None, :, None]
    log_decay = torch.tensor([0.25, 0.5])[None, :, None].log()
    content, excess = torch.zeros(1, 1, 2, 2), torch.tensor([[4.0, 0.0], [0.0, 8.0]])[None, None]
    y, content, excess = palimpsa(
        q, k, w, beta, log_decay, torch.tensor([0.5]), scale=10.0, content=content, excess=excess
    )
    # token 1: M = [[2, 3], [-2, -3]], Ibar = [[5, 9], [8, 20]];
    # token 2: M = [[5, 1.5], [5, -1.5]], Ibar = [[5.5, 4.5], [4, 10]]
    first = [2 / 5.5 + 3 / 9.5, -2 / 8.5 - 3 / 20.5]
    second = [5 / 6 + 2 * 1.5 / 5, 5 / 4.5 - 2 * 1.5 / 10.5]
    torch.testing.assert_close(y[0, :, 0], 10 * torch.tensor([first, second]))
    torch.testing.assert_close(content[0, 0], torch.tensor([[5.0, 1.5], [5.0, -1.5]]))
    torch.testing.assert_close(excess[0, 0], torch.tensor([[5.5, 4.5], [4.0, 10.0]]))


def test_the_readout_variance_is_as_computed_by_hand():
    q, k = torch.tensor([1.0, 2.0])[None, None, None], torch.tensor([2.0, 3.0])[None, None, None]
    beta, log_decay = torch.tensor([1.0, 2.0])[None, None, None], torch.tensor([[[0.5]]]).log()
    excess = torch.tensor([[2.0, 0.0], [0.0, 4.0]])[None, None]
    variance = readout_variance(
        q, k, beta, log_decay, torch.tensor([0.5]), scale=10.0, excess=excess
    )
    expected = 100 * torch.tensor([1 / 5.5 + 4 / 9.5, 1 / 8.5 + 4 / 20.5])
    torch.testing.assert_close(variance[0, 0, 0], expected)


def test_it_is_eq_5_in_mean_and_precision():
    inputs = random_inputs(11)
    q, k, w, beta, log_decay, prior, _, _ = inputs
    start = [torch.zeros_like(inputs[-2]), torch.zeros_like(inputs[-1])]
    y, content, excess = run(*inputs[:-2], *start)

    prior = prior[:, None, None]
    mu, importance = start[0], prior.expand_as(start[1])
    for t in range(11):
        alpha = log_decay[:, t].exp()[..., None, None]
        write = torch.einsum("bhv,bhk->bhvk", w[:, t], k[:, t])
        evidence = torch.einsum("bhv,bhk->bhvk", beta[:, t], k[:, t].square())
        before, importance = importance, alpha * importance + (1 - alpha) * prior + evidence
        mu = alpha * before / importance * mu + write / importance
        expected = SCALE * torch.einsum("bhvk,bhk->bhv", mu, q[:, t])
        torch.testing.assert_close(y[:, t], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(content, importance * mu, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(excess, importance - prior, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("M", [1, 2, 6])
def test_gradients_agree_with_finite_differences(M):
    inputs = [x.requires_grad_() for x in random_inputs(3, B=1, H=2, K=2, M=M)]
    assert torch.autograd.gradcheck(run, inputs)


def test_gradients_are_the_settled_formulae():
    inputs = [x.requires_grad_() for x in random_inputs(7)]
    outputs = run(*inputs)
    generator = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]
    exact = torch.autograd.grad(outputs, inputs, cotangents)
    with torch.no_grad():
        for value, expected in zip(settled_gradients(inputs, cotangents), exact, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def settled_gradients(inputs, cotangents):
    """P and R run backwards over stored states; the gradient of log alpha is a suffix sum."""
    q, k, w, beta, log_decay, prior, content, excess = inputs
    dy, P, R = cotangents
    alpha, states = log_decay.exp()[..., None, None], []
    for t in range(q.shape[1]):
        content = alpha[:, t] * content + torch.einsum("bhv,bhk->bhvk", w[:, t], k[:, t])
        excess = alpha[:, t] * excess + torch.einsum("bhv,bhk->bhvk", beta[:, t], k[:, t] ** 2)
        states.append((content, excess))
    suffix = (P * content).sum((-2, -1)) + (R * excess).sum((-2, -1))
    dq, dk, dw, dbeta, dlog_decay = (torch.zeros_like(x) for x in inputs[:5])
    dprior = torch.zeros_like(prior)
    for t in reversed(range(q.shape[1])):
        r = 1 / (prior[:, None, None] + states[t][1])
        mu = states[t][0] * r
        do = SCALE * dy[:, t]
        g = torch.einsum("bhv,bhk->bhvk", do, q[:, t])
        P, R = P + g * r, R - g * mu * r
        dq[:, t] = torch.einsum("bhv,bhvk->bhk", do, mu)
        dw[:, t] = torch.einsum("bhvk,bhk->bhv", P, k[:, t])
        dbeta[:, t] = torch.einsum("bhvk,bhk->bhv", R, k[:, t] ** 2)
        dk[:, t] = torch.einsum("bhvk,bhv->bhk", P, w[:, t])
        dk[:, t] += 2 * k[:, t] * torch.einsum("bhvk,bhv->bhk", R, beta[:, t])
        kappa = (g * mu * r).sum((-2, -1))
        written = (dw[:, t] * w[:, t]).sum(-1) + (dbeta[:, t] * beta[:, t]).sum(-1)
        suffix = suffix + prior * kappa - written
        dlog_decay[:, t] = suffix
        dprior -= kappa.sum(0)
        P, R = alpha[:, t] * P, alpha[:, t] * R
    return dq, dk, dw, dbeta, dlog_decay, dprior, P, R


@pytest.mark.parametrize("cut", [0, 1, 5, 8])
def test_two_calls_equal_one_bitwise(cut):
    inputs = random_inputs(8, M=3)
    y, content, excess = run(*inputs)
    first, *middle = run(*cut_tokens(inputs, slice(None, cut)), *inputs[-2:])
    second, *end = run(*cut_tokens(inputs, slice(cut, None)), *middle)
    assert torch.equal(torch.cat([first, second], dim=1), y)
    assert torch.equal(end[0], content) and torch.equal(end[1], excess)


def test_the_past_does_not_see_the_future_bitwise():
    inputs, others = random_inputs(8), random_inputs(8, seed=1)
    mixed = [
        torch.cat([x[:, :5], z[:, 5:]], 1) for x, z in zip(inputs[:5], others[:5], strict=True)
    ]
    y, *_ = run(*inputs)
    y_mixed, *_ = run(*mixed, *inputs[5:])
    assert torch.equal(y[:, :5], y_mixed[:, :5])
    assert not torch.equal(y[:, 5], y_mixed[:, 5])


def test_no_tokens_give_back_the_state():
    inputs = random_inputs(0)
    y, content, excess = run(*inputs)
    assert y.shape == inputs[2].shape
    assert torch.equal(content, inputs[-2]) and torch.equal(excess, inputs[-1])


def test_batch_rows_and_heads_do_not_mix():
    q, k, w, beta, log_decay, prior, content, excess = random_inputs(6)
    y, *_ = run(q, k, w, beta, log_decay, prior, content, excess)
    for b, h in [(0, 2), (1, 0)]:
        tokens = [x[b : b + 1, :, h : h + 1] for x in (q, k, w, beta, log_decay)]
        states = [x[b : b + 1, h : h + 1] for x in (content, excess)]
        alone, *_ = run(*tokens, prior[h : h + 1], *states)
        torch.testing.assert_close(alone[0, :, 0], y[b, :, h], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("M", [1, 2, 3])
def test_groups_of_channels_share_their_beta(M):
    q, k, w, beta, log_decay, prior, content, excess = random_inputs(6, M=M)
    y, *states = run(q, k, w, beta, log_decay, prior, content, excess)
    channels = [channel * M // 6 for channel in range(6)]
    expected, *full = run(
        q, k, w, beta[..., channels], log_decay, prior, content, excess[:, :, channels]
    )
    assert torch.equal(y, expected)
    assert torch.equal(states[0], full[0]) and torch.equal(states[1][:, :, channels], full[1])


def test_shared_beta_is_linear_attention_with_a_modified_query():
    q, k, w, beta, log_decay, prior, content, excess = random_inputs(9, M=1)
    y, last, _ = run(q, k, w, beta, log_decay, prior, content, excess)
    n, queries = excess[:, :, 0], []
    for t in range(9):
        n = log_decay[:, t].exp()[..., None] * n + beta[:, t] * k[:, t] ** 2
        queries.append(q[:, t] / (prior[:, None] + n))
    expected, state = gated_linear_attention(
        torch.stack(queries, 1), k, w, log_decay, scale=SCALE, state=content
    )
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(last, state)


def test_without_evidence_it_is_gated_linear_attention():
    q, k, w, beta, log_decay, prior, content, excess = random_inputs(9)
    y, last, excess = run(q, k, w, beta * 0, log_decay, torch.ones_like(prior), content, excess * 0)
    expected, state = gated_linear_attention(q, k, w, log_decay, scale=SCALE, state=content)
    assert torch.equal(y, expected) and torch.equal(last, state) and not excess.any()


def scalar_run(importance, T, *, k=1.0, w=0.0, beta=1.0, alpha=0.9, mean=1.0, prior=1.0):
    """One state element that starts at (mean, importance); return its y (q = 1) and importance."""
    tokens = torch.ones(1, T, 1, 1, dtype=torch.float64)
    y, _, excess = palimpsa(
        tokens,
        k * tokens,
        w * tokens,
        beta * tokens,
        (alpha * tokens[..., 0]).log(),
        torch.tensor([prior], dtype=torch.float64),
        scale=1.0,
        content=mean * importance * tokens[:, 0, :, :, None],
        excess=(importance - prior) * tokens[:, 0, :, :, None],
    )
    return y.flatten(), prior + excess.item()


@pytest.mark.parametrize("before, after, mean", [(1.0, 2.0, 0.4500), (9.0, 9.2, 0.8804)])
def test_a_confident_state_resists_a_conflicting_write(before, after, mean):
    y, importance = scalar_run(before, 1)
    assert round(y.item(), 4) == mean and importance == pytest.approx(after)


def test_precision_settles_at_prior_plus_horizon_times_evidence():
    _, importance = scalar_run(1.0, 400, k=1.7, beta=0.6, alpha=0.9, prior=1.3)
    assert importance == pytest.approx(1.3 + 10 * 0.6 * 1.7**2, rel=1e-12)


def test_excess_precision_decays_by_alpha_without_evidence():
    _, importance = scalar_run(9.0, 5, beta=0.0, alpha=0.8)
    assert importance - 1 == pytest.approx(0.8**5 * 8, rel=1e-12)


def test_distance_to_the_mamba2_limit_is_first_order_in_excess_over_prior():
    q, k, w, beta, log_decay, prior, content, _ = random_inputs(50)
    prior, content = torch.ones_like(prior), torch.zeros_like(content)
    limit, _ = gated_linear_attention(q, k, w, log_decay, scale=SCALE, state=content)
    errors = []
    for size in (1e-2, 1e-3, 1e-4):
        y, *_ = run(q, k, w, size * beta, log_decay, prior, content, torch.zeros_like(content))
        errors.append(((y - limit).norm() / limit.norm()).item())
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.01)


def test_dropping_the_precision_between_keys_changes_the_mean():
    k, one = torch.ones(2, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    zero, identity = torch.zeros_like(k), torch.eye(2, dtype=torch.float64)
    mean, precision = full_gaussian(k, one, one, one * 0.3, one, zero, identity)
    torch.testing.assert_close(mean, torch.full_like(k, 1 / 3))
    torch.testing.assert_close(precision, torch.ones_like(identity) + identity)
    key, write, state = k.view(1, 1, 1, 2), one.view(1, 1, 1, 1), zero.view(1, 1, 1, 2)
    inputs = [key, key, write, write, 0 * write[..., 0], one.view(1), state, state]
    _, content, excess = run(*inputs)
    torch.testing.assert_close((content / (1 + excess)).flatten(), torch.full_like(k, 1 / 2))


def test_the_full_gaussian_mean_minimises_eq_3():
    generator = torch.Generator().manual_seed(0)
    k, old = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    v, beta, alpha, prior = torch.tensor([0.8, 0.6, 0.7, 1.5], dtype=torch.float64)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    precision = root @ root.T + torch.eye(5, dtype=torch.float64)
    mean, _ = full_gaussian(k, v, beta, alpha, prior, old, precision)

    def free_energy(mu):
        fit = beta / 2 * (mu @ k - v) ** 2
        restore = (1 - alpha) / 2 * prior * mu @ mu
        protect = alpha / 2 * (mu - old) @ precision @ (mu - old)
        return fit + restore + protect

    gradient = torch.func.grad(free_energy)(mean)
    torch.testing.assert_close(gradient, torch.zeros_like(k), rtol=0, atol=1e-12)
    assert free_energy(mean + 1e-3 * k) > free_energy(mean) < free_energy(old)
