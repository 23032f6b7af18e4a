"""PaTH attention: softmax attention through data-dependent Householder transitions.

    H_t      = I - beta_t w_t w_t^T                              |w_t| = 1, beta_t in [0, 2]
    logit_ij = scale * k_j^T H_{j+1} ... H_i q_i + sum_{s=j+1..i} log_forget_s         j <= i
    y_i      = sum_{j <= i} softmax_j(logit_ij) v_j

arXiv 2505.16381v2, Sec. 2.2. The forget gate of FoX is added after the scale, as in the paper.
Query head h reads key head h // (H / G). O(T^2 K) time, O(T) memory.
"""

from collections.abc import Iterable
from typing import NamedTuple, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from seqmix.ops.check import Arguments
from seqmix.ops.choice import choose, compute_dtype, exactly, on_device
from seqmix.ops.packing import each_document, over_documents


class PathOutput(NamedTuple):
    """y [B, T, H, V]; keys [B, T, G, K] aligned to the last token of their document, or None."""

    y: Tensor
    keys: Tensor | None


def path_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    w: Float[Tensor, "B T G K"],
    beta: Float[Tensor, "B T G"],
    log_forget: Float[Tensor, "B T H"] | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    return_keys: bool = False,
    impl: str | None = None,
) -> PathOutput:
    """Attend through the accumulated Householder transitions between key and query.

    w: unit length, or zero for no transition; it is not normalised here.
    beta: in [0, 2]; 0 keeps, 1 erases, 2 reflects the component along w.
    log_forget: logarithm of the forget gate, <= 0.
    scale: factor of the logits, K^-1/2 by default.
    cu_seqlens: offsets of packed documents (B = 1); no document sees another.
    return_keys: also return the keys moved to the last token, the start of a decoding cache.
    Raises ValueError for arguments that do not fit, NotImplementedError for what `impl` cannot do.
    """
    arguments = Arguments("path_attention", q)
    arguments.tensor("q", q, "B T H K")
    arguments.tensor("k", k, "B T G K")
    arguments.tensor("v", v, "B T G V")
    arguments.tensor("w", w, "B T G K")
    arguments.tensor("beta", beta, "B T G")
    if log_forget is not None:
        arguments.tensor("log_forget", log_forget, "B T H")
    arguments.divides("G", "H", "the heads of q must be a multiple of the heads of k")
    arguments.documents(cu_seqlens)
    arguments.values("beta", beta, low=0.0, high=2.0)
    arguments.values("log_forget", log_forget, high=0.0)
    arguments.unit("w", w, dim=-1, or_zero=True)
    scale = arguments.scale(scale, q.shape[-1])
    tensors = (q, k, v, w, beta, log_forget)
    impl = resolve(impl, q, v, w, torch.is_grad_enabled() and any(map(_differentiable, tensors)))
    if impl == "reference":
        y, keys = _reference(q, k, v, w, beta, log_forget, scale, cu_seqlens)
    else:
        y, keys, _ = attend(q, k, v, w, beta, log_forget, scale, cu_seqlens, return_keys, impl)
    return PathOutput(y, keys if return_keys else None)


