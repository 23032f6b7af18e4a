"""What the tokens of Lattice chunks write and read, forward and backward.

Formulas and letters are those of reference/lattice.py, the states those of lattice_memory.py. All
tensors are [N, C, V], [N, C, S] or [N, C, 1] for N independent chunks, and S_0 is [N, V, S].
"""

from typing import NamedTuple

import torch
from torch import Tensor, bmm

from seqmix.chunked.lattice_memory import (
    Last,
    Memory,
    MemoryGradient,
    last,
    last_state_backward,
    read,
    recall,
    remember,
)


class Rule(NamedTuple):
    """The options of the operation."""

    objective: str
    form: str
    norm: str
    sweeps: int


class Tokens(NamedTuple):
    """The inputs of writing, or their gradients."""

    k: Tensor
    v: Tensor
    gamma: Tensor
    mu: Tensor


class Write(NamedTuple):
    """What a token writes, and the steps to it."""

    h: Tensor
    square: Tensor  # |h|^2
    found: Tensor  # S^T h
    a: Tensor  # the same, clamped
    c: Tensor
    step: Tensor  # gamma c
    orthogonal: Tensor | None  # |h|^2 - a^2
    b: Tensor | None  # None is 1
    khat: Tensor
    gate: Tensor


class Sweep(NamedTuple):
    """The states that tokens saw, and what they wrote."""

    seen: Memory
    write: Write


class Trace(NamedTuple):
    """All that lies between S_0 and S_C."""

    tokens: Tokens
    sweeps: tuple[Sweep, ...]
    clamped: tuple[Tensor | None, ...]  # where a is not what was found; None is nowhere
    memory: Memory
    last: Last


WriteGradient = tuple[Tensor, Tensor | None, Tensor, Tensor]  # of h, a (Eq. 15 only), khat, gate


def go_through(start: Tensor, tokens: Tokens, rule: Rule) -> tuple[Sweep, ...]:
    """Sweep over a chunk `rule.sweeps` times; each sweep sees what the one before wrote."""
    sweeps = [Sweep(Memory(start), write(Memory(start), tokens, rule))]
    while len(sweeps) < rule.sweeps:
        seen = remembered(start, sweeps[-1].write, rule)
        sweeps.append(Sweep(seen, write(seen, tokens, rule)))
    return tuple(sweeps)


def write(seen: Memory, tokens: Tokens, rule: Rule) -> Write:
    """Return what tokens write that see these states."""
    k, v, gamma, mu = tokens
    h = read(seen, k).sub_(v) if rule.objective == "dec" else v if rule.objective == "enc" else -v
    length = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    found = recall(seen, h)
    square, a = length.square(), found.clamp(-length, length)
    c = a - k if rule.objective == "enc" else k
    step = khat = gamma * c
    orthogonal, b, gate = None, None, mu
    if rule.norm == "token":
        orthogonal = torch.addcmul(square, a, a, value=-1)
        b = torch.addcmul(mu.square(), step.square(), orthogonal).rsqrt_()
        khat, gate = step * b, mu * b
    if rule.form == "gated":
        gate = torch.addcmul(gate, a, khat)
    gate = gate.expand_as(khat).contiguous()
    return Write(h, square, found, a, c, step, orthogonal, b, khat, gate)


