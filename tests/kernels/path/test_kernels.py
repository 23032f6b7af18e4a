"""PaTH kernels against the definition in float64: outputs and every gradient.

Tolerances: twice the rounding of the stored result and of the operands of products, which for
float16 and bfloat16 is what plain attention in that dtype shows; float32 sums of a few hundred
products err by a few 1e-7.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from seqmix.kernels.path.aligned import aligned_keys
from seqmix.kernels.path.backward import backward
from seqmix.kernels.path.forward import forward
from seqmix.kernels.path.spans import scaled
from seqmix.kernels.path.tiles import Tile, backward_tiles, sizes
from seqmix.ops import path_attention as path_attention_op
from seqmix.reference.path import path_attention
from tests.kernels.path.cases import DEVICE, NAMES, arguments, definition, error

LEVELS = (64, 128, 256)  # small segments: all levels meet in a few hundred tokens
LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def check(tokens, offsets=None, levels=LEVELS, tiles=None):
    q, v = tokens[0], tokens[2]
    scale = q.shape[-1] ** -0.5
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=DEVICE)
    dy = torch.randn(*q.shape[:3], v.shape[3], device=DEVICE).to(q.dtype)
    y, lse = forward(*tokens, scale, cu_seqlens, levels=levels)
    got = backward(dy, *tokens, y, lse, scale, cu_seqlens, tiles, levels)
    want_y, want = definition(tokens, dy, scale, offsets)
    assert error(y, want_y) < LIMIT[q.dtype]
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert error(a, b, floor=0.1) < LIMIT[q.dtype], name
    return y, got


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 200])
def test_any_length(T):
    check(arguments(1, T, 1, 1, 16, 16))


def test_all_levels_meet_with_groups_of_heads_and_a_batch():
    check(arguments(2, 390, 2, 1, 16, 16, gate=False))


@pytest.mark.slow
def test_spans_of_several_segments():
    check(arguments(1, 790, 1, 1, 16, 16), levels=(64, 192, 384))


def test_key_heads_take_turns_in_the_scratch_bitwise():
    tokens = arguments(1, 140, 4, 2, 20, 12)
    dy = torch.randn(1, 140, 4, 12, device=DEVICE)
    y, lse = forward(*tokens, 0.25, None, levels=LEVELS)
    both = backward(dy, *tokens, y, lse, 0.25, None, levels=LEVELS, group=2)
    each = backward(dy, *tokens, y, lse, 0.25, None, levels=LEVELS, group=1)
    assert all(torch.equal(a, b) for a, b in zip(both, each, strict=True))


def test_all_levels_meet_with_a_forget_gate():
    check(arguments(1, 590, 1, 1, 16, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sizes_that_are_no_powers_of_two(dtype):
    check(arguments(1, 140, 2, 1, 20, 12, dtype))


@pytest.mark.parametrize("offsets", [None, [0, 0, 200, 330]])
def test_more_than_128_channels(offsets):
    check(arguments(1, 330, 1, 1, 130, 20), offsets)


def test_documents_are_apart_and_the_tail_is_zero():
    offsets = [0, 0, 3, 200, 201, 201, 410]
    y, gradients = check(arguments(1, 420, 1, 1, 16, 16), offsets)
    for x in (y, *gradients):
        assert not x[:, 410:].any()


@pytest.mark.parametrize("offsets", [None, [0, 70, 330, 390]])
def test_queries_in_two_passes(offsets):
    few = backward_tiles(16, torch.float32, torch.device(DEVICE))
    tiles = replace(few, dq=(Tile(128, 32), Tile(64, 32)))
    check(arguments(1, 390, 2, 1, 16, 16), offsets, tiles=tiles)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_the_ends_of_beta(beta):
    check(arguments(1, 300, 1, 1, 16, 16, beta=beta))


def test_gradients_of_any_size_survive_float16():
    tokens = arguments(1, 100, 1, 1, 16, 16, torch.float16, gate=False)
    dy = torch.randn(1, 100, 1, 16, device=DEVICE).half()
    y, lse = forward(*tokens, 0.25, None)
    for size in (2.0**-14, 2.0**6):
        got = backward(dy * size, *tokens, y, lse, 0.25, None)
        _, want = definition(tokens, dy * size, 0.25)
        assert error(got[0], want[0]) < 4e-3
        assert error(got[4], want[4]) < 4e-3


@pytest.mark.parametrize("offsets", [None, [0, 0, 130, 131, 300]])
def test_keys_are_aligned_to_the_last_token_of_their_document(offsets):
    tokens = arguments(1, 300, 1, 1, 16, 16, gate=False)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=DEVICE)
    got = aligned_keys(tokens[1], tokens[3], tokens[4], cu_seqlens, LEVELS)
    for a, b in zip(offsets[:-1], offsets[1:], strict=True) if offsets else [(0, 300)]:
        part = [None if x is None else x[:, a:b].double() for x in tokens]
        if a < b:
            assert error(got[:, a:b], path_attention(*part, scale=1.0)[1]) < 1e-5


def test_one_graph_holds_the_whole_call():
    function = torch.compile(path_attention_op, fullgraph=True, backend="aot_eager")
    for T in (33, 70):
        tokens = [x.requires_grad_() for x in arguments(1, T, 1, 1, 16, 16)]
        got = function(*tokens, impl="triton").y
        wanted = path_attention_op(*tokens, impl="triton").y
        torch.testing.assert_close(got, wanted)
        pairs = zip(*(torch.autograd.grad(y.sum(), tokens) for y in (got, wanted)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b)


def test_levels_divide_each_other_and_bound_their_tables():
    for length in (1, 2048, 70_000, 1_000_000):
        low, middle, top = sizes(length)
        assert low == 64 and middle % low == 0 and top % middle == 0
        assert length / top <= 32 and top / middle <= 32


@triton.jit
def scaled_kernel(x, out):
    place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    rounded, factor = scaled(tl.load(x + place), tl.float16)
    tl.store(out + place, rounded.to(tl.float32) * factor)


@pytest.mark.parametrize("size", [1e-45, 1e-41, 1e-38, 1e-25, 1.0, 1e30])
def test_gradients_may_fade_to_nothing_on_their_way(size):
    """Through many transitions, behind queries without a loss: what is tiny may become 0."""
    x = torch.randn(16, 16, device=DEVICE).clamp(-2, 2) * size
    out = torch.empty_like(x)
    scaled_kernel[(1,)](x, out)
    torch.testing.assert_close(out, x, rtol=1e-3, atol=1e-3 * max(size, 1e-29))
