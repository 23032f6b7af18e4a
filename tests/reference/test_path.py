"""The definition of PaTH attention: by hand, against explicit products, and its known limits."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from seqmix.reference.path import path_attention

DOUBLE = torch.float64


def random_inputs(B=2, T=7, H=4, G=2, K=5, V=3, gate=True, dtype=DOUBLE, seed=0):
    """Random q, k, v, w, beta and log_forget (None without a gate)."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=DOUBLE)

    q, k, v = normal(B, T, H, K), normal(B, T, G, K), normal(B, T, G, V)
    w, beta = F.normalize(normal(B, T, G, K), dim=-1), 2 * normal(B, T, G).sigmoid()
    log_forget = F.logsigmoid(normal(B, T, H) + 1) if gate else None
    return [x if x is None else x.to(dtype) for x in (q, k, v, w, beta, log_forget)]


def transition(w, beta):
    """H = I - beta w w^T as a matrix, for one token of one head."""
    return torch.eye(w.shape[0], dtype=w.dtype) - beta * torch.outer(w, w)


def explicit(q, k, v, w, beta, log_forget, scale, softmax=True):
    """One row, logits through products of matrices H and sums of gates, pair by pair."""
    T, H = q.shape[:2]
    group = H // k.shape[1]
    y = v.new_zeros(T, H, v.shape[2])
    for h, i in itertools.product(range(H), range(T)):
        g, logits = h // group, []
        for j in range(i + 1):
            path = torch.eye(q.shape[2], dtype=q.dtype)
            for s in range(j + 1, i + 1):
                path = path @ transition(w[s, g], beta[s, g])
            gate = log_forget[j + 1 : i + 1, h].sum() if log_forget is not None else 0
            logits.append(scale * k[j, g] @ path @ q[i, h] + gate)
        logits = torch.stack(logits)
        y[i, h] = (logits.softmax(0) if softmax else logits) @ v[: i + 1, g]
    return y


def one_head(*vectors, size):
    """[1, T, 1, size] from a list of T vectors, padded with zeros."""
    rows = [F.pad(torch.as_tensor(x, dtype=DOUBLE), (0, size - len(x))) for x in vectors]
    return torch.stack(rows)[None, :, None]


def test_one_token_returns_its_value_and_its_key():
    q, k, v, w, beta, log_forget = random_inputs(T=1)
    y, keys = path_attention(q, k, v, w, beta, log_forget, scale=0.3)
    assert torch.equal(y, v.repeat_interleave(2, 2)) and torch.equal(keys, k)


def test_two_tokens_by_hand():
    # w_2 = (.6, .8), beta_2 = .5: H_2 k_1 = (1, 0) - .5 * .6 * (.6, .8) = (.82, -.24).
    q, k = one_head((9, 9), (2, 1), size=2), one_head((1, 0), (0, 3), size=2)
    v, w = one_head((1,), (0,), size=1), one_head((0, 1), (0.6, 0.8), size=2)
    beta = torch.tensor([[[1.7], [0.5]]], dtype=DOUBLE)
    log_forget = torch.tensor([[[-5.0], [-0.25]]], dtype=DOUBLE)
    y, keys = path_attention(q, k, v, w, beta, log_forget, scale=0.5)
    expected = torch.tensor([[0.82, -0.24], [0.0, 3.0]], dtype=DOUBLE)
    torch.testing.assert_close(keys[0, :, 0], expected)
    # logits: .5 * (2 * .82 - .24) - .25 = .45 and .5 * 3 = 1.5, and no gate on the token itself.
    weight = math.exp(0.45) / (math.exp(0.45) + math.exp(1.5))
    torch.testing.assert_close(y.flatten(), torch.tensor([1.0, weight], dtype=DOUBLE))


