"""Gated linear attention in chunks of tokens: any device, explicit backward, memory linear in T.

    S_t = alpha_t S_{t-1} + w_t (x) k_t      y_t = scale * S_t q_t      alpha_t = exp(log_decay_t)

Inside a chunk of C tokens that starts with S_0, with decay_ts = alpha_{s+1} ... alpha_t for s <= t:

    y_t = scale * (decay_t0 S_0 q_t + sum_{s<=t} decay_ts (k_s . q_t) w_s)
    S_C = decay_C0 S_0 + sum_s decay_Cs w_s (x) k_s

Each decay is the exponential of a sum over its own tokens, never of a difference of longer sums, so
log_decay may be anything from 0 to -inf. Cost O(T (C (K + V) + K V)) per head; backward keeps the
T / C states at the chunk starts. Both take one sequence per batch row, compute in float32 (float64
if q is float64), and return every result in the dtype of the input it belongs to.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64  # tokens


def forward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H"],
    state: Float[Tensor, "B H V K"],
    scale: float,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H V K"]]:
    """Return the outputs and the last state."""
    y, end = forward_rows(*_rows(q, k, w, log_decay, state))
    return tokens_first(y.mul_(scale), w), end.view(state.shape)


def backward(
    dy: Float[Tensor, "B T H V"],
    dstate: Float[Tensor, "B H V K"],
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H"],
    state: Float[Tensor, "B H V K"],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dw, dlog_decay and the gradient of the initial state."""
    rows = _rows(q, k, w, log_decay, state)
    dy, dend = heads_first(dy, rows[0].dtype).mul_(scale), dstate.flatten(0, 1).to(rows[0].dtype)
    *grads, dstart = backward_rows(dy, dend, *rows)
    dtokens = (tokens_first(grad, x) for grad, x in zip(grads, (q, k, w, log_decay), strict=True))
    return *dtokens, dstart.view(state.shape).to(state.dtype)


def _rows(q, k, w, log_decay, state):
    """Every argument with all heads of the batch as rows."""
    dtype = compute_dtype(q)
    return [*(heads_first(x, dtype) for x in (q, k, w, log_decay)), state.flatten(0, 1).to(dtype)]


def forward_rows(
    q: Float[Tensor, "N T K"],
    k: Float[Tensor, "N T K"],
    w: Float[Tensor, "N T V"],
    log_decay: Float[Tensor, "N T"],
    state: Float[Tensor, "N V K"],
) -> tuple[Float[Tensor, "N T V"], Float[Tensor, "N V K"]]:
    """Return the outputs with scale 1 and the last state, every row one head, all of one dtype."""
    y = torch.empty_like(w)
    for chunk in chunks(q.shape[1], CHUNK):
        qc, kc, wc, decay = q[:, chunk], k[:, chunk], w[:, chunk], decay_matrix(log_decay[:, chunk])
        scores = (qc @ kc.mT).mul_(decay[:, 1:, 1:])
        y[:, chunk] = (decay[:, 1:, :1] * (qc @ state.mT)).baddbmm_(scores, wc)
        state = last_state(kc, wc, decay, state)
    return y, state


def backward_rows(
    dy: Float[Tensor, "N T V"],
    dstate: Float[Tensor, "N V K"],
    q: Float[Tensor, "N T K"],
    k: Float[Tensor, "N T K"],
    w: Float[Tensor, "N T V"],
    log_decay: Float[Tensor, "N T"],
    state: Float[Tensor, "N V K"],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dw, dlog_decay and the gradient of the initial state of `forward_rows`."""
    starts, decays = [state], []
    for chunk in chunks(q.shape[1], CHUNK):
        decays.append(decay_matrix(log_decay[:, chunk]))
        starts.append(last_state(k[:, chunk], w[:, chunk], decays[-1], starts[-1]))
    starts.pop()

    grads = [torch.empty_like(x) for x in (q, k, w, log_decay)]
    for chunk in reversed(chunks(q.shape[1], CHUNK)):
        tokens = (x[:, chunk] for x in (dy, q, k, w))
        *results, dstate = _backward_chunk(dstate, starts.pop(), decays.pop(), *tokens)
        for grad, result in zip(grads, results, strict=True):
            grad[:, chunk] = result
    return *grads, dstate


def _backward_chunk(dend, start, decay, dy, q, k, w):
    """dq, dk, dw, dlog_decay and dstart of one chunk, from dy and the cotangent of its last state.

    dlog_decay_u adds up all that crosses token u: from each source s < u, the start state among
    them, to each sink t >= u, the end state among them. No term is ever subtracted.
    """
    whole, from_start = decay[:, -1:, :1], decay[:, 1:, :1]
    inner, to_end = decay[:, 1:, 1:], decay[:, -1, 1:, None]
    scores = q @ k.mT
    dscores = (dy @ w.mT).mul_(inner)
    dq = from_start * (dy @ start)
    dk = to_end * (w @ dend)
    crossing = pad(dscores * scores, (1, 0, 0, 1))  # sinks x sources
    crossing[:, :-1, 0] = (q * dq).sum(-1)
    crossing[:, -1, 1:] = (k * dk).sum(-1)
    crossing[:, -1, :1] = whole[:, 0] * (start * dend).sum((1, 2))[:, None]
    dlog_decay = crossing.cumsum(2).tril_().sum(1)[:, :-1]
    dq.baddbmm_(dscores, k)
    dk.baddbmm_(dscores.mT, q)
    dw = (to_end * (k @ dend.mT)).baddbmm_(scores.mul_(inner).mT, dy)
    dstart = torch.baddbmm(whole * dend, dy.mT, from_start * q)
    return dq, dk, dw, dlog_decay, dstart


def last_state(
    k: Float[Tensor, "N C K"],
    w: Float[Tensor, "N C V"],
    decay: Float[Tensor, "N C+1 C+1"],
    state: Float[Tensor, "N V K"],
) -> Float[Tensor, "N V K"]:
    """Return the state at the end of a chunk that starts with `state`."""
    return torch.baddbmm(decay[:, -1:, :1] * state, w.mT, decay[:, -1, 1:, None] * k)


def decay_matrix(log_decay: Float[Tensor, "N C"]) -> Float[Tensor, "N C+1 C+1"]:
    """Return alpha_{s+1} ... alpha_t at [t, s] for s <= t, else 0; place 0 is the chunk's start."""
    size = log_decay.shape[1] + 1
    steps = pad(log_decay, (1, 0))[:, :, None].expand(-1, -1, size)
    return steps.tril(-1).cumsum(1).exp_().tril_()


def chunks(tokens: int, size: int) -> list[slice]:
    """Cut a number of tokens into slices of `size`; the last may be shorter."""
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def heads_first(x: Float[Tensor, "B T H ..."], dtype: torch.dtype) -> Float[Tensor, "N T ..."]:
    """Return a copy in which every head of every batch row is a row of its own."""
    return x.transpose(1, 2).flatten(0, 1).to(dtype, copy=True).contiguous()


def tokens_first(
    rows: Float[Tensor, "N T ..."], like: Float[Tensor, "B T H ..."]
) -> Float[Tensor, "B T H ..."]:
    """Undo `heads_first`, in the dtype of `like`."""
    B, T, H = like.shape[:3]
    return rows.unflatten(0, (B, H)).transpose(1, 2).to(like.dtype).contiguous()


def compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
