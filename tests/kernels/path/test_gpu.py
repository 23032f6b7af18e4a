"""PaTH kernels on a GPU: every size and dtype against float64, large calls, bitwise determinism.

float64 is chunked PyTorch, which its own tests hold to the definition.
"""

import pytest
import torch
from torch import Tensor

from seqmix.chunked.path_cache import Folded, Pending, extend, fold
from seqmix.kernels.path.backward import backward
from seqmix.kernels.path.forward import forward
from seqmix.ops import path_attention
from tests.kernels.path.cases import NAMES, arguments, error
from tests.kernels.path.test_kernels import LEVELS, LIMIT, check

pytestmark = pytest.mark.gpu

SIZES = {
    torch.bfloat16: [(16, 16), (20, 12), (32, 32), (64, 64), (64, 128), (80, 80), (128, 96)],
    torch.float16: [(48, 48), (64, 64), (40, 100), (128, 128)],
    torch.float32: [(48, 48), (64, 40), (64, 64)],
}
CASES = [(dtype, *pair) for dtype, pairs in SIZES.items() for pair in pairs]


def call(tokens: list[Tensor | None], dy: Tensor, impl: str) -> tuple[Tensor, list[Tensor | None]]:
    """y and the gradients of sum dy y, with None where there was no input."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tokens]
    y = path_attention(*leaves, impl=impl).y
    found = iter(torch.autograd.grad(y, [x for x in leaves if x is not None], dy))
    return y.detach(), [None if x is None else next(found) for x in leaves]


def assert_close(got, wanted, limit: float) -> None:
    assert error(got[0], wanted[0]) < limit
    for name, a, b in zip(NAMES, got[1], wanted[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert error(a, b, floor=0.1) < limit, name


def double(tokens):
    return [None if x is None else x.double() for x in tokens]


@pytest.mark.parametrize(("dtype", "K", "V"), CASES)
@pytest.mark.parametrize("gate", [False, True])
def test_every_gradient_of_every_size(dtype, K, V, gate):
    check(arguments(1, 65, 2, 1, K, V, dtype, gate=gate))
    for B, T, H, G in ((2, 1000, 2, 1), (1, 2500, 2, 2)):
        tokens = arguments(B, T, H, G, K, V, dtype, gate=gate)
        dy = torch.randn(B, T, H, V, device="cuda").to(dtype)
        wanted = call(double(tokens), dy.double(), "torch")
        assert_close(call(tokens, dy, "triton"), wanted, LIMIT[dtype])


@pytest.mark.parametrize("beta", [1e-3, None, 1.999])
def test_64k_tokens_are_accurate(beta):
    tokens = arguments(1, 65536, 1, 1, 64, 64, torch.bfloat16, gate=False, beta=beta)
    dy = torch.randn_like(tokens[0])
    wanted = call(double(tokens), dy.double(), "torch")
    assert_close(call(tokens, dy, "triton"), wanted, 1e-2)


def window(tokens: list[Tensor | None], start: int, size: int, scale: float, dy: Tensor) -> tuple:
    """y of the queries start ... start + size, and dq and dv of sum dy y there, in float64.

    Keys before them are folded a few thousand tokens at a time: O(T K^2) a head.
    """
    q, k, v, w, beta, gate = double([None if x is None else x[:, : start + size] for x in tokens])
    keys = k[:, :0]
    for a in range(0, start, 8192):
        piece = slice(a, min(start, a + 8192))
        keys = torch.cat(fold(keys, k[:, piece], w[:, piece], beta[:, piece]), 1)
    decay = None
    if gate is not None:
        decay = gate[:, :start].flip(1).cumsum(1).flip(1) - gate[:, :start]
    now = slice(start, start + size)
    q, v = q[:, now].requires_grad_(), v.requires_grad_()
    near = Pending(
        k[:, now], v[:, now], w[:, now], beta[:, now], gate if gate is None else gate[:, now]
    )
    length = torch.tensor([start], device=q.device)
    far = Folded(keys, v[:, :start], decay, length)
    y = extend(q, 0 * length, near, far, scale=scale)
    return y.detach(), *torch.autograd.grad(y, (q, v), dy.double())


@pytest.mark.parametrize("gate", [False, True])
def test_a_million_tokens_in_one_call(gate):
    T, size = 1_000_000, 64
    tokens = arguments(1, T, 2, 2, 64, 64, torch.bfloat16, gate=gate)
    dy = torch.zeros_like(tokens[0])
    dy[:, -size:] = torch.randn_like(dy[:, -size:])
    y, (dq, dk, dv, dw, *_) = call(tokens, dy, "triton")
    for start in (123_456, T - size):
        wanted, want_dq, want_dv = window(tokens, start, size, 0.125, dy[:, start : start + size])
        assert error(y[:, start : start + size], wanted) < LIMIT[torch.bfloat16]
    assert error(dq[:, -size:], want_dq) < LIMIT[torch.bfloat16]
    assert error(dv, want_dv) < LIMIT[torch.bfloat16]
    assert not dq[:, :-size].any() and dk.isfinite().all() and dw.isfinite().all()


def test_more_rows_of_heads_than_a_grid_has():
    tokens = arguments(4096, 70, 17, 17, 64, 64, torch.bfloat16)
    dy = torch.randn_like(tokens[0])
    y, gradients = call(tokens, dy, "triton")
    for b in (0, 4095):
        here = slice(b, b + 1)
        wanted = call(double([x[here] for x in tokens]), dy[here].double(), "torch")
        assert_close((y[here], [x[here] for x in gradients]), wanted, LIMIT[torch.bfloat16])


@pytest.mark.parametrize(("B", "differentiated"), [(1030, False), (380, True)])
def test_tensors_of_more_than_2_to_the_31_elements(B, differentiated):
    """q has them in the forward pass, gradients of the keys of three levels in the backward."""
    if torch.cuda.mem_get_info()[0] < 80e9:
        pytest.skip("needs 80 GB")
    T, H, d = 520, 64, 64
    assert (3 if differentiated else 1) * B * T * H * d > 2**31
    ends = arguments(2, T, H, H, d, d, torch.bfloat16, gate=False)
    tokens = [x if x is None else x[:1].expand(B, *x.shape[1:]).clone() for x in ends]
    for x, y in zip(tokens, ends, strict=True):
        if x is not None:
            x[-1] = y[1]
    last = [x if x is None else x[-1:] for x in tokens]
    if not differentiated:
        with torch.no_grad():
            y = path_attention(*tokens, impl="triton").y
            wanted = path_attention(*double(last), impl="torch").y
        assert error(y[-1:], wanted) < LIMIT[torch.bfloat16]
        return
    dy = torch.ones_like(tokens[0])
    y, gradients = call(tokens, dy, "triton")
    found = y[-1:], [x if x is None else x[-1:] for x in gradients]
    assert_close(found, call(double(last), dy[-1:].double(), "torch"), LIMIT[torch.bfloat16])


@pytest.mark.parametrize("gate", [False, True])
def test_repeated_calls_agree_bitwise(gate):
    tokens = arguments(2, 1000, 4, 2, 64, 64, torch.bfloat16, gate=gate)
    dy = torch.randn_like(tokens[0])
    y, lse = forward(*tokens, 0.125, None)
    wanted = backward(dy, *tokens, y, lse, 0.125, None, levels=LEVELS)
    for _ in range(25):
        again, _ = forward(*tokens, 0.125, None)
        got = backward(dy, *tokens, y, lse, 0.125, None, levels=LEVELS)
        assert torch.equal(again, y)
        assert all(a is b or torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_compiles_as_one_graph():
    function = torch.compile(path_attention, fullgraph=True)
    for T in (100, 164, 228):
        tokens = arguments(1, T, 2, 2, 64, 64, torch.bfloat16)
        torch.testing.assert_close(function(*tokens).y, path_attention(*tokens).y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one():
    tokens = arguments(1, 300, 2, 1, 64, 64, torch.bfloat16)
    dy = torch.randn_like(tokens[0])
    y, gradients = call(tokens, dy, "triton")
    assert torch.cuda.current_device() == 0
    other = call([x.to("cuda:1") for x in tokens], dy.to("cuda:1"), "triton")
    assert torch.equal(other[0].to("cuda:0"), y)
    for a, b in zip(other[1], gradients, strict=True):
        assert torch.equal(a.to("cuda:0"), b)


@pytest.mark.parametrize("size", [16, 32, 129])
def test_sizes_without_a_backward_name_the_way_out(size):
    tokens = arguments(1, 20, 1, 1, size, size, torch.float16)
    leaves = [x.requires_grad_() for x in tokens]
    with pytest.raises(NotImplementedError, match="path_attention: .* use impl='torch'"):
        path_attention(*leaves, impl="triton")
    y = path_attention(*leaves).y
    assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), leaves))


FORWARD = [(torch.bfloat16, 160, 200), (torch.bfloat16, 256, 256), (torch.float16, 256, 40)]
FORWARD += [(torch.float32, 128, 100)]


@pytest.mark.parametrize(("dtype", "K", "V"), FORWARD)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("T", [65, 2500])
def test_sizes_without_a_backward_have_a_forward(dtype, K, V, gate, T):
    tokens = arguments(2, T, 2, 1, K, V, dtype, gate=gate)
    got = path_attention(*tokens, impl="triton", return_keys=True)
    wanted = path_attention(*double(tokens), impl="torch", return_keys=True)
    assert error(got.y, wanted.y) < LIMIT[dtype]
    assert error(got.keys, wanted.keys, tokens[1].double().norm()) < LIMIT[dtype]
