"""Gated linear attention with one decay per head and token: the memory of Mamba2 and RetNet.

    S_t = exp(log_decay_t) S_{t-1} + w_t (x) k_t     y_t = scale * S_t q_t     S in R^{V x K}

arXiv 2312.06635 and 2405.21060. `palimpsa` with beta = 0 and prior = 1 is this function of (q, k,
w). O(T K V) time, O(K V) state.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from seqmix.ops.check import Arguments
from seqmix.ops.choice import choose, compute_dtype, exactly
from seqmix.ops.packing import each_document, over_documents


class LinearOutput(NamedTuple):
    """y [B, T, H, V]; state [N, H, V, K] or None."""

    y: Tensor
    state: Tensor | None


def gated_linear_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H"],
    *,
    scale: float | None = None,
    state: Float[Tensor, "N H V K"] | None = None,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    return_state: bool = False,
    impl: str | None = None,
) -> LinearOutput:
    """Read a linear memory that decays and is written at every token.

    w: what is written. log_decay: logarithm of what is kept, <= 0. scale: K^-1/2 by default.
    state: the memory before the first token, zeros by default; one a document with `cu_seqlens`
    (B = 1). Raises ValueError for arguments that do not fit, NotImplementedError for what `impl`
    cannot do.
    """
    arguments = Arguments("gated_linear_attention", q)
    arguments.tensor("q", q, "B T H K")
    arguments.tensor("k", k, "B T H K")
    arguments.tensor("w", w, "B T H V")
    arguments.tensor("log_decay", log_decay, "B T H")
    arguments.documents(cu_seqlens)
    if state is not None:
        arguments.tensor("state", state, "N H V K")
    arguments.values("log_decay", log_decay, high=0.0)
    scale = arguments.scale(scale, q.shape[-1])
    impl = choose("gated_linear_attention", impl, q)
    if state is None:
        sizes = [arguments.sizes[letter] for letter in "NHVK"]
        state = q.new_zeros(sizes, dtype=compute_dtype(q))
    run = _reference if impl == "reference" else mix
    y, final = run(q, k, w, log_decay, state, scale, cu_seqlens, impl)
    return LinearOutput(y, final if return_state else None)


def _reference(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    log_decay: Tensor,
    state: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    from seqmix.reference import linear

    def one(q: Tensor, k: Tensor, w: Tensor, log_decay: Tensor, state: Tensor) -> tuple:
        y, final = linear.gated_linear_attention(q, k, w, log_decay, scale=scale, state=state)
        return (y,), (final,)

    dtype = compute_dtype(q)
    with exactly(q):
        tokens = [x.to(dtype) for x in (q, k, w, log_decay)]
        (y,), (final,) = each_document(one, tokens, [state.to(dtype)], cu_seqlens)
    return y.to(q.dtype), final


@torch.library.custom_op("seqmix::gated_linear_attention", mutates_args=())
def mix(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    log_decay: Tensor,
    state: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """y and the final state."""
    from seqmix.chunked import linear

    dtype = compute_dtype(q)
    y, final = q.new_zeros(w.shape), state.to(dtype, copy=True)
    if y.shape[0] * y.shape[1] == 0:
        return y, final

    def rows(q: Tensor, k: Tensor, w: Tensor, log_decay: Tensor, state: Tensor) -> tuple:
        y, final = linear.forward(q, k, w, log_decay, state, scale)
        return (y,), (final,), ()

    packed, results = [(x, 0.0) for x in (q, k, w, log_decay)], ((y,), (final,), ())
    with exactly(q):
        (y,), (final,), _ = over_documents(rows, packed, [state], cu_seqlens, results)
    return y, final


@mix.register_fake
def _(q, k, w, log_decay, state, scale, cu_seqlens, impl):
    return q.new_empty(w.shape), state.new_empty(state.shape, dtype=compute_dtype(q))


@torch.library.custom_op("seqmix::gated_linear_attention_backward", mutates_args=())
def mix_backward(
    dy: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    log_decay: Tensor,
    state: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    impl: str,
) -> list[Tensor]:
    """The gradients of q, k, w, log_decay and state."""
    from seqmix.chunked import linear

    dtokens = [x.new_zeros(x.shape) for x in (q, k, w, log_decay)]
    dstate = dfinal.to(state.dtype, copy=True)
    if dy.shape[0] * dy.shape[1] == 0:
        return [*dtokens, dstate]

    def rows(dy: Tensor, *arguments: Tensor) -> tuple:
        *inputs, dfinal, state = arguments
        *dtokens, dstate = linear.backward(dy, dfinal, *inputs, state, scale)
        return dtokens, (dstate,), ()

    packed, results = [(x, 0.0) for x in (dy, q, k, w, log_decay)], (dtokens, (dstate,), ())
    with exactly(q):
        dtokens, (dstate,), _ = over_documents(rows, packed, [dfinal, state], cu_seqlens, results)
    return [*dtokens, dstate]


@mix_backward.register_fake
def _(dy, dfinal, q, k, w, log_decay, state, scale, cu_seqlens, impl):
    return [x.new_empty(x.shape) for x in (q, k, w, log_decay, state)]


def _save(ctx, inputs: tuple, output: tuple) -> None:
    q, k, w, log_decay, state, scale, cu_seqlens, impl = inputs
    ctx.save_for_backward(q, k, w, log_decay, state, cu_seqlens)
    ctx.scale, ctx.impl = scale, impl


def _backward(ctx, dy: Tensor, dfinal: Tensor) -> tuple:
    *saved, cu_seqlens = ctx.saved_tensors
    return *mix_backward(dy, dfinal, *saved, ctx.scale, cu_seqlens, ctx.impl), None, None, None


mix.register_autograd(_backward, setup_context=_save)
