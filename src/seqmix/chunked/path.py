"""PaTH attention in blocks of tokens: matrix products only, memory linear in T.

    H_t      = I - beta_t w_t w_t^T
    logit_ij = scale * k_j^T H_{j+1} ... H_i q_i + sum_{s=j+1..i} log f_s                   j <= i

Keys are rolled, as in a decoding cache. Before block b all older keys are aligned to its left edge;
its queries, moved to that edge, read them by plain inner products; then the keys cross the block,
K <- K F_b with F_b = H_first ... H_last, and the block's own keys join them at its right edge.
Without w and beta nothing crosses: this is then softmax attention with an optional forget gate.

The backward takes the blocks from last to first. It rolls the gradient of the aligned keys by
F_b^T, and gets the aligned keys themselves from the products of all F since each block.

Per head O(T^2 K + T^2 K^2 / S) time. The largest tensors are one block's logits over its whole
past, [R S, T], and those of all blocks over themselves, [T / S, R S, S]. One sequence a row, any
float dtypes, computed in float32 (float64 if q is float64).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from seqmix.chunked.path_blocks import (
    Gates,
    Layout,
    Moves,
    Overlaps,
    gate,
    gate_backward,
    move,
    move_backward,
    overlap,
    pair,
    pair_backward,
    products_after,
)

FLOOR = -60.0  # past weights end at e^-60 of the largest in their row: denormal numbers are slow

Tokens = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # q, k, w, beta in blocks to solve


def forward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    w: Float[Tensor, "B T G K"] | None,
    beta: Float[Tensor, "B T G"] | None,
    log_forget: Float[Tensor, "B T H"] | None,
    scale: float,
    *,
    return_keys: bool = False,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B T H"], Float[Tensor, "B T G K"] | None]:
    """Return y, the log denominator of each softmax, and the keys aligned to the last token."""
    layout = Layout.of(q, k, w)
    tokens, values, gates = _cut(layout, q, k, v, w, beta, log_forget, scale)
    moves = layout.by_sequence(_move(layout, *tokens)[1][-1])

    future = torch.full((layout.size,) * 2, -math.inf, dtype=values.dtype, device=q.device).triu_(1)
    y, lse = _read((_own_logits(moves, gates) + future).flatten(2, 3), values, -math.inf)
    keys = moves.right[:, 0]
    for b in range(1, layout.blocks):
        logits = _past_logits(moves, gates, keys, b)
        _merge(y[:, b], lse[:, b], *_read(logits, values[:, :b].flatten(1, 2), FLOOR))
        if w is not None:
            keys = keys @ moves.cross[:, b]
        keys = torch.cat([keys, moves.right[:, b]], 1)
    aligned = layout.join(keys, k).to(q.dtype) if return_keys else None
    return layout.join(y, q), layout.join(lse, q[..., 0].to(layout.dtype)), aligned


def backward(
    dy: Float[Tensor, "B T H V"],
    dkeys: Float[Tensor, "B T G K"] | None,
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    w: Float[Tensor, "B T G K"] | None,
    beta: Float[Tensor, "B T G"] | None,
    log_forget: Float[Tensor, "B T H"] | None,
    y: Float[Tensor, "B T H V"],
    lse: Float[Tensor, "B T H"],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v, w, beta and log_forget; None where there was no input."""
    layout = Layout.of(q, k, w)
    tokens, values, gates = _cut(layout, q, k, v, w, beta, log_forget, scale)
    overlaps, levels = _move(layout, *tokens)
    dy, y, lse = (layout.cut(x).flatten(2, 3) for x in (dy, y, lse))
    dkeys = None if dkeys is None else layout.cut(dkeys)[:, :, 0]
    read = (dy, (dy * y).sum(-1, keepdim=True), lse, values)

    grad, dgates, dv = _attend_backward(layout.by_sequence(levels[-1]), gates, dkeys, *read)
    grad = Moves(*(x.flatten(0, 1) for x in grad))
    for level in reversed(levels[:-1]):
        grad = pair_backward(grad, level)
    dq, dk, dw, dbeta = move_backward(grad, *tokens, overlaps)
    return (
        layout.join(dq * scale, q, layout.solve),
        layout.join(dk, k, layout.solve),
        layout.join(dv, v),
        None if w is None or dw is None else layout.join(dw, w, layout.solve),
        None if beta is None or dbeta is None else layout.join(dbeta, beta, layout.solve),
        None
        if log_forget is None or dgates is None
        else layout.join(gate_backward(dgates)[..., None], log_forget),
    )


def _cut(
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    scale: float,
) -> tuple[Tokens, Tensor, Gates | None]:
    """Scaled q, k, w and beta in blocks to solve; v [N, n, S, V] and gates in whole blocks."""

    def solve(x: Tensor) -> Tensor:
        return layout.cut(x, layout.solve).flatten(0, 1)

    tokens = (
        solve(q) * scale,
        solve(k)[:, 0],
        None if w is None else solve(w)[:, 0],
        None if beta is None else solve(beta)[:, 0],
    )
    gates = None
    if log_forget is not None:
        gates = gate(layout.cut(log_forget)[..., 0].clamp(min=-1e30))  # log 0, still to be summed
    return tokens, layout.cut(v)[:, :, 0], gates


