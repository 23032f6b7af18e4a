"""Causal softmax attention, with the forget gate of FoX or the slopes of ALiBi where wanted.

    logit_ij = scale * k_j . q_i + sum_{s=j+1..i} log_forget_s              j <= i
    y_i      = sum_{j <= i} softmax_j(logit_ij) v_j

FoX: arXiv 2503.02130. ALiBi (arXiv 2108.12409) is the constant gate log_forget = -slope. Without
a gate this is PyTorch's scaled_dot_product_attention.
"""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seqmix.ops.check import Arguments
from seqmix.ops.choice import choose, compute_dtype, exactly
from seqmix.ops.packing import each_document
from seqmix.ops.path import attend


class AttentionOutput(NamedTuple):
    """y [B, T, H, V]."""

    y: Tensor


def attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    log_forget: Float[Tensor, "B T H"] | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    impl: str | None = None,
) -> AttentionOutput:
    """Attend causally; query head h reads key head h // (H / G).

    log_forget: logarithm of the forget gate, <= 0, added to the logits after the scale.
    scale: factor of the logits, K^-1/2 by default.
    cu_seqlens: offsets of packed documents (B = 1); no document sees another.
    Raises ValueError for arguments that do not fit, NotImplementedError for what `impl` cannot do.
    """
    arguments = Arguments("attention", q)
    arguments.tensor("q", q, "B T H K")
    arguments.tensor("k", k, "B T G K")
    arguments.tensor("v", v, "B T G V")
    if log_forget is not None:
        arguments.tensor("log_forget", log_forget, "B T H")
    arguments.divides("G", "H", "the heads of q must be a multiple of the heads of k")
    arguments.documents(cu_seqlens)
    arguments.values("log_forget", log_forget, high=0.0)
    scale = arguments.scale(scale, q.shape[-1])
    impl = choose("attention", impl, q)
    if impl == "reference":
        return AttentionOutput(_reference(q, k, v, log_forget, scale, cu_seqlens))
    if log_forget is None and cu_seqlens is None:
        q, k, v = (x.to(q.dtype).transpose(1, 2) for x in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return AttentionOutput(y.transpose(1, 2))
    y, _, _ = attend(q, k, v, None, None, log_forget, scale, cu_seqlens, False, impl)
    return AttentionOutput(y)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
) -> Tensor:
    from seqmix.reference import attention

    def one(*tokens: Tensor) -> tuple:
        return (attention.attention(*tokens, scale=scale),), ()

    dtype = compute_dtype(q)
    tokens = [x if x is None else x.to(dtype) for x in (q, k, v, log_forget)]
    with exactly(q):
        (y,), _ = each_document(one, tokens, [], cu_seqlens)
    return y.to(q.dtype)
