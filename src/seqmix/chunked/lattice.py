"""Lattice in chunks of tokens: any device, explicit backward, memory linear in T.

reference/lattice.py has the equations. Chunks follow each other, all batch rows and heads at once;
each leaves the slots, renormalised, that the next one sees (lattice_chunk.py, lattice_memory.py).
Only that is sequential: outputs, and backward all but the gradient of the slots, are computed for
many chunks at once. At C = 1 the loop is over tokens (lattice_exact.py).
Cost O(T (C (S + V) + V S)) per head and sweep. Backward goes forward once for the slots at the
chunk starts, T / C states, and recomputes the rest on its way back.

Both functions take one sequence per batch row, compute in float32 (float64 if q is float64), and
return every result in the dtype of the input it belongs to. A chunk of nothing but idle tokens
(gamma = 0, mu = 1) leaves the slots untouched, bit by bit, so that rows may end in such tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from seqmix.chunked import lattice_exact
from seqmix.chunked.lattice_chunk import (
    Rule,
    Tokens,
    ending,
    go_through,
    outputs,
    outputs_backward,
    remembered,
    tokens_backward,
    trace,
    trace_backward,
)
from seqmix.chunked.lattice_memory import last_state
from seqmix.chunked.linear import compute_dtype

AT_ONCE = 2048  # tokens times heads, where order does not matter: what fits into the cache


class Chunks(NamedTuple):
    """Consecutive chunks [n, B H, C, S], [n, B H, C, V] or [n, B H, C, 1]."""

    q: Tensor
    dy: Tensor | None
    k: Tensor
    v: Tensor
    gamma: Tensor
    mu: Tensor
    idle: Tensor | None  # whether a chunk writes nothing, [n, B H, 1, 1]; None is never


def forward(
    q: Float[Tensor, "B T H S"],
    k: Float[Tensor, "B T H S"],
    v: Float[Tensor, "B T H V"],
    gamma: Float[Tensor, "B T H"],
    mu: Float[Tensor, "B T H"] | None,
    state: Float[Tensor, "B H V S"],
    objective: str,
    chunk_size: int,
    form: str,
    norm: str,
    sweeps: int,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H V S"]]:
    """Return the outputs and the last state."""
    rule = Rule(objective, form, norm, min(sweeps, chunk_size))
    chunks = cut_inputs(q, None, k, v, gamma, mu, chunk_size)
    slots, y = state.flatten(0, 1).to(chunks.q.dtype), []
    if rule.norm == "token" and chunk_size == 1:
        y, slots = lattice_exact.forward(exact_tokens(chunks), slots.mT.contiguous(), objective)
        return join(y, v.shape, 1).to(q.dtype), slots.mT.contiguous().view(state.shape)
    for group in groups(chunks):
        starts, _ = walk(group, slots, rule)
        slots, start = starts.pop(), torch.cat(starts)
        w = go_through(start, tokens(group), rule)[-1].write
        y.append(outputs(remembered(start, w, rule), w, group.q.flatten(0, 1)))
    return join(torch.cat(y), v.shape, chunk_size).to(q.dtype), slots.view(state.shape)


def backward(
    dy: Float[Tensor, "B T H V"],
    dstate: Float[Tensor, "B H V S"],
    q: Float[Tensor, "B T H S"],
    k: Float[Tensor, "B T H S"],
    v: Float[Tensor, "B T H V"],
    gamma: Float[Tensor, "B T H"],
    mu: Float[Tensor, "B T H"] | None,
    state: Float[Tensor, "B H V S"],
    objective: str,
    chunk_size: int,
    form: str,
    norm: str,
    sweeps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return dq, dk, dv, dgamma, dmu (None without mu) and the gradient of the initial state."""
    rule = Rule(objective, form, norm, min(sweeps, chunk_size))
    chunks = cut_inputs(q, dy, k, v, gamma, mu, chunk_size)
    slots, dslots = (x.flatten(0, 1).to(chunks.q.dtype) for x in (state, dstate))
    if rule.norm == "token" and chunk_size == 1:
        first, dlast = slots.mT.contiguous(), dslots.mT.contiguous()
        by_token = exact_tokens(chunks)
        dinputs, dslots = lattice_exact.backward(chunks.dy, dlast, by_token, first, objective)
        dslots = dslots.mT.contiguous()
    else:
        dinputs, dslots = chunks_backward(chunks, slots, dslots, rule)
    dq, dk, dv, dgamma, dmu = (
        None if like is None else join(x, like.shape, chunk_size).to(like.dtype)
        for x, like in zip(dinputs, (q, k, v, gamma, mu), strict=True)
    )
    return dq, dk, dv, dgamma, dmu, dslots.view(state.shape).to(state.dtype)