def _move(
    layout: Layout, q: Tensor, k: Tensor, w: Tensor | None, beta: Tensor | None
) -> tuple[Overlaps | None, list[Moves]]:
    """The solution of every block and its moves, then those of pairs, pairs of pairs, ..."""
    overlaps = None if w is None or beta is None else overlap(k, w, beta)
    levels = [move(q, k, w, overlaps)]
    for _ in range(layout.pairs):
        levels.append(pair(levels[-1]))
    return overlaps, levels


def _own_logits(moves: Moves, gates: Gates | None) -> Tensor:
    """Logits of every block over itself [N, n, R, S, S], valid on and below the diagonal."""
    return moves.match if gates is None else moves.match + gates.between


def _past_logits(moves: Moves, gates: Gates | None, keys: Tensor, b: int) -> Tensor:
    """Logits of block b over all before it [N, R S, b S], from keys aligned to its left edge."""
    logits = moves.left[:, b].flatten(1, 2) @ keys.mT
    if gates is not None:
        rows = logits.unflatten(1, gates.head.shape[2:])
        rows += gates.since(b)[:, :, None]
        rows += gates.head[:, b, :, :, None]
    return logits


def _read(logits: Tensor, values: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Softmax-weighted values, and the log denominator [..., 1]; overwrites the logits."""
    top = logits.amax(-1, keepdim=True)
    weight = logits.sub_(top).clamp_(min=floor).exp_()
    total = weight.sum(-1, keepdim=True)
    return (weight @ values).div_(total), total.log_().add_(top)


def _merge(y: Tensor, lse: Tensor, other_y: Tensor, other_lse: Tensor) -> None:
    """Join another part of the same softmaxes into y and lse, in place."""
    total = torch.logaddexp(lse, other_lse)
    y.mul_((lse - total).exp_()).addcmul_(other_y, (other_lse - total).exp_())
    lse.copy_(total)


def _attend_backward(
    moves: Moves,
    gates: Gates | None,
    dkeys: Tensor | None,
    dy: Tensor,
    delta: Tensor,
    lse: Tensor,
    values: Tensor,
) -> tuple[Moves, Gates | None, Tensor]:
    """Gradients of the moves, the gates and the values.

    With P the weights of a softmax and delta = y . dy,
        dv = P^T dy        dlogits = P (.) (dy v^T - delta)
    """
    weight = (_own_logits(moves, gates).flatten(2, 3) - lse).exp_()
    weight = weight.view_as(moves.match).tril_().flatten(2, 3)
    dlogits = (dy @ values.mT).sub_(delta).mul_(weight)
    dv, dmatch = weight.mT @ dy, dlogits.view_as(moves.match)
    dkeys = torch.zeros_like(moves.right) if dkeys is None else dkeys.clone()
    grad = Moves(dmatch, torch.zeros_like(moves.left), dkeys, torch.zeros_like(moves.cross))
    dgates = None
    if gates is not None:
        dgates = Gates(dmatch, torch.zeros_like(gates.head), torch.zeros_like(gates.tail))

    for b in reversed(range(1, moves.right.shape[1])):
        keys = _cross_backward(moves, grad, b)
        weight = _past_logits(moves, gates, keys, b).sub_(lse[:, b]).clamp_(min=FLOOR).exp_()
        dlogits = dy[:, b] @ values[:, :b].flatten(1, 2).mT
        dlogits.sub_(delta[:, b]).mul_(weight)
        dv[:, :b].flatten(1, 2).baddbmm_(weight.mT, dy[:, b])
        grad.left[:, b] = (dlogits @ keys).view_as(grad.left[:, b])
        grad.right[:, :b].flatten(1, 2).baddbmm_(dlogits.mT, moves.left[:, b].flatten(1, 2))
        if dgates is not None:
            rows = dlogits.unflatten(1, dgates.head.shape[2:])
            dgates.head[:, b] = rows.sum(-1)
            dgates.head[:, b, :, -1] += dgates.tail[:, :b].sum((1, 3))
            dgates.tail[:, :b] += rows.sum(2).unflatten(-1, (b, -1)).transpose(1, 2)
    return grad, dgates, dv


def _cross_backward(moves: Moves, grad: Moves, b: int) -> Tensor:
    """The keys before block b, aligned to its left edge.

    Brings their gradient, so far taken at the right edge, there too, and fills in that of F_b.
    """
    keys, dkeys = moves.right[:, :b], grad.right[:, :b].flatten(1, 2)
    if not moves.cross.numel():
        return keys.flatten(1, 2)
    keys = (keys @ products_after(moves.cross[:, :b])).flatten(1, 2)
    grad.cross[:, b] = keys.mT @ dkeys
    dkeys.copy_(dkeys @ moves.cross[:, b].mT)
    return keys
