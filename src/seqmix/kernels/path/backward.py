"""Backward pass of PaTH attention: every gradient, deterministic, memory linear in T.

Nothing is saved but y and lse. Keys, transitions and queries are made anew, queries at the left
edge of their segment of each level as keys at the right edge; spans (spans.py) join the two.
Query tiles then walk right (queries.py), key tiles walk left (dkv.py), transitions collect what
crossed them, and the gradient of each block goes through its solve (blocks.py). All that is
scratch; where there is much of it, key heads take turns in it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmix.kernels.compiling import compiles_together
from seqmix.kernels.path.blocks import path_pairs_back_kernel, path_solve_back_kernel
from seqmix.kernels.path.dkv import path_dkv_kernel
from seqmix.kernels.path.gate import LOG2E, gradient, summed
from seqmix.kernels.path.layout import Documents, Tiles, documents
from seqmix.kernels.path.prepare import Prepared, padded, prepare
from seqmix.kernels.path.queries import path_dq_kernel, path_queries_kernel
from seqmix.kernels.path.spans import (
    Spans,
    make_spans,
    path_gather_kernel,
    path_move_back_kernel,
)
from seqmix.kernels.path.tiles import Backward, backward_tiles, sizes
from seqmix.kernels.path.wide import move_back, scale_down

# Bytes of scratch at most, a byte of q; a third of it costs a fifth more time. And blocks times
# key heads of a launch at least, to keep a GPU busy.
SCRATCH, LAUNCH = 22, 1024


def scaling(dy: Tensor, v: Tensor) -> Tensor:
    """The power of two that brings gradients of logits below 2^15, so that float16 holds them.

    |ds| <= p |dp - delta| <= 2 V max|dy| max|v|. float32 inputs need none.
    """
    if v.dtype == torch.float32:
        return torch.ones((), device=v.device)
    bound = 1.0
    for x in (dy, v):
        bound = bound * torch.linalg.vector_norm(x, ord=math.inf).float()
    bound = (bound * v.shape[-1]).clamp(min=1e-30)
    return torch.exp2(torch.floor(14 - torch.log2(bound)))


@dataclass(frozen=True)
class Call:
    """What all heads of a call share; every: its key heads; factor: see `scaling`."""

    docs: Documents
    levels: tuple[int, int, int]
    tiles: Backward
    scale: float
    every: int
    factor: Tensor


def heads_at_once(q: Tensor, v: Tensor, docs: Documents, levels: tuple[int, int, int]) -> int:
    """Key heads whose scratch stays within `SCRATCH`, but no fewer than `LAUNCH` asks for."""
    H, K = q.shape[2:]
    G, V = v.shape[2:]
    P, PV, R = padded(K), padded(V), H // G
    size = 4 if q.dtype == torch.float32 else 2
    slots = levels[1] // 64 + levels[2] // levels[1] - 2 + docs.row // levels[2]
    square = P * P / 64
    token = (4 * P + 128 + 3.5 * square) * size  # keys, solves, transitions, spans
    token += R * ((3 * P + PV) * size + 4 * P)  # queries, dy, dleft
    token += R * slots * square * 256 / levels[1] + 12 * P + 4 * PV  # partial, dkeys, dvalues
    most = int(SCRATCH * q.numel() * q.element_size() / (token * docs.tokens))
    least = LAUNCH * 64 // docs.tokens
    fitting = [d for d in range(1, G + 1) if G % d == 0 and d <= max(1, most, least)]
    return fitting[-1]


@compiles_together
def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor,
    log_forget: Tensor | None, y: Tensor, lse: Tensor, scale: float, cu_seqlens: Tensor | None,
    tiles: Backward | None = None, levels: tuple[int, int, int] | None = None,
    group: int | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dw, dbeta and dlog_forget (None without a gate) of contiguous inputs.

    group: key heads at once.
    """
    docs = documents(*q.shape[:2], cu_seqlens, q.device)
    levels = levels or sizes(docs.row)
    size = max(padded(q.shape[3]), padded(v.shape[3]))
    tiles = tiles or backward_tiles(size, q.dtype, q.device)
    group = group or heads_at_once(q, v, docs, levels)
    G = k.shape[2]
    dy = dy.to(v.dtype)
    call = Call(docs, levels, tiles, scale, G, scaling(dy, v))
    new = torch.zeros_like if docs.packed else torch.empty_like  # tokens behind the last document
    inputs = (q, k, v, w, beta, log_forget)
    gradients = [x if x is None else new(x) for x in inputs]
    for start in range(0, G, group):

        def turn(*tensors: Tensor | None, start=start) -> list[Tensor | None]:
            """Those heads of [B, T, heads, ...] whose turn it is."""
            views = []
            for x in tensors:
                R = 1 if x is None else x.shape[2] // G
                views.append(x if x is None else x[:, :, start * R : (start + group) * R])
            return views

        _some_heads(call, turn(dy, y, lse), turn(*inputs), turn(*gradients))
    return tuple(gradients)


