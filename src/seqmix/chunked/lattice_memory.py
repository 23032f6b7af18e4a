"""The states inside a Lattice chunk, read and written as products of matrices.

A token sees S_{t-1} and leaves S_t; what it writes is (h_t, khat_t, gate_t):

    S_t = S_{t-1} * gate_t - h_t khat_t^T = S_0 * A_t - sum_{i<=t} h_i (khat_i * Omega_ti)^T
    A_t = gate_1 ... gate_t               Omega_ti = gate_{i+1} ... gate_t

Gates may be zero or negative, so Omega is never a quotient. It is spread over a tree of blocks of
2, 4, 8, ... tokens: for t in the right and i in the left half of a block,

    Omega_{t-1,i} = prefix_t suffix_i    the gates from the middle to before t, from behind i to it

and each level is a few matrix products of q_t * prefix_t, khat_i * suffix_i and h_i. No state per
token and nothing of size C^2 S exists. Eq. 15 adds S_0 * (a_t khat_t) to S_t, which makes the share
of S_0 in a state more than A; an `a` that is not None stands for it.

Tensors are [N, C, V] or [N, C, S] for N independent chunks, C a power of two, and S_0 is [N, V, S].
"""

from typing import NamedTuple

import torch
from torch import Tensor, bmm


class Level(NamedTuple):
    """Blocks of 2 n tokens, or the gradients of what belongs to them."""

    prefix: Tensor  # of the right halves, [N C/2n, n, S]
    keys: Tensor  # khat * suffix of the left halves, [N C/2n, n, S]
    other: Tensor  # all gates of the other half multiplied, for left and right, [N C/2n, 2, S]


class Memory(NamedTuple):
    """The states that the tokens of a chunk see."""

    start: Tensor
    h: Tensor | None = None
    a: Tensor | None = None
    levels: tuple[Level, ...] = ()
    share: Tensor | None = None  # of S_0 in each state; None before anything is written


def remember(
    start: Tensor, h: Tensor, khat: Tensor, gate: Tensor, a: Tensor | None = None
) -> Memory:
    """Build the tree over the writes of a chunk; `a` makes it Eq. 15."""
    keys, share, full = khat.clone(), torch.ones_like(khat), gate
    levels, size = [], 1
    while size < khat.shape[1]:
        keys_left, share_right = halves(keys, size)[0], halves(share, size)[1]
        other = full.view(-1, 2, full.shape[-1]).flip(1)
        levels.append(Level(share_right.clone(), keys_left.clone(), other))
        keys_left *= other[:, :1]
        share_right *= other[:, 1:]
        full, size = other[:, :1] * other[:, 1:], 2 * size
    for level in levels if a is not None else ():
        added = (half(a, level, 0) * level.keys).sum(1, keepdim=True)
        half(share, level, 1).addcmul_(level.prefix, added)
    return Memory(start, h, a, tuple(levels), share)


def read(memory: Memory, q: Tensor) -> Tensor:
    """Return S_{t-1} q_t."""
    if memory.share is None:
        return bmm(q, memory.start.mT)
    y = bmm(q * memory.share, memory.start.mT)
    for level in memory.levels:
        scores = bmm(half(q, level, 1) * level.prefix, level.keys.mT)
        half(y, level, 1).sub_(product(scores, half(memory.h, level, 0)))
    return y


def recall(memory: Memory, g: Tensor) -> Tensor:
    """Return S_{t-1}^T g_t."""
    x = bmm(g, memory.start)
    if memory.share is None:
        return x
    x *= memory.share
    for level in memory.levels:
        scores = bmm(half(g, level, 1), half(memory.h, level, 0).mT)
        half(x, level, 1).addcmul_(level.prefix, product(scores, level.keys), value=-1)
    return x


