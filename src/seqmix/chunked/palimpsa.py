"""Palimpsa in chunks of tokens: exact, any device, explicit backward, memory linear in T.

    M_t = alpha_t M_{t-1} + w_t (x) k_t        Ibar_t = alpha_t Ibar_{t-1} + beta_t (x) k_t^2
    y_t = scale * (M_t / (prior + Ibar_t)) q_t

The readout divides element by element, so every token's states are needed, but only C tokens' at a
time: with decay_ts = alpha_{s+1} ... alpha_t, all states of a chunk are one matrix product

    M = decay @ [M_start; w (x) k]             Ibar = decay @ [Ibar_start; beta (x) k^2]

and their cotangents, P of M and R of Ibar, are the transposed one. With r = 1 / (prior + Ibar),
mu = M r and g_t = scale * dy_t (x) q_t:

    P = decay^T @ (g r)          R = decay^T @ (-g mu r)         (what follows joins the last row)
    dq = dy^T mu     dw = P k     dbeta = R k^2     dk = P^T w + 2 k (R^T beta)
    dlog_decay_t = alpha_t (<P_t, M_{t-1}> + <R_t, Ibar_{t-1}>)         dprior = -sum g mu r

Nothing is divided by alpha and no exponent is positive, so log_decay may be anything from 0 to
-inf. Backward keeps the T / C states at chunk starts, of one tile of heads at a time.
Cost O(T C V K) per head. beta shared by all value channels (M = 1) has no elementwise readout: it
is gated linear attention with query q / (prior + n), n_t = alpha_t n_{t-1} + beta_t k_t^2.
Dtypes and rows are those of `seqmix.chunked.linear`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from seqmix.chunked import linear
from seqmix.chunked.linear import (
    chunks,
    compute_dtype,
    decay_matrix,
    heads_first,
    last_state,
    tokens_first,
)

CHUNK = 16  # tokens
TILE = 2**17  # elements of one chunk's states of some heads: what a core's second-level cache holds


def forward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H M"],
    log_decay: Float[Tensor, "B T H"],
    prior: Float[Tensor, " H"],
    content: Float[Tensor, "B H V K"],
    excess: Float[Tensor, "B H M K"],
    scale: float,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H V K"], Float[Tensor, "B H M K"]]:
    """Return the outputs, the last content and the last excess precision."""
    rows = _rows(q, k, w, beta, log_decay, prior, content, excess)
    run = _forward_shared if beta.shape[-1] == 1 else _forward_tile
    parts = [run(*tile) for tile in _tiles(rows)]
    y, last_content, last_excess = (torch.cat(x) for x in zip(*parts, strict=True))
    y = tokens_first(y.mul_(scale), w)
    return y, last_content.view(content.shape), last_excess.view(excess.shape)


def backward(
    dy: Float[Tensor, "B T H V"],
    dcontent: Float[Tensor, "B H V K"],
    dexcess: Float[Tensor, "B H M K"],
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H M"],
    log_decay: Float[Tensor, "B T H"],
    prior: Float[Tensor, " H"],
    content: Float[Tensor, "B H V K"],
    excess: Float[Tensor, "B H M K"],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dw, dbeta, dlog_decay, dprior and the gradients of both initial states."""
    inputs = (q, k, w, beta, log_decay)
    rows = _rows(*inputs, prior, content, excess)
    dtype = rows[0].dtype
    dends = [x.flatten(0, 1).to(dtype) for x in (dcontent, dexcess)]
    run = _backward_shared if beta.shape[-1] == 1 else _backward_tile
    parts = [run(*tile) for tile in _tiles([heads_first(dy, dtype).mul_(scale), *dends, *rows])]
    *grads, dprior, dcontent, dexcess = (torch.cat(x) for x in zip(*parts, strict=True))
    dtokens = (tokens_first(grad, x) for grad, x in zip(grads, inputs, strict=True))
    dprior = dprior.view(-1, len(prior)).sum(0).to(prior.dtype)
    dstates = (dx.view(x.shape).to(x.dtype) for dx, x in ((dcontent, content), (dexcess, excess)))
    return *dtokens, dprior, *dstates


def _rows(q, k, w, beta, log_decay, prior, content, excess):
    """Every argument with all heads of the batch as rows, prior as [N, 1, 1, 1]."""
    dtype = compute_dtype(q)
    tokens = (heads_first(x, dtype) for x in (q, k, w, beta, log_decay))
    states = (x.flatten(0, 1).to(dtype) for x in (content, excess))
    return [*tokens, prior.to(dtype).repeat(len(q)).view(-1, 1, 1, 1), *states]


def _tiles(rows):
    """Cut the rows so that the states of one chunk fit into the cache."""
    *_, log_decay, _, content, _ = rows
    size = TILE // (min(CHUNK, log_decay.shape[1]) * content[0].numel())
    return zip(*(x.split(max(size, 1)) for x in rows), strict=True)


def _forward_tile(q, k, w, beta, log_decay, prior, content, excess):
    y = torch.empty_like(w)
    for chunk in chunks(q.shape[1], CHUNK):
        kc, decay = k[:, chunk], decay_matrix(log_decay[:, chunk])
        contents = _states(decay, content, w[:, chunk], kc)
        excesses = _states(decay, excess, beta[:, chunk], kc.square())
        mu = _groups(contents[:, 1:], beta) / (excesses[:, 1:] + prior)[:, :, :, None]
        y[:, chunk] = mu.flatten(2, 3).mul_(q[:, chunk, None]).sum(-1)
        content, excess = contents[:, -1], excesses[:, -1]
    return y, content, excess


