"""PaTH attention inside blocks of tokens: what the transitions of every block do, in closed form.

One block of S tokens has W (rows w_t^T), D = diag(beta), Q, K and H_t = I - beta_t w_t w_t^T; lower
keeps the diagonal, slower does not.

    U     = (I + slower(D W W^T))^-1 D              H_last ... H_first = I - W^T U W
    match = lower(Q K^T) - lower(Q W^T) U slower(W K^T)           k_j^T H_{j+1} ... H_i q_i
    left  = Q - lower(Q W^T) U W                    queries moved to the left edge of the block
    right = K - (U slower(W K^T))^T W               keys moved to the right edge
    cross = I - (U W)^T W = H_first ... H_last      what carries a key across the whole block

Blocks nest: two neighbours are one block of twice the size (`pair`), which is how small triangular
systems serve large blocks. Every `_backward` is the exact adjoint of its namesake. Tensors are
[M, ...]: M blocks, neighbours side by side, of all sequences and key heads; queries and matches
are [M, R, S, ...], where R = H / G query heads share a key head.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # tokens a block at most: fewer crossings against more work inside blocks
SOLVE = 32  # tokens in a triangular system at most: its cost a token grows with their number, and
# where they far outnumber the K dimensions, its error too


@dataclass(frozen=True)
class Layout:
    """How tokens are cut: each of G key heads into blocks, each block into 2^pairs to be solved."""

    groups: int
    blocks: int
    pairs: int
    solve: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, k: Tensor, w: Tensor | None) -> "Layout":
        blocks = -(-q.shape[1] // BLOCK)
        size = -(-q.shape[1] // blocks)
        solve = size if w is None else min(SOLVE, max(8, q.shape[3]))
        pairs = max(0, math.ceil(math.log2(size / solve)))
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return cls(k.shape[2], blocks, pairs, -(-size // 2**pairs), dtype)

    @property
    def size(self) -> int:
        return self.solve * 2**self.pairs

    def cut(self, x: Tensor, size: int | None = None) -> Tensor:
        """[B, T, H, K] (or no K) as [B G, T / size, R, size, K], padded with zeros at the end."""
        B, T, H = x.shape[:3]
        x = pad(x.reshape(B, T, H, -1).to(self.dtype), (0, 0, 0, 0, 0, self.blocks * self.size - T))
        x = x.view(B, -1, size or self.size, self.groups, H // self.groups, x.shape[-1])
        return x.permute(0, 3, 1, 4, 2, 5).flatten(0, 1).contiguous()

    def join(self, x: Tensor, like: Tensor, size: int | None = None) -> Tensor:
        """The inverse of `cut`, to the tokens, heads and dtype of `like` [B, T, H, any] or none."""
        B, T, H = like.shape[:3]
        x = x.reshape(B, self.groups, -1, H // self.groups, size or self.size, x.shape[-1])
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, H, x.shape[-1])[:, :T]
        return (x if like.ndim == 4 else x[..., 0]).to(like.dtype).contiguous()

    def by_sequence(self, moves: "Moves") -> "Moves":
        """Moves of all blocks [M, ...] as [N, n, ...]."""
        n = self.blocks
        return Moves(*(x.view(len(x) // n, n, *x.shape[1:]) for x in moves))


class Overlaps(NamedTuple):
    """Inner products inside a block, and the solution of its triangular system."""

    w_w: Tensor  # M S S     slower(W W^T)
    w_k: Tensor  # M S S     slower(W K^T)
    inverse: Tensor  # M S S (I + D w_w)^-1
    u_wk: Tensor  # M S S    U w_k
    u_w: Tensor  # M S K     U W


class Moves(NamedTuple):
    """What the transitions of each block do to its tokens, and to what passes through."""

    match: Tensor  # M R S S, valid on and below the diagonal
    left: Tensor  # M R S K
    right: Tensor  # M S K
    cross: Tensor  # M K K, of no size without transitions


def overlap(k: Tensor, w: Tensor, beta: Tensor) -> Overlaps:
    """Solve every block for its transitions; beta is [M, S, 1]."""
    w_w, w_k = (w @ w.mT).tril(-1), (w @ k.mT).tril(-1)
    eye = torch.eye(w.shape[1], dtype=w.dtype, device=w.device).expand_as(w_w)
    inverse = torch.linalg.solve_triangular(beta * w_w, eye, upper=False, unitriangular=True)
    u = inverse * beta.mT
    return Overlaps(w_w, w_k, inverse, u @ w_k, u @ w)


def carry(k: Tensor, w: Tensor, o: Overlaps) -> tuple[Tensor, Tensor]:
    """Keys at the right edge of their block, and what carries earlier keys across it."""
    eye = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
    right = torch.baddbmm(k, o.u_wk.mT, w, alpha=-1)
    return right, torch.baddbmm(eye, o.u_w.mT, w, alpha=-1)


def move(q: Tensor, k: Tensor, w: Tensor | None, o: Overlaps | None) -> Moves:
    """Apply the transitions to the queries and keys of their block."""
    rows, shape = q.flatten(1, 2), (*q.shape[:3], k.shape[1])
    if w is None or o is None:
        return Moves((rows @ k.mT).view(shape), q, k, k.new_empty(len(k), 0, 0))
    q_w = (rows @ w.mT).view(shape).tril_().flatten(1, 2)
    match = torch.baddbmm(rows @ k.mT, q_w, o.u_wk, alpha=-1).view(shape)
    left = torch.baddbmm(rows, q_w, o.u_w, alpha=-1).view_as(q)
    return Moves(match, left, *carry(k, w, o))


def move_backward(
    grad: Moves, q: Tensor, k: Tensor, w: Tensor | None, beta: Tensor | None, o: Overlaps | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, w and beta; that of match must be zero above the diagonal.

    With X = [w_k | W] the solve is (I + D w_w) R = D X, R = [u_wk | u_w], and
        E = (I + D w_w)^-T dR   dX = D E   d(w_w) = -D E R^T   dbeta = diag(E X^T - E R^T w_w^T)
    R enters everything with a minus: below, e stands for -E.
    """
    rows, dmatch, dleft = q.flatten(1, 2), grad.match.flatten(1, 2), grad.left.flatten(1, 2)
    dq = torch.baddbmm(dleft, dmatch, k)
    dk = torch.baddbmm(grad.right, dmatch.mT, rows)
    if w is None or beta is None or o is None:
        return dq.view_as(q), dk, None, None

    q_w = (rows @ w.mT).view_as(grad.match).tril_().flatten(1, 2)
    e_wk = o.inverse.mT @ torch.baddbmm(w @ grad.right.mT, q_w.mT, dmatch)
    e_w = o.inverse.mT @ torch.baddbmm(w @ grad.cross.mT, q_w.mT, dleft)
    e_u = torch.baddbmm(e_wk @ o.u_wk.mT, e_w, o.u_w.mT)
    dbeta = (e_u * o.w_w).sum(-1) - (e_wk * o.w_k).sum(-1) - (e_w * w).sum(-1)

    dq_w = torch.baddbmm(dleft @ o.u_w.mT, dmatch, o.u_wk.mT)  # from here on all with a minus
    dq_w = dq_w.view_as(grad.match).tril_().flatten(1, 2)
    dw_k, dw_w, dw = e_wk.mul_(beta).tril_(-1), e_u.mul_(-beta).tril_(-1), e_w.mul_(beta)
    dq.baddbmm_(dq_w, w, alpha=-1)
    dk.baddbmm_(dw_k.mT, w, alpha=-1)
    dw.baddbmm_(dq_w.mT, rows).baddbmm_(dw_k, k).baddbmm_(dw_w, w).baddbmm_(dw_w.mT, w)
    dw.baddbmm_(o.u_wk, grad.right).baddbmm_(o.u_w, grad.cross)
    return dq.view_as(q), dk, dw.neg_(), dbeta[..., None]