def write_backward(
    w: Write, tokens: Tokens, rule: Rule, clamped: Tensor | None, dwrite: WriteGradient
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of h (but for S^T h), S^T h, gamma c and mu."""
    dh, da, dkhat, dgate = dwrite
    dmu, dsquare = dgate, torch.zeros_like(w.square)
    if rule.form == "gated":
        da, dkhat = dgate * w.khat, torch.addcmul(dkhat, dgate, w.a)
    dstep = dkhat
    if rule.norm == "token":
        dpower = torch.addcmul(dgate * tokens.mu, dkhat, w.step).mul_(w.b.pow(3))  # of -1/2 b^-2
        dmu = torch.addcmul(dgate * w.b, dpower, tokens.mu, value=-1)
        dstep = torch.addcmul(dkhat * w.b, dpower, w.step * w.orthogonal, value=-1)
        dpower *= w.step.square()
        da = torch.addcmul(da, dpower, w.a)
        dsquare = dpower.sum(-1, keepdim=True).mul_(-0.5)
    if rule.objective == "enc":
        da = torch.addcmul(da, dstep, tokens.gamma)
    if clamped is not None:  # a = +-|h|
        stuck = (da * w.a).masked_fill_(~clamped, 0.0).sum(-1, keepdim=True)
        dsquare += stuck / (2 * w.square).clamp_min(torch.finfo(da.dtype).tiny)
        da = da.masked_fill(clamped, 0.0)
    return torch.addcmul(dh, w.h, dsquare, value=2), da, dstep, dmu.sum(-1, keepdim=True)


def remembered(start: Tensor, w: Write, rule: Rule) -> Memory:
    """Return the states that the writes make, as the tokens see them."""
    return remember(start, w.h, w.khat, w.gate, w.a if rule.form == "frozen" else None)


def ending(w: Write, rule: Rule) -> Last:
    """Return what the writes make of S_C."""
    return last(w.khat, w.gate, w.a if rule.form == "frozen" else None)


def outputs(memory: Memory, w: Write, q: Tensor) -> Tensor:
    """Return S_t q_t: what t saw, gated, and its own write."""
    y = read(memory, q * w.gate)
    if memory.a is not None:
        y += bmm(q * w.a * w.khat, memory.start.mT)
    return y.addcmul_((q * w.khat).sum(-1, keepdim=True), w.h, value=-1)


def outputs_backward(
    memory: Memory, w: Write, q: Tensor, dy: Tensor
) -> tuple[Tensor, WriteGradient, Tensor]:
    """Return the gradients of q, of the writes and of S_0."""
    gradient = MemoryGradient(memory, torch.zeros_like(memory.start))
    x = gradient.add(dy, q * w.gate)
    dh, da, dkhat, dgate = gradient.of_writes()
    own = (dy * w.h).sum(-1, keepdim=True).neg_()
    dq = torch.addcmul(x * w.gate, own, w.khat)
    dh.addcmul_((q * w.khat).sum(-1, keepdim=True), dy, value=-1)
    dkhat.addcmul_(own, q)
    dgate.addcmul_(x, q)
    if da is not None:
        x = bmm(dy, memory.start)
        dq.addcmul_(x * w.a, w.khat)
        gradient.start.baddbmm_(dy.mT, q * w.a * w.khat)
        da.addcmul_(x * q, w.khat)
        dkhat.addcmul_(x * q, w.a)
    return dq, (dh, da, dkhat, dgate), gradient.start


def trace(start: Tensor, tokens: Tokens, rule: Rule) -> Trace:
    """Go forward and keep all that the way back needs."""
    sweeps = go_through(start, tokens, rule)
    w = sweeps[-1].write
    clamped = (x.write.found != x.write.a for x in sweeps)
    clamped = tuple(x if bool(x.any()) else None for x in clamped)
    return Trace(tokens, sweeps, clamped, remembered(start, w, rule), ending(w, rule))


def trace_backward(
    trace: Trace, rule: Rule, dlast: Tensor, dwrite: WriteGradient, dstart: Tensor
) -> tuple[tuple[tuple[Tensor, Tensor, Tensor], ...], Tensor]:
    """Return the gradients of every sweep's h, gamma c and mu, and of S_0.

    dlast is the gradient of S_C, dwrite and dstart are those that come from the outputs.
    """
    more, dstart_too = last_state_backward(trace.memory, trace.last, dlast)
    dwrite = tuple(None if x is None else x + y for x, y in zip(dwrite, more, strict=True))
    dstart, found = dstart_too.add_(dstart), []
    for (seen, w), clamped in zip(trace.sweeps[::-1], trace.clamped[::-1], strict=True):
        dh, da, dstep, dmu = write_backward(w, trace.tokens, rule, clamped, dwrite)
        dh += read(seen, da)
        found.append((dh, dstep, dmu))
        pairs = [(w.h, da), (dh, trace.tokens.k)][: 2 if rule.objective == "dec" else 1]
        if seen.share is None:
            for g, r in pairs:
                dstart.baddbmm_(g.mT, r)
        else:
            gradient = MemoryGradient(seen, dstart)
            for g, r in pairs:
                gradient.add(g, r)
            dwrite = gradient.of_writes()
    return tuple(found[::-1]), dstart


def tokens_backward(
    trace: Trace, rule: Rule, found: tuple[tuple[Tensor, Tensor, Tensor], ...]
) -> Tokens:
    """Return the gradients of the tokens from those of every sweep's h, gamma c and mu."""
    total = Tokens(*map(torch.zeros_like, trace.tokens))
    for (seen, w), (dh, dstep, dmu) in zip(trace.sweeps, found, strict=True):
        sign = -1 if rule.objective == "enc" else 1
        total.k.addcmul_(dstep, trace.tokens.gamma, value=sign)
        if rule.objective == "dec":
            total.k.add_(recall(seen, dh))
        total.v.sub_(dh, alpha=sign)
        total.gamma.add_((dstep * w.c).sum(-1, keepdim=True))
        total.mu.add_(dmu)
    return total