def _some_heads(call: Call, outputs: list, inputs: list, gradients: list) -> None:
    """Fill the gradients of some heads: views of what the call has."""
    dy, y, lse = outputs
    q, k, v, w, beta, log_forget = inputs
    docs, levels, tiles, every = call.docs, call.levels, call.tiles, call.every
    H, K = q.shape[2:]
    G, V = v.shape[2:]
    P, PV = padded(K), padded(V)
    S1, S2 = levels[1:]
    cuts = [docs.tiles(size) for size in levels]
    blocks, owners, _ = cuts
    made = prepare(k, w, beta, docs, levels, inverse=True, every=every)
    spans = make_spans(made, docs, cuts, levels)
    gate = summed(log_forget, docs, made, levels)
    gated = bool(gate)
    lines, N = (len(blocks) + 1) * 64, docs.count
    size = {"K": K, "V": V, "P": P, "PV": PV}
    wide = {"device": q.device, "dtype": torch.float32}
    queries = torch.empty(3, H, lines, P, device=q.device, dtype=made.keys.dtype)
    outer = torch.empty(H, lines, PV, device=q.device, dtype=v.dtype)
    row_max, delta = (torch.empty(H, lines, **wide) for _ in range(2))
    path_queries_kernel[(len(blocks) * H,)](
        q, w, dy, y, lse, gate.near, call.factor, made.solved, made.transitions, queries, outer,
        row_max, delta, blocks.table, docs.offsets, made.first, lines, N, H, G, every,
        call.scale * LOG2E, **size, S1=S1, S2=S2, GATED=gated, **tiles.queries.launch,
    )  # fmt: skip

    far = (
        v, outer, gate.total, gate.near, call.factor, made.keys, made.transitions, spans.products,
        queries, row_max, delta,
    )  # fmt: skip
    place = (docs.offsets, made.first, spans.base)
    shape = (docs.tokens, docs.row, lines, N, H, G, every)
    width = {"V": V, "P": P, "PV": PV, "S1": S1, "S2": S2, "GATED": gated}
    dleft = torch.empty(H, lines, P, **wide)
    slots = max(1, S1 // 64 + S2 // S1 - 2 + (docs.row - 1) // S2)
    partial = torch.empty(len(owners), H, slots, P, P, **wide)
    dgates = torch.empty(H, lines, **wide) if gated else None
    last = len(tiles.dq) - 1
    for i, tile in enumerate(tiles.dq):
        path_dq_kernel[(len(owners) * H,)](
            *far, dleft, partial, dgates, owners.table, *place, owners.first, *shape, slots,
            **width, M=tile.block, C=tile.keys, FAR=i == 0, NEAR=i == last,
            HEADS=math.gcd(H, tile.heads), **tile.launch,
        )  # fmt: skip
    dkeys = torch.empty(3, G, docs.tokens, P, **wide)
    dvalues = torch.empty(G, docs.tokens, PV, **wide)
    path_dkv_kernel[(len(blocks) * G,)](
        *far, dkeys, dvalues, dgates, blocks.table, *place, *shape, **width, C=tiles.dkv.keys,
        HEADS=math.gcd(G, tiles.dkv.heads), **tiles.dkv.launch,
    )  # fmt: skip
    del queries, far
    cross = _cross_back(call, cuts, made, spans, partial, dkeys)
    del partial, spans
    dq, dk, dv, dw, dbeta, dlog_forget = gradients
    narrow = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    dinner = torch.empty(len(blocks), G, 4, 64, max(P, 64), device=q.device, dtype=narrow)
    place = (blocks.table, docs.offsets, made.first, docs.tokens)
    path_pairs_back_kernel[(len(blocks) * G,)](
        q, k, v, w, outer, gate.near, call.factor, made.corner, made.solved, row_max, delta, dleft,
        dvalues, dgates, dq, dv, dinner, *place, lines, G, every, call.scale * LOG2E, **size,
        GROUP=H // G, GATED=gated, **tiles.pairs.launch,
    )  # fmt: skip
    path_solve_back_kernel[(len(blocks) * G,)](
        k, w, beta, call.factor, made.corner, made.solved, made.inverse, dkeys, *cross, dinner,
        dk, dw, dbeta, *place, G, every, K=K, P=P, **tiles.solve.launch,
    )  # fmt: skip
    if gated:
        found = gradient(dgates, call.factor, log_forget, docs, made.first[0])
        dlog_forget.copy_(found)


def _cross_back(
    call: Call, cuts: list[Tiles], made: Prepared, spans: Spans, partial: Tensor, dkeys: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the transitions of blocks [blocks, G, P, P], and the factors of each."""
    docs, levels = call.docs, call.levels
    blocks, owners, _ = cuts
    rows, G, P, _ = made.transitions.shape
    H, slots = partial.shape[1:3]
    N, part = docs.count, min(P * P, 1024)
    low = 0 if P > 128 else 1  # the kernel adds those of level 0 itself
    before = len(blocks) if low else 0
    far = torch.empty(rows - before, G, P, P, device=partial.device)
    for level in range(low, 3):
        path_gather_kernel[(len(cuts[level]) * G, P * P // part)](
            partial, far, cuts[level].table, docs.offsets, made.first, owners.first, H, G, slots,
            N, *levels[1:], before, LEVEL=level, P=P, C=part, num_warps=4,
        )  # fmt: skip
    if P > 128:
        for level in (2, 1):
            move_back(made, dkeys, far, spans, docs, cuts[level], levels, level)
        return scale_down(far[: len(blocks)], made.transitions.dtype)
    near = torch.empty(before, G, P, P, device=partial.device, dtype=made.transitions.dtype)
    factors = torch.empty(before, G, device=partial.device)
    for level in (2, 1):
        path_move_back_kernel[(len(cuts[level]) * G,)](
            made.keys, dkeys, made.transitions, far, near, factors, partial, spans.products,
            cuts[level].table, docs.offsets, made.first, owners.first, spans.base, docs.tokens, N,
            H, G, slots, before, levels[level - 1], levels[level], LEVEL=level, P=P,
            GROUP=H // G, **call.tiles.move.launch,
        )  # fmt: skip
    return near, factors
