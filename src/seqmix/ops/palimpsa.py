"""Palimpsa: a gated linear memory that tracks the precision of every entry.

    M_t    = exp(log_decay_t) M_{t-1}    + w_t (x) k_t        content, in natural parameters
    Ibar_t = exp(log_decay_t) Ibar_{t-1} + beta_t (x) k_t^2   excess precision
    y_t    = scale * (M_t / (prior + Ibar_t)) q_t

arXiv 2602.09075v4, Appendix A.12, equal to Eq. (5) with M = I mu and Ibar = I - prior. `w` is the
gated write v* = beta (.) v. With beta = 0 and prior = 1 this is gated linear attention. O(T K V)
time, 2 K V state a head; beta in M groups of value channels keeps (V + M) K.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from seqmix.ops.check import Arguments
from seqmix.ops.choice import choose, compute_dtype, exactly
from seqmix.ops.packing import each_document, over_documents


class PalimpsaState(NamedTuple):
    """content M [N, H, V, K] and excess precision Ibar [N, H, M, K], in float32 or float64."""

    content: Tensor
    excess: Tensor


class PalimpsaOutput(NamedTuple):
    """y [B, T, H, V]; state or None."""

    y: Tensor
    state: PalimpsaState | None


def palimpsa(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H M"],
    log_decay: Float[Tensor, "B T H"],
    prior: Float[Tensor, "H"] | float = 1.0,
    *,
    scale: float | None = None,
    state: PalimpsaState | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    return_state: bool = False,
    impl: str | None = None,
) -> PalimpsaOutput:
    """Write into and read from a memory that protects what it is sure of.

    w: what is written, already gated. beta: precision of the observation, >= 0, per value channel
    (M = V) or for M groups of V / M channels. log_decay: logarithm of what is kept, <= 0. prior:
    precision of the prior, > 0. scale: K^-1/2 by default. state: the memory before the first
    token, zeros by default; one a document with `cu_seqlens` (B = 1). Raises ValueError for
    arguments that do not fit, NotImplementedError for what `impl` cannot do.
    """
    arguments = Arguments("palimpsa", q)
    arguments.tensor("q", q, "B T H K")
    arguments.tensor("k", k, "B T H K")
    arguments.tensor("w", w, "B T H V")
    _check_beta(arguments, beta)
    arguments.tensor("log_decay", log_decay, "B T H")
    prior = _prior(arguments, prior, q)
    arguments.documents(cu_seqlens)
    content, excess = _state(arguments, state, q)
    arguments.values("beta", beta, low=0.0)
    arguments.values("log_decay", log_decay, high=0.0)
    arguments.values("state.excess", excess, low=0.0)
    scale = arguments.scale(scale, q.shape[-1])
    impl = choose("palimpsa", impl, q)
    run = _reference if impl == "reference" else mix
    y, *final = run(q, k, w, beta, log_decay, prior, content, excess, scale, cu_seqlens, impl)
    return PalimpsaOutput(y, PalimpsaState(*final) if return_state else None)


def _check_beta(arguments: Arguments, beta: Tensor) -> None:
    """beta has V channels or a number M of groups that divides V; binds M."""
    channels = arguments.sizes["V"]
    groups = beta.shape[-1] if isinstance(beta, Tensor) and beta.ndim == 4 else 0
    grouped = 0 < groups < channels and channels % groups == 0
    arguments.tensor("beta", beta, "B T H M" if grouped else "B T H V")
    arguments.sizes["M"] = groups


def _prior(arguments: Arguments, prior: Tensor | float, q: Tensor) -> Tensor:
    if isinstance(prior, Tensor):
        arguments.tensor("prior", prior, "H")
        if arguments.reads_values(prior) and not bool((prior > 0).all()):
            arguments.fail(f"prior must be positive, got {float(prior.detach().min()):g}")
        return prior
    if not isinstance(prior, int | float) or not prior > 0:
        arguments.fail(f"prior must be positive, got {prior!r}")
    return q.new_full((arguments.sizes["H"],), prior, dtype=compute_dtype(q))


def _state(arguments: Arguments, state: tuple | None, q: Tensor) -> tuple[Tensor, Tensor]:
    if state is None:
        n, h, v, k, m = (arguments.sizes[letter] for letter in "NHVKM")
        dtype = compute_dtype(q)
        return q.new_zeros(n, h, v, k, dtype=dtype), q.new_zeros(n, h, m, k, dtype=dtype)
    if not isinstance(state, tuple | list) or len(state) != 2:
        arguments.fail(f"state must be a pair (content, excess), got {type(state).__name__}")
    arguments.tensor("state.content", state[0], "N H V K")
    arguments.tensor("state.excess", state[1], "N H M K")
    return state[0], state[1]


def _reference(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    content: Tensor,
    excess: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    from seqmix.reference import palimpsa

    dtype = compute_dtype(q)
    prior = prior.to(dtype)

    def one(*arguments: Tensor) -> tuple:
        *tokens, content, excess = arguments
        y, *final = palimpsa.palimpsa(*tokens, prior, scale=scale, content=content, excess=excess)
        return (y,), final

    tokens = [x.to(dtype) for x in (q, k, w, beta, log_decay)]
    with exactly(q):
        (y,), final = each_document(one, tokens, [content.to(dtype), excess.to(dtype)], cu_seqlens)
    return y.to(q.dtype), *final


@torch.library.custom_op("seqmix::palimpsa", mutates_args=())
def mix(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    content: Tensor,
    excess: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final content and the final excess precision."""
    from seqmix.chunked import palimpsa

    dtype = compute_dtype(q)
    y = q.new_zeros(w.shape)
    final = [content.to(dtype, copy=True), excess.to(dtype, copy=True)]
    if y.shape[0] * y.shape[1] == 0:
        return y, *final

    def rows(*arguments: Tensor) -> tuple:
        *tokens, content, excess = arguments
        y, *final = palimpsa.forward(*tokens, prior, content, excess, scale)
        return (y,), final, ()

    packed, results = [(x, 0.0) for x in (q, k, w, beta, log_decay)], ((y,), final, ())
    with exactly(q):
        (y,), final, _ = over_documents(rows, packed, [content, excess], cu_seqlens, results)
    return y, *final