def pair(moves: Moves) -> Moves:
    """Join blocks 2m and 2m + 1: queries go on to the left, keys to the right."""
    first, second = (Moves(*(x[i::2] for x in moves)) for i in (0, 1))
    shape, size = second.left.shape, moves.right.shape[1]
    rows = second.left.flatten(1, 2)
    match = pad(first.match, (0, size, 0, size))
    match[..., size:, :size] = (rows @ first.right.mT).view(*shape[:3], size)
    match[..., size:, size:] = second.match
    return Moves(
        match,
        torch.cat([first.left, (rows @ first.cross.mT).view(shape)], 2),
        torch.cat([first.right @ second.cross, second.right], 1),
        first.cross @ second.cross,
    )


def pair_backward(grad: Moves, moves: Moves) -> Moves:
    """Gradients of the single blocks, from those of the pairs that `pair(moves)` made."""
    first, second = (Moves(*(x[i::2] for x in moves)) for i in (0, 1))
    size = moves.right.shape[1]
    rows, far = second.left.flatten(1, 2), grad.match[..., size:, :size].flatten(1, 2)
    dleft, (dright, _) = grad.left[:, :, size:].flatten(1, 2), grad.right.split(size, 1)
    single = Moves(*(torch.empty_like(x) for x in moves))
    single.match[0::2] = grad.match[..., :size, :size]
    single.match[1::2] = grad.match[..., size:, size:]
    single.left[0::2] = grad.left[:, :, :size]
    single.left[1::2] = torch.baddbmm(dleft @ first.cross, far, first.right).view_as(second.left)
    single.right[0::2] = torch.baddbmm(dright @ second.cross.mT, far.mT, rows)
    single.right[1::2] = grad.right[:, size:]
    single.cross[0::2] = torch.baddbmm(dleft.mT @ rows, grad.cross, second.cross.mT)
    single.cross[1::2] = torch.baddbmm(first.right.mT @ dright, first.cross.mT, grad.cross)
    return single


