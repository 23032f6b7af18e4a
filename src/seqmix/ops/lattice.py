"""Lattice: orthogonal writes into a fixed set of unit slots.

    DEC: h = S k - v, c = k        DOT: h = -v, c = k        ENC: h = v, c = S^T v - k
    a = S^T h                      p_i = |h|^2 - a_i^2
    b_i = 1 / sqrt(mu^2 + gamma^2 c_i^2 p_i)                 khat = gamma b (.) c
    S_t = S_{t-1} (.) 1 (mu b + a (.) khat)^T - h khat^T     y_t = S_t q_t

S in R^{V x S} has unit columns.

arXiv 2504.05646v2, Eqs. (11), (14)-(17). One token is a gradient step on the slot-normalised
loss, a decay and a retraction to the sphere. chunk_size > 1 computes h, c, a and b of a chunk
from the state at its start: another function, which `sweeps` brings back to the exact rule. O(T V
S) time, V S state a head.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from seqmix.ops.check import Arguments
from seqmix.ops.choice import choose, compute_dtype, exactly
from seqmix.ops.packing import each_document, over_documents

OBJECTIVES = ("dec", "dot", "enc")
FORMS = ("gated", "frozen")
NORMS = ("token", "chunk")


class LatticeOutput(NamedTuple):
    """y [B, T, H, V]; state [N, H, V, S] with unit slots, or None."""

    y: Tensor
    state: Tensor | None


def lattice(
    q: Float[Tensor, "B T H S"],
    k: Float[Tensor, "B T H S"],
    v: Float[Tensor, "B T H V"],
    gamma: Float[Tensor, "B T H"],
    mu: Float[Tensor, "B T H"] | None = None,
    *,
    state: Float[Tensor, "N H V S"],
    objective: str = "dec",
    chunk_size: int = 1,
    form: str = "gated",
    norm: str = "token",
    sweeps: int = 1,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    return_state: bool = False,
    impl: str | None = None,
) -> LatticeOutput:
    """Write into unit slots along directions orthogonal to them, and read.

    gamma: size of the inner gradient step. mu: what is kept of the old state, 1 by default.
    state: the slots before the first token, unit columns; one a document with `cu_seqlens` (B = 1).
    chunk_size: tokens a chunk; 1 is the exact rule. form: "gated" (Eq. 17) or "frozen" (Eq. 15)
    recurrence inside a chunk. norm: normalise the slots after each "token" or "chunk". sweeps:
    repetitions that recompute a chunk from the states of the previous sweep; `sweeps =
    chunk_size` is exact (form "gated" and norm "token" only). Raises ValueError for arguments
    that do not fit, NotImplementedError for what `impl` cannot do.
    """
    arguments = Arguments("lattice", q)
    arguments.tensor("q", q, "B T H S")
    arguments.tensor("k", k, "B T H S")
    arguments.tensor("v", v, "B T H V")
    arguments.tensor("gamma", gamma, "B T H")
    if mu is not None:
        arguments.tensor("mu", mu, "B T H")
    arguments.documents(cu_seqlens)
    arguments.tensor("state", state, "N H V S")
    check_rule(arguments, objective, chunk_size, form, norm, sweeps)
    arguments.unit("state", state, dim=-2)
    impl = choose("lattice", impl, q)
    run = _reference if impl == "reference" else mix
    rule = objective, chunk_size, form, norm, sweeps
    y, final = run(q, k, v, gamma, mu, state, *rule, cu_seqlens, impl)
    return LatticeOutput(y, final if return_state else None)


def check_rule(
    arguments: Arguments, objective: str, chunk_size: int, form: str, norm: str, sweeps: int
) -> None:
    """Check the options of the rule; the layer calls this too."""
    arguments.one_of("objective", objective, OBJECTIVES)
    arguments.positive("chunk_size", chunk_size)
    arguments.one_of("form", form, FORMS)
    arguments.one_of("norm", norm, NORMS)
    arguments.positive("sweeps", sweeps)
    if sweeps > 1 and (form, norm) != ("gated", "token"):
        arguments.fail(f"sweeps > 1 needs form 'gated' and norm 'token', got {form!r} and {norm!r}")


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    mu: Tensor | None,
    state: Tensor,
    objective: str,
    chunk_size: int,
    form: str,
    norm: str,
    sweeps: int,
    cu_seqlens: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    from seqmix.reference import lattice

    def one(*arguments: Tensor | None) -> tuple:
        *tokens, state = arguments
        y, final = lattice.lattice(
            *tokens,
            state=state,
            objective=objective,
            chunk_size=chunk_size,
            form=form,
            norm=norm,
            sweeps=sweeps,
        )
        return (y,), (final,)

    dtype = compute_dtype(q)
    tokens = [x if x is None else x.to(dtype) for x in (q, k, v, gamma, mu)]
    with exactly(q):
        (y,), (final,) = each_document(one, tokens, [state.to(dtype)], cu_seqlens)
    return y.to(q.dtype), final


@torch.library.custom_op("seqmix::lattice", mutates_args=())
def mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    mu: Tensor | None,
    state: Tensor,
    objective: str,
    chunk_size: int,
    form: str,
    norm: str,
    sweeps: int,
    cu_seqlens: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """y and the final slots."""
    from seqmix.chunked import lattice

    y, final = q.new_zeros(v.shape), state.to(compute_dtype(q), copy=True)
    if y.shape[0] * y.shape[1] == 0:
        return y, final

    def rows(*arguments: Tensor | None) -> tuple:
        y, final = lattice.forward(*arguments, objective, chunk_size, form, norm, sweeps)
        return (y,), (final,), ()

    packed, results = _packed(q, k, v, gamma, mu), ((y,), (final,), ())
    with exactly(q):
        (y,), (final,), _ = over_documents(rows, packed, [state], cu_seqlens, results)
    return y, final


@mix.register_fake
def _(q, k, v, gamma, mu, state, objective, chunk_size, form, norm, sweeps, cu_seqlens, impl):
    return q.new_empty(v.shape), state.new_empty(state.shape, dtype=compute_dtype(q))


@torch.library.custom_op("seqmix::lattice_backward", mutates_args=())
def mix_backward(
    dy: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    mu: Tensor | None,
    state: Tensor,
    objective: str,
    chunk_size: int,
    form: str,
    norm: str,
    sweeps: int,
    cu_seqlens: Tensor | None,
    impl: str,
) -> list[Tensor]:
    """The gradients of q, k, v, gamma, mu if given, and state."""
    from seqmix.chunked import lattice

    dtokens = [x.new_zeros(x.shape) for x in (q, k, v, gamma, mu) if x is not None]
    dstate = dfinal.to(state.dtype, copy=True)
    if dy.shape[0] * dy.shape[1] == 0:
        return [*dtokens, dstate]

    def rows(dy: Tensor, *arguments: Tensor | None) -> tuple:
        *tokens, dfinal, state = arguments
        *dtokens, dstate = lattice.backward(
            dy, dfinal, *tokens, state, objective, chunk_size, form, norm, sweeps
        )
        return [x for x in dtokens if x is not None], (dstate,), ()

    packed, results = [(dy, 0.0), *_packed(q, k, v, gamma, mu)], (dtokens, (dstate,), ())
    with exactly(q):
        dtokens, (dstate,), _ = over_documents(rows, packed, [dfinal, state], cu_seqlens, results)
    return [*dtokens, dstate]


@mix_backward.register_fake
def _(dy, dfinal, q, k, v, gamma, mu, state, objective, chunk_size, form, norm, sweeps, cu, impl):
    return [x.new_empty(x.shape) for x in (q, k, v, gamma, mu, state) if x is not None]


def _packed(*tokens: Tensor | None) -> list[tuple[Tensor | None, float]]:
    """q, k, v, gamma and mu with their values for a token that changes nothing."""
    return list(zip(tokens, (0.0, 0.0, 0.0, 0.0, 1.0), strict=True))


def _save(ctx, inputs: tuple, output: tuple) -> None:
    q, k, v, gamma, mu, state, *rule, cu_seqlens, impl = inputs
    ctx.save_for_backward(q, k, v, gamma, mu, state, cu_seqlens)
    ctx.rule, ctx.impl = rule, impl


def _backward(ctx, dy: Tensor, dfinal: Tensor) -> tuple:
    *saved, cu_seqlens = ctx.saved_tensors
    gradients = mix_backward(dy, dfinal, *saved, *ctx.rule, cu_seqlens, ctx.impl)
    if saved[4] is None:
        gradients = [*gradients[:4], None, gradients[4]]
    return *gradients, *(None for _ in ctx.rule), None, None


mix.register_autograd(_backward, setup_context=_save)