@mix.register_fake
def _(q, k, w, beta, log_decay, prior, content, excess, scale, cu_seqlens, impl):
    final = (x.new_empty(x.shape, dtype=compute_dtype(q)) for x in (content, excess))
    return q.new_empty(w.shape), *final


@torch.library.custom_op("seqmix::palimpsa_backward", mutates_args=())
def mix_backward(
    dy: Tensor,
    dcontent: Tensor,
    dexcess: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    content: Tensor,
    excess: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    impl: str,
) -> list[Tensor]:
    """The gradients of q, k, w, beta, log_decay, prior, content and excess."""
    from seqmix.chunked import palimpsa

    dtokens = [x.new_zeros(x.shape) for x in (q, k, w, beta, log_decay)]
    dprior = torch.zeros_like(prior)
    dstate = [dcontent.to(content.dtype, copy=True), dexcess.to(excess.dtype, copy=True)]
    if dy.shape[0] * dy.shape[1] == 0:
        return [*dtokens, dprior, *dstate]

    def rows(dy: Tensor, *arguments: Tensor) -> tuple:
        *inputs, dcontent, dexcess, content, excess = arguments
        *dtokens, dprior, dcontent, dexcess = palimpsa.backward(
            dy, dcontent, dexcess, *inputs, prior, content, excess, scale
        )
        return dtokens, (dcontent, dexcess), (dprior,)

    packed = [(x, 0.0) for x in (dy, q, k, w, beta, log_decay)]
    states, results = [dcontent, dexcess, content, excess], (dtokens, dstate, (dprior,))
    with exactly(q):
        dtokens, dstate, (dprior,) = over_documents(rows, packed, states, cu_seqlens, results)
    return [*dtokens, dprior, *dstate]


@mix_backward.register_fake
def _(dy, dcontent, dexcess, q, k, w, beta, log_decay, prior, content, excess, scale, cu, impl):
    inputs = (q, k, w, beta, log_decay, prior, content, excess)
    return [x.new_empty(x.shape) for x in inputs]


def _save(ctx, inputs: tuple, output: tuple) -> None:
    *tensors, scale, cu_seqlens, impl = inputs
    ctx.save_for_backward(*tensors, cu_seqlens)
    ctx.scale, ctx.impl = scale, impl


def _backward(ctx, dy: Tensor, dcontent: Tensor, dexcess: Tensor) -> tuple:
    *saved, cu_seqlens = ctx.saved_tensors
    gradients = mix_backward(dy, dcontent, dexcess, *saved, ctx.scale, cu_seqlens, ctx.impl)
    return *gradients, None, None, None


mix.register_autograd(_backward, setup_context=_save)