@pytest.mark.parametrize("gate", [False, True])
def test_it_equals_explicit_products_of_transitions(gate):
    inputs = random_inputs(gate=gate)
    y, _ = path_attention(*inputs, scale=0.7)
    for row in range(2):
        slower = explicit(*[x if x is None else x[row] for x in inputs], scale=0.7)
        torch.testing.assert_close(y[row], slower, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    inputs = [x.requires_grad_() for x in random_inputs(B=1, T=4, H=2, G=1, K=3, V=2)]
    assert torch.autograd.gradcheck(lambda *x: path_attention(*x, scale=0.7), inputs)


def test_the_past_does_not_see_the_future():
    inputs, others = random_inputs(seed=0), random_inputs(seed=1)
    mixed = [torch.cat([x[:, :4], o[:, 4:]], 1) for x, o in zip(inputs, others, strict=True)]
    y, _ = path_attention(*inputs, scale=0.7)
    y_mixed, _ = path_attention(*mixed, scale=0.7)
    assert torch.equal(y[:, :4], y_mixed[:, :4]) and not torch.equal(y[:, 4:], y_mixed[:, 4:])


def test_pieces_continue_from_aligned_keys():
    q, k, v, w, beta, _ = random_inputs(T=9, H=2, gate=False)
    y, keys = path_attention(q, k, v, w, beta, scale=0.7)
    _, first = path_attention(*[x[:, :5] for x in (q, k, v, w, beta)], scale=0.7)
    # The keys of a first piece, given as raw keys without transitions, continue the path.
    w = torch.cat([torch.zeros_like(w[:, :5]), w[:, 5:]], 1)
    resumed = torch.cat([first, k[:, 5:]], 1)
    y_resumed, keys_resumed = path_attention(q, resumed, v, w, beta, scale=0.7)
    assert torch.equal(y_resumed[:, 5:], y[:, 5:]) and torch.equal(keys_resumed, keys)


def test_no_tokens_give_empty_results():
    y, keys = path_attention(*random_inputs(T=0), scale=0.7)
    assert y.shape == (2, 0, 4, 3) and keys.shape == (2, 0, 2, 5)


def test_beta_zero_is_attention_without_positions():
    q, k, v, w, beta, _ = random_inputs(gate=False)
    y, keys = path_attention(q, k, v, w, torch.zeros_like(beta), scale=0.7)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7, enable_gqa=True)
    torch.testing.assert_close(y, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)
    assert torch.equal(keys, k.transpose(1, 2))


@pytest.mark.parametrize("beta", [0.3, 1.0, 1.6, 2.0])
def test_a_transition_scales_its_direction_by_one_minus_beta(beta):
    _, k, v, w, _, _ = random_inputs(B=1, T=2, H=1, G=1, gate=False)
    _, keys = path_attention(k, k, v, w, torch.full((1, 2, 1), beta, dtype=DOUBLE), scale=1.0)
    direction, before, after = w[0, 1, 0], k[0, 0, 0], keys[0, 0, 0]
    along = (1 - beta) * (before @ direction)  # shrinks below 1, erases at 1, flips above
    torch.testing.assert_close(after @ direction, along)
    aside = before - (before @ direction) * direction
    torch.testing.assert_close(after - (after @ direction) * direction, aside)


def test_without_softmax_it_is_a_linear_recurrence():
    q, k, v, w, beta, _ = (x[0] if x is not None else x for x in random_inputs(gate=False))
    linear = explicit(q, k, v, w, beta, None, scale=1.0, softmax=False)
    for h in range(4):
        g, state = h // 2, torch.zeros(3, 5, dtype=DOUBLE)
        for t in range(q.shape[0]):
            state = state @ transition(w[t, g], beta[t, g]) + torch.outer(v[t, g], k[t, g])
            torch.testing.assert_close(linear[t, h], state @ q[t, h], rtol=1e-12, atol=1e-12)


def swaps_to(permutation):
    """Transpositions that turn (0..4) into the permutation, by selection sort."""
    row, swaps = list(range(5)), []
    for x in range(5):
        y = row.index(permutation[x])
        if x != y:
            row[x], row[y] = row[y], row[x]
            swaps.append((x, y))
    return swaps


