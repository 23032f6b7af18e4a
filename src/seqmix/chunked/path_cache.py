"""PaTH attention from a cache: new tokens over folded keys and over tokens still pending.

Keys of old tokens are kept aligned to a boundary r: every transition up to r has been applied. The
tokens since are pending, kept as they came. A query at t > r is moved to the boundary and reads the
old keys by plain inner products,

    logit_j = k_j^(r) . (H_{r+1} ... H_t q_t)           j <= r

and the pending ones by the formulas of a block (`path_blocks`). Now and then `fold` moves the
boundary: one matrix product for all old keys instead of a rank-one update at every token, and that
many fewer roundings. Rows are ragged: each has its own number of folded and pending tokens. All
functions are differentiable by autograd.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from seqmix.chunked.path_blocks import (
    SOLVE,
    Layout,
    carry,
    overlap,
    products_after,
    products_before,
)


class Folded(NamedTuple):
    """Tokens up to the boundary; of row n only the first length[n]."""

    keys: Tensor  # N F G K, aligned to the boundary
    values: Tensor  # N F G V
    decay: Tensor | None  # N F H, the sum of log_forget from behind a token to the boundary
    length: Tensor  # N


class Pending(NamedTuple):
    """Tokens behind the boundary, as they came; k, w and beta in float32 or float64."""

    k: Tensor  # N P G K
    v: Tensor  # N P G V
    w: Tensor  # N P G K
    beta: Tensor  # N P G
    log_forget: Tensor | None  # N P H


def extend(
    q: Float[Tensor, "N T H K"],
    first: Int[Tensor, " N"],
    pending: Pending,
    folded: Folded,
    *,
    scale: float,
) -> Float[Tensor, "N T H V"]:
    """Attend with the queries of the pending tokens first[n], first[n] + 1, ... of each row.

    What lies behind a query's own token is not seen, whatever it holds. O(T (F + P) + P^2) a head.
    """
    G, T = pending.k.shape[2], q.shape[1]
    R = q.shape[2] // G
    k, v, w = (x.transpose(1, 2) for x in pending[:3])  # N G P size
    beta = pending.beta.transpose(1, 2)[..., None]
    q = q.to(k.dtype).unflatten(2, (G, R)).permute(0, 2, 3, 1, 4).flatten(2, 3) * scale  # N G RT K
    place = first[:, None] + torch.arange(T, device=q.device)  # N T
    seen = torch.arange(k.shape[2], device=q.device) <= place[..., None]
    seen = seen[:, None].repeat(1, 1, R, 1)  # N 1 RT P

    q_w = (q @ w.mT).masked_fill(~seen, 0)
    system = (beta * (w @ w.mT)).tril(-1)
    q_u = torch.linalg.solve_triangular(system, q_w, upper=False, left=False, unitriangular=True)
    q_u = q_u * beta.mT  # lower(Q W^T) U
    own = q @ k.mT - q_u @ (w @ k.mT).tril(-1)
    keys, values = folded.keys.transpose(1, 2), folded.values.transpose(1, 2)
    past = ((q - q_u @ w).to(keys.dtype) @ keys.mT).to(own.dtype)
    if pending.log_forget is not None and folded.decay is not None:
        between, head = _gates(pending.log_forget, place)
        own = own + _rows(between, G)
        past = past + _rows(folded.decay[:, None] + head, G)
    old = torch.arange(keys.shape[2], device=q.device) < folded.length[:, None]
    past = past.masked_fill(~old[:, None, None], -math.inf)
    logits = torch.cat([past, own.masked_fill(~seen, -math.inf)], -1)
    far, near = logits.softmax(-1).to(v.dtype).split([keys.shape[2], k.shape[2]], -1)
    return (far @ values + near @ v).unflatten(2, (R, T)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _gates(log_forget: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of gates up to the token at `place`: since each pending token, since the boundary."""
    size = log_forget.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=place.device).tril(-1)
    between = torch.where(later[..., None], log_forget[:, :, None], 0.0).cumsum(1)  # N P P H
    row = torch.arange(place.shape[0], device=place.device)[:, None]
    return between[row, place], log_forget.cumsum(1)[row, place][:, :, None]


def _rows(x: Tensor, groups: int) -> Tensor:
    """[N, T, tokens, H] as [N, G, R T, tokens]."""
    return x.permute(0, 3, 1, 2).unflatten(1, (groups, -1)).flatten(2, 3)


def arrive(
    q: Float[Tensor, "N T H K"], w: Float[Tensor, "N T G K"], beta: Float[Tensor, "N T G"]
) -> Float[Tensor, "N T H K"]:
    """Move each query left over every token up to its own, in float32 or float64.

    O(T K^2) a head.
    """
    N, T, H, K = q.shape
    blocks = max(1, -(-T // SOLVE))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    layout = Layout(w.shape[2], blocks, 0, -(-T // blocks), dtype)
    rows = layout.cut(q).flatten(2, 3)  # N G, blocks, R S, K
    w, beta = (layout.cut(x)[:, :, 0] for x in (w, beta))
    system = (beta * (w @ w.mT)).tril(-1)
    u_w = torch.linalg.solve_triangular(system, beta * w, upper=False, unitriangular=True)
    seen = torch.ones(layout.size, layout.size, dtype=torch.bool, device=q.device).tril()
    rows = rows - (rows @ w.mT).where(seen.repeat(H // layout.groups, 1), 0.0) @ u_w
    cross = torch.eye(K, dtype=dtype, device=q.device) - u_w.mT @ w
    moved = rows @ products_before(cross).mT
    return layout.join(moved, q.new_empty(q.shape, dtype=dtype))


def fold(
    keys: Float[Tensor, "N F G K"],
    k: Float[Tensor, "N P G K"],
    w: Float[Tensor, "N P G K"],
    beta: Float[Tensor, "N P G"],
) -> tuple[Float[Tensor, "N F G K"], Float[Tensor, "N P G K"]]:
    """Carry old keys over P tokens, and those tokens' keys to behind the last of them.

    Tokens with w = 0 or beta = 0 move nothing. O(F K^2 + P K^2) a head, in the dtype of k.
    """
    if not k.shape[0] * k.shape[1]:
        return keys, k
    blocks = -(-k.shape[1] // SOLVE)
    layout = Layout(k.shape[2], blocks, 0, -(-k.shape[1] // blocks), k.dtype)
    k_blocks, w_blocks, beta_blocks = (layout.cut(x)[:, :, 0].flatten(0, 1) for x in (k, w, beta))
    overlaps = overlap(k_blocks, w_blocks, beta_blocks)
    right, cross = (x.unflatten(0, (-1, blocks)) for x in carry(k_blocks, w_blocks, overlaps))
    after = products_after(cross)
    whole = (cross[:, 0] @ after[:, 0]).unflatten(0, (-1, layout.groups))  # N G K K
    moved = (keys.to(k.dtype).transpose(1, 2) @ whole).transpose(1, 2).to(keys.dtype)
    return moved, layout.join(right @ after, k)
