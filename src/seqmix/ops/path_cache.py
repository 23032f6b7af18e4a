"""The decoding cache of PaTH attention: what reads it and what moves its boundary.

chunked/path_cache.py has the mathematics and serves every device. On a GPU kernels take over where
they serve the sizes and no gradient is asked for; they have none.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqmix.chunked import path_cache
from seqmix.chunked.path_cache import Folded, Pending
from seqmix.ops.choice import choose, on_device
from seqmix.ops.path import DECODED, attend, contiguous, resolve


class Solution(NamedTuple):
    """Of the pending tokens, float32; math in kernels/path/step.py."""

    moves: Tensor  # N P G K     U W
    corner: Tensor  # N P G 64   U slower(W K^T), valid below the diagonal


def on_kernels(q: Tensor, values: Tensor, impl: str | None) -> bool:
    """Whether the kernels decode for queries of this kind; `impl` as in path_attention."""
    largest = max(q.shape[-1], values.shape[-1])
    served = largest <= DECODED.get(q.dtype, 0) and values.dtype == q.dtype
    if choose("path_attention", impl, q) != "triton" or not served:
        return False
    return not (torch.is_grad_enabled() and (q.requires_grad or values.requires_grad))


def extend(
    q: Tensor, first: Tensor, pending: Pending, folded: Folded, *, scale: float
) -> tuple[Tensor, Solution]:
    """`chunked.path_cache.extend` on kernels, for up to 64 pending tokens; and their solution."""
    y, *solution = _decode(q, first, *pending, *folded, scale)
    return y, Solution(*solution)


def step(
    q: Tensor,
    new: Sequence[Tensor | None],
    count: Tensor,
    old: Sequence[Tensor | None],
    solution: Solution,
    folded: Folded,
    *,
    scale: float,
) -> tuple[Tensor, list[Tensor | None], Solution]:
    """One new token behind count[n] pending ones: y, the pending tokens with it, their solution.

    new, old: k, v, w, conv, beta, log_forget; conv [N, any + P, G K] is carried along.
    """
    y, *grown = _step(q, list(new), count, [*old, *solution], *folded, scale)
    if old[-1] is None:
        grown.insert(5, None)
    return y, grown[:6], Solution(*grown[6:])


def steps(q: Tensor, pending: Tensor) -> bool:
    """Whether `step` serves queries [N, T, H, K] behind pending keys [N, P, G, K]."""
    return q.shape[1] == 1 and q.shape[2] < 64 * pending.shape[2] and pending.shape[1] < 64


def fold(
    keys: Tensor, k: Tensor, w: Tensor, beta: Tensor, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """`chunked.path_cache.fold`, on kernels where they serve it."""
    grad = torch.is_grad_enabled() and (keys.requires_grad or k.requires_grad)
    if grad or not k.numel() or not on_kernels(keys, keys, impl):
        return path_cache.fold(keys, k, w, beta)
    moved, new = _fold(keys, k, w, beta)
    return moved, new


def prefill(
    q: Tensor, tokens: Pending, folded: Folded, *, scale: float, impl: str | None = None
) -> Tensor:
    """Many new tokens over themselves and over a cache without pending ones. No gradient.

    q: [N, T, H, K]; tokens: k and w in any dtype here. O(T (F + T) K) a head, by kernels.
    """
    k, v, w, beta, log_forget = tokens
    impl = resolve(impl, q, v, w)
    y, _, lse = attend(q, k, v, w, beta, log_forget, scale, None, False, impl)
    moved = path_cache.arrive(q, w.float(), beta) * scale
    behind = None if log_forget is None else log_forget.cumsum(1)
    return _read_on(y, lse, moved, behind, *folded)


@torch.library.custom_op("seqmix::path_decode", mutates_args=())
def _decode(
    q: Tensor,
    first: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    log_forget: Tensor | None,
    keys: Tensor,
    values: Tensor,
    decay: Tensor | None,
    length: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from seqmix.kernels.path.decode import decode

    tokens = (q, first, k, v, w, beta, log_forget, keys, values, decay, length)
    if not q.numel():
        return _decode_outputs(*tokens, scale)
    with on_device(q):
        return decode(*contiguous(tokens), scale)


@_decode.register_fake
def _decode_outputs(q, first, k, v, w, beta, log_forget, keys, values, decay, length, scale):
    moves = k.new_empty(k.shape, dtype=torch.float32)
    corner = moves.new_empty(*k.shape[:3], 64)
    return q.new_empty(*q.shape[:3], v.shape[3]), moves, corner


@torch.library.custom_op("seqmix::path_decode_step", mutates_args=())
def _step(
    q: Tensor,
    new: Sequence[Tensor | None],
    count: Tensor,
    old: Sequence[Tensor | None],
    keys: Tensor,
    values: Tensor,
    decay: Tensor | None,
    length: Tensor,
    scale: float,
) -> list[Tensor]:
    from seqmix.kernels.path.step import step

    if not q.numel():
        return _step_outputs(q, new, count, old, keys, values, decay, length, scale)
    q, keys, values, decay, length, count = contiguous([q, keys, values, decay, length, count])
    with on_device(q):
        cache = (keys, values, decay, length)
        y, grown = step(q, contiguous(new), count, contiguous(old), *cache, scale)
    return [y, *(x for x in grown if x is not None)]


@_step.register_fake
def _step_outputs(q, new, count, old, keys, values, decay, length, scale):
    grown = [x.new_empty(len(x), x.shape[1] + 1, *x.shape[2:]) for x in old if x is not None]
    return [q.new_empty(*q.shape[:3], values.shape[3]), *grown]


@torch.library.custom_op("seqmix::path_fold", mutates_args=())
def _fold(keys: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    from seqmix.kernels.path.aligned import fold

    with on_device(keys):
        return fold(*contiguous([keys, k, w, beta]))


@_fold.register_fake
def _(keys, k, w, beta):
    return keys.new_empty(keys.shape), keys.new_empty(k.shape)


@torch.library.custom_op("seqmix::path_read_on", mutates_args=())
def _read_on(
    y: Tensor,
    lse: Tensor,
    moved: Tensor,
    behind: Tensor | None,
    keys: Tensor,
    values: Tensor,
    decay: Tensor | None,
    length: Tensor,
) -> Tensor:
    from seqmix.kernels.path.decode import read_on

    with on_device(y):
        return read_on(*contiguous([y, lse, moved, behind, keys, values, decay, length]))


@_read_on.register_fake
def _(y, lse, moved, behind, keys, values, decay, length):
    return y.new_empty(y.shape)