def test_theorem_2_1_two_heads_decide_identity_for_every_permutation():
    permutations = list(itertools.permutations(range(5)))
    T, weights = 9, torch.tensor([1.0, 2, 3, 4, 5, -54.5], dtype=DOUBLE)
    w = torch.zeros(120, T, 2, 6, dtype=DOUBLE)
    w[:, 0, :, 5] = 1
    for row, permutation in enumerate(permutations):
        swaps = swaps_to(permutation)
        padding = [(0, 1)] * (T - 1 - len(swaps) - len(swaps) % 2)  # an even number: no effect
        for t, (x, y) in enumerate(swaps + padding[: len(padding) // 2 * 2], 1):
            w[row, t, :, x], w[row, t, :, y] = 0.5**0.5, -(0.5**0.5)
    beta = torch.where(w.abs().sum(-1) > 0, 2.0, 0.0).to(DOUBLE)
    q, k, v = (torch.zeros(120, T, 2, 6, dtype=DOUBLE) for _ in range(3))
    q[:, :, 0] = T * weights
    k[:, 0, 0] = torch.tensor([1.0, 2, 3, 4, 5, 1], dtype=DOUBLE)
    v[:, 0] = 1
    y, keys = path_attention(q, k, v, w, beta, scale=1.0)
    for row, permutation in enumerate(permutations):
        score = sum((r + 1) * (permutation[r] + 1) for r in range(5))
        torch.testing.assert_close(keys[row, 0, 0] @ weights, torch.tensor(score - 54.5).to(DOUBLE))
    is_identity = torch.tensor([p == (0, 1, 2, 3, 4) for p in permutations])
    assert torch.equal(y[:, -1, 0, 0] > y[:, -1, 1, 0], is_identity)


WRITE, READ, IGNORE, ZERO, ONE = range(5)


def flip_flop(rows, ignore, T=512):
    """Flip-flop strings [rows, T] with clean answers: a bit after a read repeats the last write."""
    draw = torch.Generator().manual_seed(5)
    chance = torch.tensor([(1 - ignore) / 2, (1 - ignore) / 2, ignore])
    instruction = chance.expand(rows, -1).multinomial(T // 2, replacement=True, generator=draw)
    instruction[:, 0], instruction[:, -1] = WRITE, READ
    bit = torch.randint(2, (rows, T // 2), generator=draw)
    for row, pair in itertools.product(range(rows), range(T // 2)):
        if instruction[row, pair] == WRITE:
            last = bit[row, pair].clone()
        elif instruction[row, pair] == READ:
            bit[row, pair] = last
    return torch.stack([instruction, bit + ZERO], -1).flatten(1)


@pytest.mark.parametrize("ignore", [0.1, 0.8, 0.98])
def test_theorem_a_1_two_layers_run_a_flip_flop(ignore):
    tokens = flip_flop(2, ignore)
    n = tokens.shape[1]
    embedded = F.one_hot(tokens, 5).to(DOUBLE)
    is_bit, e = tokens >= ZERO, torch.eye(3, dtype=DOUBLE)
    q = (n * e[0]).expand(2, n, 1, 3)
    beta = torch.ones(2, n, 1, dtype=DOUBLE)
    # Layer 1: every bit learns whether its instruction, the only key left along e1, is a write.
    key = torch.where(is_bit[..., None], 0 * e[0], e[0])[:, :, None]
    w = torch.where(is_bit[..., None], e[1], e[0])[:, :, None]
    kind, _ = path_attention(q, key, embedded[:, :, None, :3], w, beta, scale=1.0)
    is_written = is_bit & (kind[:, :, 0, WRITE] > 0.5)
    # Layer 2: a written bit erases the keys of earlier ones; every token reads the last one left.
    key = torch.where(is_written[..., None], e[0], 0 * e[0])[:, :, None]
    w = torch.where(is_written[..., None], e[0], e[1])[:, :, None]
    value = torch.where(is_written[..., None], embedded[..., ZERO:], 0)[:, :, None]
    memory, _ = path_attention(q, key, value, w, beta, scale=1.0)
    is_read = tokens[:, :-1] == READ
    answer = memory[:, :-1, 0].argmax(-1) + ZERO
    assert torch.equal(answer[is_read], tokens[:, 1:][is_read])


@pytest.mark.parametrize("ignore", [0.1, 0.8, 0.98])
def test_one_layer_and_one_head_run_a_flip_flop(ignore):
    tokens = flip_flop(2, ignore)
    n = tokens.shape[1]
    is_bit, e = tokens >= ZERO, torch.eye(3, dtype=DOUBLE)
    swap = (e[0] - e[1]) / 2**0.5
    # The transition depends on the token two back: after a write swap e1 and e2, after a bit
    # erase e1, otherwise touch nothing that is used.
    by_token = torch.stack([swap, e[2], e[2], e[0], e[0]])
    w = F.pad(by_token[tokens[:, :-2]], (0, 0, 2, 0))[:, :, None]
    beta = torch.where(is_bit, 1.0, 2.0).to(DOUBLE)[..., None]
    key = torch.where(is_bit[..., None], e[0], 0 * e[0])[:, :, None]
    value = torch.where(tokens == ONE, 1.0, -1.0).to(DOUBLE)[:, :, None, None]
    y, _ = path_attention((n * e[1]).expand(2, n, 1, 3), key, value, w, beta, scale=1.0)
    is_read = tokens[:, :-1] == READ
    answer = torch.where(y[:, :-1, 0, 0] > 0, ONE, ZERO)
    assert torch.equal(answer[is_read], tokens[:, 1:][is_read])