def chunks_backward(
    chunks: Chunks, slots: Tensor, dslots: Tensor, rule: Rule
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of q, k, v, gamma and mu, and of the first slots."""
    walks, found = [], []
    for group in groups(chunks):
        walks.append(walk(group, slots, rule))
        slots = walks[-1][0][-1]
    for group in groups(chunks)[::-1]:
        dgroup, dslots = group_backward(group, *walks.pop(), dslots, rule)
        found.append(dgroup)
    return [torch.cat(x[::-1]) for x in zip(*found, strict=True)], dslots


def group_backward(
    group: Chunks, slots: list[Tensor], scales: list[Tensor], dslots: Tensor, rule: Rule
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the same of chunks few enough to be worked on at once, from what `walk` returned."""
    whole = trace(torch.cat(slots[:-1]), tokens(group), rule)
    q, dy, w = group.q.flatten(0, 1), group.dy.flatten(0, 1), whole.sweeps[-1].write
    dq, *from_outputs = outputs_backward(whole.memory, w, q, dy)
    pieces, found = cut_pieces((whole, *from_outputs), len(scales)), []
    for n in reversed(range(len(scales))):
        piece, dwrite, dstart = pieces[n]
        dlast = renormalise_backward(dslots, slots[n + 1], scales[n], idle(group, n))
        dpiece, dslots = trace_backward(piece, rule, dlast, dwrite, dstart)
        found.append(dpiece)
    return (dq, *tokens_backward(whole, rule, join_pieces(found[::-1]))), dslots


def walk(group: Chunks, slots: Tensor, rule: Rule) -> tuple[list[Tensor], list[Tensor]]:
    """Return the slots before every chunk and behind the last, and what renormalised them."""
    starts, scales = [slots], []
    for n, chunk in enumerate(zip(group.k, group.v, group.gamma, group.mu, strict=True)):
        w = go_through(slots, Tokens(*chunk), rule)[-1].write
        slots, scale = renormalise(last_state(slots, w.h, ending(w, rule)), idle(group, n))
        starts.append(slots)
        scales.append(scale)
    return starts, scales


def renormalise(slots: Tensor, idle: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return slots of length one and the scale that made them so; idle ones stay."""
    scale = slots.square().sum(-2, keepdim=True)
    scale = scale.clamp_min_(torch.finfo(scale.dtype).tiny).rsqrt_()
    if idle is not None:
        scale.masked_fill_(idle, 1.0)
    return slots * scale, scale


def renormalise_backward(
    dslots: Tensor, slots: Tensor, scale: Tensor, idle: Tensor | None
) -> Tensor:
    """Return the gradient of the slots before, from the slots behind."""
    along = (dslots * slots).sum(-2, keepdim=True)
    if idle is not None:
        along.masked_fill_(idle, 0.0)
    return torch.addcmul(dslots, slots, along, value=-1).mul_(scale)


def cut_inputs(
    q: Tensor,
    dy: Tensor | None,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    mu: Tensor | None,
    chunk_size: int,
) -> Chunks:
    """Cut the inputs of a call into chunks."""
    mu = torch.ones_like(gamma) if mu is None else mu
    inputs = ((q, 0.0), (dy, 0.0), (k, 0.0), (v, 0.0), (gamma, 0.0), (mu, 1.0))
    chunks = Chunks(*(cut(x, chunk_size, compute_dtype(q), n) for x, n in inputs), None)
    still = ((chunks.gamma == 0) & (chunks.mu == 1)).all(2, keepdim=True)
    return chunks._replace(idle=still) if bool(still.any()) else chunks


def cut(x: Tensor | None, chunk_size: int, dtype: torch.dtype, neutral: float) -> Tensor | None:
    """Cut [B, T, H, ...] into chunks [n, B H, C, ...], filled up to a power of two C."""
    if x is None:
        return None
    size, width = sizes(x.shape[1], chunk_size)
    x = x.reshape(*x.shape[:3], -1).to(dtype)
    if x.shape[1] % size:
        x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size), value=neutral)
    x = x.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4).flatten(1, 2)  # n BH size X
    if width > size:
        x = pad(x, (0, 0, 0, width - size), value=neutral)
    return x.contiguous()


def join(x: Tensor, shape: torch.Size, chunk_size: int) -> Tensor:
    """Put chunks [n B H, C, ...] back together, into [B, T, H, ...] of the given shape."""
    size, width = sizes(shape[1], chunk_size)
    x = x.reshape(-1, shape[0], shape[2], width, x.shape[-1])[:, :, :, :size]  # n B H size X
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : shape[1]].reshape(shape).contiguous()


def sizes(length: int, chunk_size: int) -> tuple[int, int]:
    """Return how many tokens a chunk has, and the next power of two."""
    size = min(length, chunk_size)
    return size, 1 << (size - 1).bit_length()


def groups(chunks: Chunks) -> list[Chunks]:
    """Cut chunks into groups of about AT_ONCE tokens."""
    count = max(1, AT_ONCE // (chunks.q.shape[1] * chunks.q.shape[2]))
    starts = range(0, len(chunks.q), count)
    return [Chunks(*(None if x is None else x[n : n + count] for x in chunks)) for n in starts]


def tokens(group: Chunks) -> Tokens:
    """Return what the chunks of a group write, as a batch."""
    return Tokens(*(x.flatten(0, 1) for x in (group.k, group.v, group.gamma, group.mu)))


def exact_tokens(chunks: Chunks) -> lattice_exact.Tokens:
    """Return chunks of one token as the loop over tokens takes them."""
    return lattice_exact.Tokens(*(x for name, x in chunks._asdict().items() if name != "dy"))


def idle(group: Chunks, n: int) -> Tensor | None:
    """Return where chunk n is idle."""
    return None if group.idle is None else group.idle[n]


def cut_pieces(x: Any, count: int) -> Sequence[Any]:
    """Cut every tensor of a nested tuple into equal pieces along its first dimension."""
    if isinstance(x, Tensor):
        return x.unflatten(0, (count, -1)).unbind(0)
    if not x:
        return [x] * count
    pieces = zip(*(cut_pieces(y, count) for y in x), strict=True)
    return [x._make(piece) if hasattr(x, "_make") else piece for piece in pieces]


def join_pieces(pieces: list[Any]) -> Any:
    """Put pieces of nested tuples of tensors back together."""
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces)
    return tuple(join_pieces(list(x)) for x in zip(*pieces, strict=True))