class MemoryGradient:
    """The gradient of a memory, added up over what was read from it."""

    def __init__(self, memory: Memory, dstart: Tensor) -> None:
        """Start from zero; the gradient of S_0 is added to `dstart` in place."""
        self.memory, self.start = memory, dstart
        self.h, self.share = torch.zeros_like(memory.h), torch.zeros_like(memory.share)
        self.levels = [
            level._replace(prefix=torch.zeros_like(level.prefix), keys=torch.zeros_like(level.keys))
            for level in memory.levels
        ]

    def add(self, g: Tensor, r: Tensor) -> Tensor:
        """Add g_t r_t^T, the gradient of the state that token t sees; return S_{t-1}^T g_t."""
        memory = self.memory
        x = bmm(g, memory.start)
        self.start.baddbmm_(g.mT, r * memory.share)
        self.share.addcmul_(r, x)
        x *= memory.share
        for level, gradient in zip(memory.levels, self.levels, strict=True):
            g_right, r_right = half(g, level, 1), half(r, level, 1)
            scores = bmm(g_right, half(memory.h, level, 0).mT).neg_()
            moved, recalled = r_right * level.prefix, product(scores, level.keys)
            half(x, level, 1).addcmul_(level.prefix, recalled)
            gradient.prefix.addcmul_(r_right, recalled)
            gradient.keys.add_(product(scores.mT, moved))
            half(self.h, level, 0).sub_(product(bmm(level.keys, moved.mT), g_right))
        return x

    def of_writes(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return the gradients of h, a, khat and gate."""
        dkeys, dprefix, da = torch.zeros_like(self.share), self.share, None
        if self.memory.a is not None:
            dprefix, da = self.share.clone(), torch.zeros_like(self.share)
            self._add_eq_15(self.memory.a, da)
        dfull = torch.zeros_like(dkeys[:, :1])
        for level, gradient in zip(self.memory.levels[::-1], self.levels[::-1], strict=True):
            dprefix_right = half(dprefix, level, 1)
            dleft = (dprefix_right * level.prefix).sum(1)
            dprefix_right.mul_(level.other[:, 1:]).add_(gradient.prefix)
            dfull = descend(level, dkeys, dfull, dleft)
            half(dkeys, level, 0).add_(gradient.keys)
        return self.h, da, dkeys, dfull.view_as(dkeys)

    def _add_eq_15(self, a: Tensor, da: Tensor) -> None:
        for level, gradient in zip(self.memory.levels, self.levels, strict=True):
            dshare, a_left = half(self.share, level, 1), half(a, level, 0)
            gradient.prefix.addcmul_(dshare, (a_left * level.keys).sum(1, keepdim=True))
            dadded = (dshare * level.prefix).sum(1, keepdim=True)
            gradient.keys.addcmul_(dadded, a_left)
            half(da, level, 0).addcmul_(dadded, level.keys)


class Last(NamedTuple):
    """What S_C is made of: S_0 * share - h^T keys."""

    keys: Tensor  # khat times all gates behind it
    share: Tensor  # [N, 1, S]


def last(khat: Tensor, gate: Tensor, a: Tensor | None = None) -> Last:
    """Multiply up the gates to the end of the chunk; `a` makes it Eq. 15."""
    gates = gate.flip(1).cumprod(1).flip(1)  # from a token to the end
    keys, share = khat.clone(), gates[:, :1]
    keys[:, :-1].mul_(gates[:, 1:])
    return Last(keys, share if a is None else share + (a * keys).sum(1, keepdim=True))


def last_state(start: Tensor, h: Tensor, end: Last) -> Tensor:
    """Return S_C."""
    return torch.baddbmm(start * end.share, h.mT, end.keys, alpha=-1)


def last_state_backward(
    memory: Memory, end: Last, dlast: Tensor
) -> tuple[tuple[Tensor, Tensor | None, Tensor, Tensor], Tensor]:
    """Return the gradients of h, a, khat and gate, and that of S_0."""
    dkeys, dfull = bmm(memory.h, dlast).neg_(), (dlast * memory.start).sum(1, keepdim=True)
    da = None
    if memory.a is not None:
        da = dfull * end.keys
        dkeys.addcmul_(dfull, memory.a)
    for level in memory.levels[::-1]:
        dfull = descend(level, dkeys, dfull)
    dh = bmm(end.keys, dlast.mT).neg_()
    return (dh, da, dkeys, dfull.view_as(dkeys)), dlast * end.share


def descend(level: Level, dkeys: Tensor, dfull: Tensor, dleft: Tensor | None = None) -> Tensor:
    """Go down a level: turn the gradients of its keys (in place) and gates into its halves'."""
    dkeys_left = half(dkeys, level, 0)
    dfull = dfull * level.other
    dfull[:, 1].add_((dkeys_left * level.keys).sum(1))
    if dleft is not None:
        dfull[:, 0].add_(dleft)
    dkeys_left.mul_(level.other[:, :1])
    return dfull.view(-1, 1, dfull.shape[-1])


def product(scores: Tensor, x: Tensor) -> Tensor:
    """Return scores @ x; up to two tokens by hand, ten times as fast as tiny matrix products."""
    if x.shape[1] > 2:
        return bmm(scores, x)
    y = scores[..., :1] * x[:, :1]
    return y if x.shape[1] == 1 else y.addcmul_(scores[..., 1:], x[:, 1:])


def halves(x: Tensor, size: int) -> tuple[Tensor, ...]:
    """Return views [N C/2n, n, ...] of the left and the right halves of all blocks."""
    return x.view(-1, 2, size, x.shape[-1]).unbind(1)


def half(x: Tensor, level: Level, side: int) -> Tensor:
    """Return the left (0) or right (1) halves of the blocks of a level."""
    return x.view(-1, 2, level.keys.shape[1], x.shape[-1])[:, side]