def _backward_tile(dy, dcontent, dexcess, q, k, w, beta, log_decay, prior, content, excess):
    starts = []
    for chunk in chunks(q.shape[1], CHUNK):
        starts.append((content, excess))
        kc, decay = k[:, chunk], decay_matrix(log_decay[:, chunk])
        content = last_state(kc, w[:, chunk], decay, content)
        excess = last_state(kc.square(), beta[:, chunk], decay, excess)

    dprior, *grads = (torch.zeros_like(x) for x in (prior, q, k, w, beta, log_decay))
    for chunk in reversed(chunks(q.shape[1], CHUNK)):
        content, excess = starts.pop()
        tokens = (x[:, chunk] for x in (dy, q, k, w, beta, log_decay))
        results = _backward_chunk(dcontent, dexcess, content, excess, prior, *tokens)
        *results, dprior_part, dcontent, dexcess = results
        for grad, result in zip(grads, results, strict=True):
            grad[:, chunk] = result
        dprior += dprior_part
    return *grads, dprior, dcontent, dexcess


def _backward_chunk(dcontent, dexcess, content, excess, prior, dy, q, k, w, beta, log_decay):
    decay, k2 = decay_matrix(log_decay), k.square()
    contents, excesses = _states(decay, content, w, k), _states(decay, excess, beta, k2)
    r = (excesses[:, 1:] + prior).reciprocal_()[:, :, :, None]  # N C M 1 K
    mu = _groups(contents[:, 1:], beta) * r  # N C M V/M K
    dq = (dy[:, :, None] @ mu.flatten(2, 3))[:, :, 0]
    dcontents = _groups(dy[..., None] * q[:, :, None], beta).mul_(r)
    dexcesses = mu.mul_(dcontents).sum(3).neg_()
    dprior = dexcesses.sum((1, 2, 3), keepdim=True)
    dw, dk, dlog_decay, dcontent = _backward_states(
        decay, contents, dcontents.flatten(2, 3), dcontent, w, k
    )
    dbeta, dk2, dlog_decay2, dexcess = _backward_states(
        decay, excesses, dexcesses, dexcess, beta, k2
    )
    dk, dlog_decay = dk.add_(2 * k * dk2), dlog_decay + dlog_decay2
    return dq, dk, dw, dbeta, dlog_decay, dprior, dcontent, dexcess


def _groups(x, beta):
    """[N, C, V, K] as [N, C, M, V / M, K]."""
    return x.unflatten(2, (beta.shape[-1], -1))


def _states(decay, start, left, right):
    """The state before a chunk and after each of its tokens, which write left (x) right."""
    sources = start.new_empty(*decay.shape[:2], *start.shape[1:])
    sources[:, 0] = start
    torch.mul(left[..., None], right[:, :, None], out=sources[:, 1:])
    return (decay @ sources.flatten(2)).view_as(sources)


def _backward_states(decay, states, dstates, dend, left, right):
    """Gradients of left, right, log_decay and start of `_states`, whose end the future reads."""
    dstates[:, -1] += dend
    costates = (decay[:, 1:].mT @ dstates.flatten(2)).view_as(states)
    dstart, costates = costates[:, 0], costates[:, 1:]
    dlog_decay = (costates * states[:, :-1]).sum((2, 3)) * decay.diagonal(-1, 1, 2)
    dright = (left[:, :, None] @ costates)[:, :, 0]
    dleft = costates.mul_(right[:, :, None]).sum(-1)
    return dleft, dright, dlog_decay, dstart


def _forward_shared(q, k, w, beta, log_decay, prior, content, excess):
    n = _shared_excesses(k, beta, log_decay, excess)
    reads = q / (prior + n[:, 1:])[:, :, 0]
    y, content = linear.forward_rows(reads, k, w, log_decay, content)
    return y, content, n[:, -1]


def _backward_shared(dy, dcontent, dexcess, q, k, w, beta, log_decay, prior, content, excess):
    n = _shared_excesses(k, beta, log_decay, excess)
    r = (prior + n[:, 1:]).reciprocal_()[:, :, 0]
    dreads, dk, dw, dlog_decay, dcontent = linear.backward_rows(
        dy, dcontent, q * r, k, w, log_decay, content
    )
    dq = dreads.mul_(r)
    dn = (dq * q).mul_(r).neg_()[:, :, None]
    dprior = dn.sum((1, 2, 3), keepdim=True)
    dbeta = torch.empty_like(beta)
    for chunk in reversed(chunks(q.shape[1], linear.CHUNK)):
        kc, decay = k[:, chunk], decay_matrix(log_decay[:, chunk])
        states = n[:, chunk.start : chunk.stop + 1]
        dbeta[:, chunk], dk2, dlog_decay2, dexcess = _backward_states(
            decay, states, dn[:, chunk], dexcess, beta[:, chunk], kc.square()
        )
        dk[:, chunk] += 2 * kc * dk2
        dlog_decay[:, chunk] += dlog_decay2
    return dq, dk, dw, dbeta, dlog_decay, dprior, dcontent, dexcess


def _shared_excesses(k, beta, log_decay, excess):
    """n before the first token and after each, [N, T + 1, 1, K]."""
    n = [excess[:, None]]
    for chunk in chunks(k.shape[1], linear.CHUNK):
        decay = decay_matrix(log_decay[:, chunk])
        n.append(_states(decay, n[-1][:, -1], beta[:, chunk], k[:, chunk].square())[:, 1:])
    return torch.cat(n, dim=1)
