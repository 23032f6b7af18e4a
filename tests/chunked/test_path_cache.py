"""PaTH attention from a cache against the definition over the whole sequence."""

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from seqmix.chunked.path_cache import Folded, Pending, extend, fold
from seqmix.reference.path import path_attention

SCALE = 0.7


def random_inputs(T, *, N=3, H=4, G=2, K=5, V=3, gate=True):
    """q, k, v, w, beta and log_forget (None without a gate) in float64."""
    w = normalize(torch.randn(N, T, G, K).double(), dim=-1)
    log_forget = logsigmoid(torch.randn(N, T, H).double()) if gate else None
    q, k, v = torch.randn(N, T, H, K), torch.randn(N, T, G, K), torch.randn(N, T, G, V)
    return q.double(), k.double(), v.double(), w, 2 * torch.rand(N, T, G).double(), log_forget


def cached(q, k, v, w, beta, log_forget, boundary, first):
    """The queries from token `first` on: tokens before `boundary` folded, in two folds."""
    cut = boundary // 3
    empty = k[:, :0]
    _, keys = fold(empty, k[:, :cut], w[:, :cut], beta[:, :cut])
    middle = slice(cut, boundary)
    old, new = fold(keys, k[:, middle], w[:, middle], beta[:, middle])
    decay = later = None
    if log_forget is not None:
        to_boundary = log_forget[:, :boundary].flip(1).cumsum(1).flip(1)
        decay = to_boundary - log_forget[:, :boundary]
        later = log_forget[:, boundary:]
    length = torch.full((k.shape[0],), boundary)
    folded = Folded(torch.cat([old, new], 1), v[:, :boundary], decay, length)
    pending = Pending(*(x[:, boundary:] for x in (k, v, w, beta)), later)
    start = torch.full((k.shape[0],), first - boundary)
    return extend(q[:, first:], start, pending, folded, scale=SCALE)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("boundary, first", [(0, 0), (0, 7), (31, 31), (40, 45), (100, 109)])
def test_it_is_the_definition_with_every_gradient(boundary, first, gate):
    inputs = [x.requires_grad_() for x in random_inputs(110, gate=gate) if x is not None]
    rows = inputs if gate else [*inputs, None]
    y, _ = path_attention(*rows, scale=SCALE)
    got = cached(*rows, boundary, first)
    torch.testing.assert_close(got, y[:, first:], rtol=1e-11, atol=1e-11)
    dy = torch.randn_like(got)
    expected = torch.autograd.grad(y[:, first:], inputs, dy)
    for x, truth in zip(torch.autograd.grad(got, inputs, dy), expected, strict=True):
        torch.testing.assert_close(x, truth, rtol=1e-10, atol=1e-10)


def test_ragged_rows_see_their_own_tokens_alone():
    inputs = random_inputs(30)
    y, _ = path_attention(*inputs, scale=SCALE)
    folded_length, first = torch.tensor([0, 9, 14]), torch.tensor([3, 0, 7])
    k, v, w, beta, log_forget = inputs[1:]
    keys, values = torch.full((3, 20, 2, 5), 1e3).double(), torch.full((3, 20, 2, 3), 1e3).double()
    decay = torch.zeros(3, 20, 4).double()
    rows = [torch.full((3, 12, *x.shape[2:]), 0.5).double() for x in inputs[1:]]
    queries = torch.zeros(3, 4, 4, 5).double()
    for n, (r, a) in enumerate(zip(folded_length.tolist(), first.tolist(), strict=True)):
        part = slice(n, n + 1), slice(0, r)
        keys[n, :r] = fold(k[n : n + 1, :0], k[part], w[part], beta[part])[1][0]
        values[n, :r] = v[n, :r]
        decay[n, :r] = log_forget[n, :r].flip(0).cumsum(0).flip(0) - log_forget[n, :r]
        for row, x in zip(rows, (k, v, w, beta, log_forget), strict=True):
            row[n, : a + 4] = x[n, r : r + a + 4]
        queries[n] = inputs[0][n, r + a : r + a + 4]
    pending, folded = Pending(*rows), Folded(keys, values, decay, folded_length)
    got = extend(queries, first, pending, folded, scale=SCALE)
    for n, (r, a) in enumerate(zip(folded_length.tolist(), first.tolist(), strict=True)):
        torch.testing.assert_close(got[n], y[n, r + a : r + a + 4], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("P", [1, 31, 32, 33, 200])
def test_fold_aligns_keys_as_the_definition_does(P):
    _, k, v, w, beta, _ = random_inputs(P + 6, H=2, gate=False)
    first = [x[:, :6] for x in (k, k, v, w, beta)]
    _, before = path_attention(*first, scale=SCALE)
    _, expected = path_attention(k, k, v, w, beta, scale=SCALE)
    old, new = fold(before, k[:, 6:], w[:, 6:], beta[:, 6:])
    torch.testing.assert_close(torch.cat([old, new], 1), expected, rtol=1e-12, atol=1e-12)


def test_folding_nothing_changes_nothing():
    _, k, _, w, beta, _ = random_inputs(5)
    old, new = fold(k, k[:, :0], w[:, :0], beta[:, :0])
    assert torch.equal(old, k) and new.shape[1] == 0
    old, new = fold(k, k, torch.zeros_like(w), beta)
    assert torch.equal(old, k) and torch.equal(new, k)


def test_low_precision_keys_are_folded_in_float32():
    _, k, _, w, beta, _ = random_inputs(64, K=64)
    old, new = fold(k.bfloat16(), k.float(), w.float(), beta.float())
    exact, _ = fold(k.bfloat16().double(), k, w, beta)
    assert (old.dtype, new.dtype) == (torch.bfloat16, torch.float32)
    assert (old.double() - exact).norm() <= 2**-8 * exact.norm()
