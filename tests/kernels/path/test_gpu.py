"""PaTH kernels on a GPU: every head size and tile against float64, and bitwise determinism."""

import pytest
import torch

from seqmix.kernels.path.backward import backward
from seqmix.kernels.path.forward import forward
from seqmix.ops import path_attention
from tests.kernels.path.cases import arguments
from tests.kernels.path.test_kernels import LEVELS, check

pytestmark = pytest.mark.gpu


SIZES = {torch.bfloat16: (16, 32, 64, 80, 128), torch.float16: (48, 64, 80, 128)}


@pytest.mark.parametrize(
    ("dtype", "size"), [(dtype, size) for dtype, sizes in SIZES.items() for size in sizes]
)
@pytest.mark.parametrize("gate", [False, True])
def test_every_gradient_of_every_tile(size, dtype, gate):
    for T in (65, 1000):
        check(arguments(1, T, 2, 1, size, size, dtype, gate=gate))
    check(arguments(1, 2500, 2, 2, size, size, dtype, gate=gate), levels=None)


def test_repeated_calls_agree_bitwise():
    tokens = arguments(2, 1000, 4, 2, 64, 64, torch.bfloat16)
    dy = torch.randn_like(tokens[0])
    y, lse = forward(*tokens, 0.125, None)
    wanted = backward(dy, *tokens, y, lse, 0.125, None, levels=LEVELS)
    for _ in range(25):
        again, _ = forward(*tokens, 0.125, None)
        got = backward(dy, *tokens, y, lse, 0.125, None, levels=LEVELS)
        assert torch.equal(again, y)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_compiles_as_one_graph():
    function = torch.compile(path_attention, fullgraph=True)
    for T in (100, 164, 228):
        tokens = arguments(1, T, 2, 2, 64, 64, torch.bfloat16)
        torch.testing.assert_close(function(*tokens).y, path_attention(*tokens).y)


@pytest.mark.parametrize("size", [16, 32, 129])
def test_sizes_that_are_not_served_name_the_way_out(size):
    tokens = arguments(1, 20, 1, 1, size, size, torch.float16)
    with pytest.raises(NotImplementedError, match="path_attention: .* use impl='torch'"):
        path_attention(*tokens, impl="triton")
    assert path_attention(*tokens).y.isfinite().all()
