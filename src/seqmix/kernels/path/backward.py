"""Backward pass of PaTH attention: every gradient, deterministic, memory linear in T.

Nothing is saved but y and lse. Keys, transitions and queries are made anew, queries at the left
edge of their segment of each level as keys at the right edge; spans (spans.py) join the two.
Query tiles then walk right (queries.py), key tiles walk left (dkv.py), transitions collect what
crossed them, and the gradient of each block goes through its solve (blocks.py).
"""

import math

import torch
from torch import Tensor

from seqmix.kernels.compiling import compiles_together
from seqmix.kernels.path.blocks import path_pairs_back_kernel, path_solve_back_kernel
from seqmix.kernels.path.dkv import path_dkv_kernel
from seqmix.kernels.path.gate import LOG2E, gradient, summed
from seqmix.kernels.path.layout import documents
from seqmix.kernels.path.prepare import padded, prepare
from seqmix.kernels.path.queries import path_dq_kernel, path_queries_kernel
from seqmix.kernels.path.spans import make_spans, path_gather_kernel, path_move_back_kernel
from seqmix.kernels.path.tiles import Backward, backward_tiles, sizes
from seqmix.kernels.path.wide import move_back


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


@compiles_together
def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor,
    log_forget: Tensor | None, y: Tensor, lse: Tensor, scale: float, cu_seqlens: Tensor | None,
    tiles: Backward | None = None, levels: tuple[int, int, int] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dw, dbeta and dlog_forget (None without a gate) of contiguous inputs."""
    H, K = q.shape[2:]
    G, V = v.shape[2:]
    P, PV = padded(K), padded(V)
    docs = documents(*q.shape[:2], cu_seqlens, q.device)
    levels = levels or sizes(docs.row)
    tiles = tiles or backward_tiles(max(P, PV), q.dtype, q.device)
    S1, S2 = levels[1:]
    cuts = [docs.tiles(size) for size in levels]
    blocks, owners, _ = cuts
    made = prepare(k, w, beta, docs, levels, inverse=True)
    spans = make_spans(made, docs, cuts, levels)
    gate = summed(log_forget, docs, made, levels)
    gated, total, gates = bool(gate), gate.total, gate.near
    dy = dy.to(v.dtype)
    factor = scaling(dy, v)
    lines = (len(blocks) + 1) * 64
    shape = (docs.tokens, docs.row, lines, docs.count, H, G)
    size = {"K": K, "V": V, "P": P, "PV": PV}
    wide = {"device": q.device, "dtype": torch.float32}
    N = docs.count

    queries = torch.empty(3, H, lines, P, device=q.device, dtype=made.keys.dtype)
    outer = torch.empty(H, lines, PV, device=q.device, dtype=v.dtype)
    row_max, delta = (torch.empty(H, lines, **wide) for _ in range(2))
    path_queries_kernel[(len(blocks) * H,)](
        q, w, dy, y, lse, gates, factor, made.solved, made.transitions, queries, outer, row_max,
        delta, blocks.table, docs.offsets, made.first, lines, N, H, G, scale * LOG2E,
        **size, S1=S1, S2=S2, GATED=gated, **tiles.queries.launch,
    )  # fmt: skip

    new = torch.zeros_like if docs.packed else torch.empty_like  # tokens behind the last document
    dq, dk, dv, dw, dbeta = (new(x) for x in (q, k, v, w, beta))
    dleft = torch.empty(H, lines, P, **wide)
    slots = S1 // 64 + S2 // S1 - 2 + max(0, -(-docs.row // S2) - 1)
    partial = torch.empty(len(owners), H, max(slots, 1), P, P, **wide)
    dgates = torch.empty(H, lines, **wide) if gated else None
    last = len(tiles.dq) - 1
    for i, tile in enumerate(tiles.dq):
        path_dq_kernel[(len(owners) * H,)](
            v, outer, total, gates, factor, made.keys, made.transitions, spans.products, queries,
            row_max, delta, dleft, partial, dgates, owners.table, docs.offsets, made.first,
            spans.base, owners.first, *shape, slots, V=V, P=P, PV=PV, S1=S1, S2=S2, M=tile.block,
            C=tile.keys, FAR=i == 0, NEAR=i == last, HEADS=math.gcd(H, tile.heads), GATED=gated,
            **tile.launch,
        )  # fmt: skip

    dkeys = torch.empty(3, G, docs.tokens, P, **wide)
    dvalues = torch.empty(G, docs.tokens, PV, **wide)
    path_dkv_kernel[(len(blocks) * G,)](
        v, outer, total, gates, factor, made.keys, made.transitions, spans.products, queries,
        row_max, delta, dkeys, dvalues, dgates, blocks.table, docs.offsets, made.first,
        spans.base, *shape, V=V, P=P, PV=PV, S1=S1, S2=S2, C=tiles.dkv.keys,
        HEADS=math.gcd(G, tiles.dkv.heads), GATED=gated, **tiles.dkv.launch,
    )  # fmt: skip

    dtransitions = torch.empty(made.transitions.shape, **wide)
    part = min(P * P, 1024)
    for level, cut in enumerate(cuts):
        path_gather_kernel[(len(cut) * G, P * P // part)](
            partial, dtransitions, cut.table, docs.offsets, made.first, owners.first, H, G,
            slots, N, S1, S2, level=level, P=P, C=part, num_warps=4,
        )  # fmt: skip
    for level in (2, 1):
        if P > 128:
            move_back(made, dkeys, dtransitions, spans, docs, cuts[level], levels, level)
            continue
        path_move_back_kernel[(len(cuts[level]) * G,)](
            made.keys, dkeys, made.transitions, dtransitions, spans.products, cuts[level].table,
            docs.offsets, made.first, spans.base, docs.tokens, N, G, levels[level - 1],
            levels[level], level, P=P, **tiles.move.launch,
        )  # fmt: skip
    narrow = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    dinner = torch.empty(len(blocks), G, 4, 64, max(P, 64), device=q.device, dtype=narrow)
    path_pairs_back_kernel[(len(blocks) * G,)](
        q, k, v, w, outer, gates, factor, made.corner, made.solved, row_max, delta, dleft, dvalues,
        dgates, dq, dv, dinner, blocks.table, docs.offsets, made.first, docs.tokens,
        lines, G, scale * LOG2E, **size, GROUP=H // G, GATED=gated, **tiles.pairs.launch,
    )  # fmt: skip
    path_solve_back_kernel[(len(blocks) * G,)](
        k, w, factor, made.corner, made.solved, made.inverse, dkeys, dtransitions, dinner,
        dk, dw, dbeta, blocks.table, docs.offsets, made.first, docs.tokens, G, K=K, P=P,
        **tiles.solve.launch,
    )  # fmt: skip
    dlog_forget = None
    if gated:
        dlog_forget = gradient(dgates, factor, log_forget, docs, made.first[0])
    return dq, dk, dv, dw, dbeta, dlog_forget
