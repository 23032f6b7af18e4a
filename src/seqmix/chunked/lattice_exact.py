"""Lattice at C = 1, the exact rule: a loop over tokens, all batch rows and heads at once.

Slots are rows here, Z = S^T [N, S, V], and the length of X stands for 1 / b, which makes a token
few and fast operations and renormalises at each:

    h = k^T Z - v      step = gamma c      gate = mu + a step      X = Z * gate - step h^T
    Z <- X / |X|       y = q^T Z

(For slots given with another length than one the definition's first b is not that.)
Cost O(T V S) per head. Backward keeps Z every BLOCK tokens and recomputes what lies between.
"""

from typing import NamedTuple

import torch
from torch import Tensor, bmm

BLOCK = 32  # tokens


class Tokens(NamedTuple):
    """Rows [T, N, 1, S], [T, N, 1, V] or [T, N, 1, 1]; idle ones leave the slots untouched."""

    q: Tensor
    k: Tensor
    v: Tensor
    gamma: Tensor
    mu: Tensor
    idle: Tensor | None


class Step(NamedTuple):
    """What a token does: h, a and step are rows, gate and the length of X columns."""

    h: Tensor
    a: Tensor
    step: Tensor
    gate: Tensor
    length: Tensor


def forward(tokens: Tokens, slots: Tensor, objective: str) -> tuple[Tensor, Tensor]:
    """Return y [T, N, 1, V] and the last Z."""
    room, y = room_for(tokens, slots), []
    for block in blocks(tokens):
        states, _ = walk(block, slots, objective, room)
        slots = states[-1]
        y.append(block.q @ states[1:])
    return torch.cat(y), slots.clone()


def backward(
    dy: Tensor, dslots: Tensor, tokens: Tokens, slots: Tensor, objective: str
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the gradients of q, k, v, gamma and mu, and that of the first Z."""
    room, parts, starts, found = room_for(tokens, slots), blocks(tokens), [slots], []
    for block in parts[:-1]:
        starts.append(walk(block, starts[-1], objective, room)[0][-1].clone())
    dys = dy.split(BLOCK)
    for n in reversed(range(len(parts))):
        *grads, dslots = backward_block(dys[n], dslots, parts[n], starts[n], objective, room)
        found.append(grads)
    return tuple(torch.cat(x[::-1]) for x in zip(*found, strict=True)), dslots


def room_for(tokens: Tokens, slots: Tensor) -> Tensor:
    """Return memory for the states of one block, used by all."""
    return slots.new_empty(min(BLOCK, len(tokens.q)) + 1, *slots.shape)


def blocks(tokens: Tokens) -> list[Tokens]:
    """Cut tokens into blocks of BLOCK."""
    count = -(-len(tokens.q) // BLOCK)
    parts = ([None] * count if x is None else x.split(BLOCK) for x in tokens)
    return [Tokens(*part) for part in zip(*parts, strict=True)]


def walk(block: Tokens, start: Tensor, objective: str, room: Tensor) -> tuple[Tensor, list[Step]]:
    """Return Z before and after every token, [T + 1, N, S, V] in `room`, and the steps between."""
    states = room[: len(block.q) + 1]
    states[0] = start
    offered = block.v if objective == "enc" else -block.v
    wanted = block.gamma * (-block.k if objective == "enc" else block.k)
    idle = [None] * len(wanted) if block.idle is None else block.idle
    steps, tiny = [], torch.finfo(start.dtype).tiny
    tokens = (block.k, offered, wanted, block.gamma, block.mu, idle)
    rows = zip(*tokens, states[:-1], states[1:], strict=True)
    for k, h, step, gamma, mu, still, slots, after in rows:
        if objective == "dec":
            h = bmm(k, slots).add_(h)
        a = bmm(h, slots.mT)
        if objective == "enc":
            step = torch.addcmul(step, gamma, a)
        gate = torch.addcmul(mu, step, a).mT
        x = (slots * gate).addcmul_(step.mT, h, value=-1)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(tiny)
        if still is not None:
            length.masked_fill_(still, 1.0)
        torch.div(x, length, out=after)
        steps.append(Step(h, a, step, gate, length))
    return states, steps


def backward_block(
    dy: Tensor, dslots: Tensor, block: Tokens, start: Tensor, objective: str, room: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of a block's q, k, v, gamma and mu, and that of its first Z."""
    states, steps = walk(block, start, objective, room)
    idle = [None] * len(steps) if block.idle is None else block.idle
    tokens = (dy, block.q, block.k, block.gamma, idle)
    rows, found = list(zip(*tokens, states[:-1], states[1:], steps, strict=True)), []
    for dy_t, q, k, gamma, still, slots, after, (h, a, step, gate, length) in rows[::-1]:
        dslots = torch.addcmul(dslots, q.mT, dy_t)
        along = (dslots * after).sum(-1, keepdim=True)
        if still is not None:
            along.masked_fill_(still, 0.0)
        dx = torch.addcmul(dslots, after, along, value=-1).div_(length)
        dgate = (dx * slots).sum(-1, keepdim=True).mT
        dstep = torch.addcmul(bmm(h, dx.mT).neg_(), dgate, a)
        da = dgate * step
        if objective == "enc":
            da.addcmul_(gamma, dstep)
        dh = bmm(da, slots).sub_(bmm(step, dx))
        dslots = dx.mul_(gate).addcmul_(da.mT, h)
        if objective == "dec":
            dslots.addcmul_(k.mT, dh)
        found.append((dh, a, dstep))
    dh, a, dstep = (torch.stack(x[::-1]) for x in zip(*found, strict=True))
    dq, dk, c = dy @ states[1:].mT, block.gamma * dstep, block.k
    if objective == "dec":
        dk += dh @ states[:-1].mT
    if objective == "enc":
        dk, c = -dk, a - c
    dv = dh if objective == "enc" else -dh
    dgamma = (dstep * c).sum(-1, keepdim=True)
    dmu = -block.gamma * dgamma / block.mu  # X / |X| depends on gamma / mu alone
    return dq, dk, dv, dgamma, dmu, dslots