def products_after(cross: Tensor) -> Tensor:
    """F_{j+1} ... F_{n-1} for every block j of n, in log2(n) steps; cross [N, n, K, K]."""
    eye = torch.eye(cross.shape[-1], dtype=cross.dtype, device=cross.device)
    products = torch.cat([cross[:, 1:], eye.expand_as(cross[:, :1])], 1)
    reach = 1
    while reach < cross.shape[1]:
        longer = products[:, :-reach] @ products[:, reach:]
        products = torch.cat([longer, products[:, -reach:]], 1)
        reach *= 2
    return products


def products_before(cross: Tensor) -> Tensor:
    """F_0 ... F_{j-1} for every block j of n: `products_after` of the mirrored blocks."""
    return products_after(cross.flip(1).mT).mT.flip(1)


class Gates(NamedTuple):
    """Sums of log_forget, all terms of one sign: no difference of large numbers is ever taken."""

    between: Tensor  # N n R S S   over j < s <= i, both in the block
    head: Tensor  # N n R S        from the left edge up to i
    tail: Tensor  # N n R S        from s > j to the right edge

    def since(self, b: int) -> Tensor:
        """Sums from every token before block b to the left edge of b, [N, R, b S]."""
        whole = self.head[:, 1:b, :, -1:].flip(1).cumsum(1).flip(1)
        sums = self.tail[:, :b] + pad(whole, (0, 0, 0, 0, 0, 1))
        return sums.transpose(1, 2).flatten(2)


def gate(log_forget: Tensor) -> Gates:
    """Sum the gates of every block, log_forget [N, n, R, S]."""
    steps = log_forget[..., None].expand(*log_forget.shape, log_forget.shape[-1]).tril(-1)
    between = steps.cumsum(-2)
    return Gates(between, log_forget.cumsum(-1), between[..., -1, :])


def gate_backward(grad: Gates) -> Tensor:
    """The gradient of log_forget: every sum hands its own to each of its terms."""
    crossing = grad.between.cumsum(-1).tril_(-1).sum(-2) + grad.tail.cumsum(-1)  # from j to s > j
    return pad(crossing[..., :-1], (1, 0)) + grad.head.flip(-1).cumsum(-1).flip(-1)