def _differentiable(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    log_forget: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from seqmix.reference import path

    def one(*tokens: Tensor) -> tuple:
        return path.path_attention(*tokens, scale=scale), ()

    dtype = compute_dtype(q)
    tokens = [x if x is None else x.to(dtype) for x in (q, k, v, w, beta, log_forget)]
    with exactly(q):
        (y, keys), _ = each_document(one, tokens, [], cu_seqlens)
    return y.to(q.dtype), keys.to(q.dtype)


@torch.library.custom_op("seqmix::path_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    return_keys: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, keys (of no size unless asked for) and the log denominator of each softmax [B, T, H].

    Without w and beta this is plain causal attention, with the forget gate if there is one.
    """
    from seqmix.chunked import path

    tokens = (q, k, v, w, beta, log_forget)
    if impl == "triton" and q.numel():
        return _attend_on_gpu(*tokens, scale, cu_seqlens, return_keys)
    y, keys, lse = (x.zero_() for x in _outputs(*tokens, scale, cu_seqlens, return_keys, impl))
    if y.shape[0] * y.shape[1] == 0:
        return y, keys, lse

    def rows(*rows: Tensor | None) -> tuple:
        y, lse, keys = path.forward(*rows, scale, return_keys=return_keys)
        return (y, lse, *([keys] if return_keys else [])), (), ()

    results = (y, lse, *([keys] if return_keys else [])), (), ()
    with exactly(q):
        packed = [(x, 0.0) for x in tokens]
        (y, lse, *aligned), _, _ = over_documents(rows, packed, [], cu_seqlens, results)
    return y, *(aligned or [keys]), lse


@attend.register_fake
def _outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    return_keys: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    y = q.new_empty(*q.shape[:3], v.shape[3])
    keys = q.new_empty(k.shape if return_keys else (0,))
    return y, keys, q.new_empty(q.shape[:3], dtype=compute_dtype(q))


@torch.library.custom_op("seqmix::path_attention_backward", mutates_args=())
def attend_backward(
    dy: Tensor,
    dkeys: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    y: Tensor,
    lse: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    impl: str,
) -> list[Tensor]:
    """The gradients of those of q, k, v, w, beta and log_forget that are given."""
    from seqmix.chunked import path

    if impl == "triton" and q.numel():
        found = _backward_on_gpu(dy, q, k, v, w, beta, log_forget, y, lse, scale, cu_seqlens)
        if dkeys is None:
            return found
        rest = (dy.new_zeros(dy.shape), dkeys, q, k, v, w, beta, log_forget, y, lse)
        rest = attend_backward(*rest, scale, cu_seqlens, "torch")
        return [a + b for a, b in zip(found, rest, strict=True)]
    gradients = [x.new_zeros(x.shape) for x in (q, k, v, w, beta, log_forget) if x is not None]
    if y.shape[0] * y.shape[1] == 0:
        return gradients

    def rows(*rows: Tensor | None) -> tuple:
        found = path.backward(*rows, scale)
        return [x for x in found if x is not None], (), ()

    packed = [(x, 0.0) for x in (dy, dkeys, q, k, v, w, beta, log_forget, y, lse)]
    with exactly(q):
        gradients, _, _ = over_documents(rows, packed, [], cu_seqlens, (gradients, (), ()))
    return list(gradients)


@attend_backward.register_fake
def _(dy, dkeys, q, k, v, w, beta, log_forget, y, lse, scale, cu_seqlens, impl):
    return [x.new_empty(x.shape) for x in (q, k, v, w, beta, log_forget) if x is not None]


def contiguous(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """What kernels take, who know no strides."""
    return [x if x is None else x.contiguous() for x in tensors]


def _alike(q: Tensor, *tokens: Tensor | None) -> list[Tensor | None]:
    """Contiguous [B, T, heads, size], of q's dtype where they have a size."""
    return contiguous(x if x is None or x.ndim == 3 else x.to(q.dtype) for x in (q, *tokens))


def _attend_on_gpu(q, k, v, w, beta, log_forget, scale, cu_seqlens, return_keys) -> tuple:
    from seqmix.kernels.path.aligned import aligned_keys
    from seqmix.kernels.path.forward import forward

    if not _has_kernels(q, v, w, False):
        _refuse(q, v, w)
    q, k, v, w, beta, log_forget = _alike(q, k, v, w, beta, log_forget)
    with exactly(q), on_device(q):
        y, lse = forward(q, k, v, w, beta, log_forget, scale, cu_seqlens)
        keys = aligned_keys(k, w, beta, cu_seqlens) if return_keys else q.new_empty(0)
    return y, keys, lse


def _backward_on_gpu(dy, q, k, v, w, beta, log_forget, y, lse, scale, cu_seqlens) -> list[Tensor]:
    from seqmix.kernels.path.backward import backward

    tensors = [x for x in (q, k, v, w, beta, log_forget) if x is not None]
    tokens = _alike(q, k, v, w, beta, log_forget, y, lse)
    with exactly(q), on_device(q):
        found = backward(dy.to(q.dtype).contiguous(), *tokens, scale, cu_seqlens)
    found = [x for x in found if x is not None]
    return [x.to(like.dtype) for x, like in zip(found, tensors, strict=True)]


class Sizes(NamedTuple):
    """First and last head size K and V that kernels serve, without and with gradients."""

    forward: tuple[int, int]
    backward: tuple[int, int]


# What fits into shared memory and was compared with float64. Below 33, float16 and float32 are left
# out: compiled for sm_90 by Triton 3.6, dw and dbeta come out wrong in float16 there, and
# bfloat16, the same code, is right.
SERVED = {
    torch.bfloat16: Sizes((1, 256), (1, 128)),
    torch.float16: Sizes((33, 256), (33, 128)),
    torch.float32: Sizes((33, 128), (33, 64)),
}
DECODED = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}  # by ops/path_cache.py


def served() -> list[dict[str, str]]:
    """The head sizes that compiled kernels serve, one row a dtype; elsewhere "torch" runs."""
    return [
        {
            "dtype": _name(dtype),
            "forward": "{} to {}".format(*sizes.forward),
            "with gradients": "{} to {}".format(*sizes.backward),
            "decoding": f"1 to {DECODED[dtype]}",
        }
        for dtype, sizes in SERVED.items()
    ]


def resolve(
    impl: str | None, q: Tensor, v: Tensor, w: Tensor | None, differentiated: bool = False
) -> str:
    """The implementation to run; by default "torch" where no kernels serve the sizes."""
    served = _has_kernels(q, v, w, differentiated)
    impl = choose("path_attention", impl or (None if served else "torch"), q)
    if impl == "triton" and not served:
        _refuse(q, v, w)
    return impl


def _has_kernels(q: Tensor, v: Tensor, w: Tensor | None, backward: bool) -> bool:
    """Whether the Triton kernels serve these arguments."""
    if w is None or q.dtype not in SERVED:
        return False
    if q.device.type == "cpu":  # Triton's interpreter
        low, high = 1, 256
    else:
        low, high = SERVED[q.dtype][backward]
    return low <= min(q.shape[3], v.shape[3]) and max(q.shape[3], v.shape[3]) <= high


def _refuse(q: Tensor, v: Tensor, w: Tensor | None) -> NoReturn:
    sizes = (
        f"{row['forward']} ({row['with gradients']} with gradients) in {row['dtype']}"
        for row in served()
    )
    raise NotImplementedError(
        f"path_attention: impl='triton' takes head sizes {', '.join(sizes)}, got {q.shape[3]} and "
        f"{v.shape[3]} in {_name(q.dtype)}{'' if w is not None else ' without w'}; "
        "use impl='torch'"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _save(ctx, inputs: tuple, output: tuple) -> None:
    q, k, v, w, beta, log_forget, scale, cu_seqlens, return_keys, impl = inputs
    y, _, lse = output
    ctx.save_for_backward(q, k, v, w, beta, log_forget, y, lse, cu_seqlens)
    ctx.scale, ctx.return_keys, ctx.impl = scale, return_keys, impl
    ctx.set_materialize_grads(False)


def _backward(ctx, dy: Tensor | None, dkeys: Tensor | None, _: Tensor | None) -> tuple:
    *saved, cu_seqlens = ctx.saved_tensors
    dy = saved[6].new_zeros(saved[6].shape) if dy is None else dy
    gradients = iter(
        attend_backward(
            dy, dkeys if ctx.return_keys else None, *saved, ctx.scale, cu_seqlens, ctx.impl
        )
    )
    tokens = (None if x is None else next(gradients) for x in saved[:6])
    return *tokens, None, None, None, None


attend.register_autograd(_backward, setup_context=_save)
