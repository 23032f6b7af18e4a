"""The decode kernels against the same cache read by PyTorch in float64."""

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from seqmix.chunked import path_cache
from seqmix.chunked.path_cache import Folded, Pending, extend
from seqmix.kernels.path.aligned import fold
from seqmix.kernels.path.decode import decode, read_on
from seqmix.kernels.path.step import step
from tests.kernels.path.cases import DEVICE, error
from tests.kernels.path.test_kernels import LEVELS

SHAPES = [(5, 70, 2, 1, 16, 16), (64, 300, 2, 2, 20, 12), (33, 1, 4, 2, 16, 48)]
LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def cache(N, T, P, F, H, G, K, V, gate, dtype=torch.float32):
    """q, first, pending tokens, folded ones and the length of each row's; NaN where none lie."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    pending = [
        normal(N, P, G, K).to(dtype).float(),
        normal(N, P, G, V).to(dtype),
        normalize(normal(N, P, G, K), dim=-1),
    ]
    pending += [2 * torch.rand(N, P, G, device=DEVICE)]
    pending += [logsigmoid(normal(N, P, H) + 3) if gate else None]
    folded = [normal(N, F, G, K).to(dtype), normal(N, F, G, V).to(dtype)]
    folded += [-torch.rand(N, F, H, device=DEVICE) if gate else None]
    length = torch.arange(N, device=DEVICE) * 7 % (F + 1)
    first = torch.arange(N, device=DEVICE) % (P - T + 1)
    return normal(N, T, H, K).to(dtype), first, pending, folded, length


def exact(q, first, pending, folded, length, scale=0.3):
    """The same in float64, each row cut to what it has: the rest may hold anything."""
    ys = []
    for n in range(q.shape[0]):
        stop, far = int(first[n]) + q.shape[1], int(length[n])
        near = [None if x is None else x[n : n + 1, :stop].double() for x in pending]
        old = [None if x is None else x[n : n + 1, :far].double() for x in folded]
        here = slice(n, n + 1)
        cut = Folded(*old, length[here])
        ys.append(extend(q[here].double(), first[here], Pending(*near), cut, scale=scale))
    return torch.cat(ys)


def poison(tensors, counts):
    """NaN behind the first counts[n] tokens of each row."""
    for x in tensors:
        if x is not None:
            behind = torch.arange(x.shape[1], device=x.device) >= counts[:, None]
            x.masked_fill_(behind[(..., *[None] * (x.ndim - 2))], torch.nan)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("shape", "T"), [*zip(SHAPES, (1, 3, 20), strict=True)])
def test_decoding_equals_reading_the_cache(shape, T, gate):
    q, first, pending, folded, length = cache(3, T, *shape, gate)
    poison(folded, length)
    got, _, _ = decode(q, first, *pending, *folded, length, 0.3)
    assert error(got, exact(q, first, pending, folded, length)) < LIMIT[q.dtype]


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("shape", "start"), [*zip(SHAPES, (0, 61, 15), strict=True)])
def test_steps_equal_reading_the_cache(shape, start, gate):
    """From an empty solution, or from one that `decode` found."""
    G, K = shape[3:5]
    q, _, pending, folded, length = cache(3, 3, *shape, gate)
    poison(folded, length)
    seen = torch.tensor([max(0, start - 2), start, max(0, start - 1)], device=DEVICE)
    _, *solution = decode(q[:, :1], 0 * seen, *pending, *folded, length, 0.3)
    conv = pending[0].flatten(2)
    kept = [*pending[:3], conv, *pending[3:], *solution]
    old = [None if x is None else x[:, :start].clone() for x in kept]
    old[3] = torch.cat([conv[:, :2], conv[:, :start]], 1)
    poison([x for i, x in enumerate(old) if i != 3], seen)
    row = torch.arange(3, device=DEVICE)
    for t in range(3):
        tokens = [None if x is None else x[row, seen + t][:, None] for x in kept[:6]]
        now = q[:, t : t + 1].contiguous()
        got, old = step(now, tokens, seen + t, old, *folded, length, 0.3)
        wanted = exact(now, seen + t, pending, folded, length)
        assert error(got, wanted) < LIMIT[q.dtype]
        for n in range(3):
            for i, (x, y) in enumerate(zip(old[:6], kept[:6], strict=True)):
                if x is not None:
                    stop = int(seen[n]) + t + 1
                    assert torch.equal(x[n, 2 if i == 3 else 0 :][:stop], y[n, :stop])
    assert old[6].shape == (3, start + 3, G, K) and old[3].shape[1] == start + 5


@pytest.mark.parametrize("gate", [False, True])
def test_queries_that_read_newer_tokens_read_on(gate):
    q, _, _, folded, length = cache(3, 30, 30, 200, 4, 2, 20, 12, gate)
    poison(folded, length)
    near, lse = torch.randn(3, 30, 4, 12, device=DEVICE), torch.randn(3, 30, 4, device=DEVICE)
    behind = -torch.rand(3, 30, 4, device=DEVICE) if gate else None
    got = read_on(near, lse, q * 0.3, behind, *folded, length)
    for n in range(3):
        k, v, decay = (None if x is None else x[n, : length[n]].double() for x in folded)
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        logits = torch.einsum("thk,jhk->htj", q[n].double() * 0.3, k)
        if gate:
            logits += decay.T[:, None] + behind[n].double().T[..., None]
        logits = torch.cat([lse[n].double().T[..., None], logits], -1)
        weight = logits.softmax(-1)
        wanted = torch.einsum("htj,jhv->thv", weight[..., 1:], v)
        wanted += weight[..., 0].T[..., None] * near[n].double()
        assert error(got[n], wanted) < LIMIT[q.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("F", "P"), [(0, 130), (70, 1), (65, 64), (3, 390)])
def test_folding_equals_folding_in_pytorch(F, P, dtype):
    _, _, pending, folded, _ = cache(2, 1, P, F, 2, 2, 20, 12, False, dtype)
    k, _, w, beta, _ = pending
    beta[1, P // 2 :] = 0
    got = fold(folded[0], k, w, beta, LEVELS)
    wanted = path_cache.fold(*(x.double() for x in (folded[0], k, w, beta)))
    for a, b, old in zip(got, wanted, (folded[0], k), strict=True):
        floor = old.double().norm() + 1e-12  # what erasing leaves may be small
        assert a.dtype == dtype and error(a, b, floor) < LIMIT[dtype]
