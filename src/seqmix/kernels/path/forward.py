"""Forward kernel of PaTH attention: one loop nest from the diagonal to the first token.

A tile of queries first reads its own blocks with the local formula (prepare.py has the letters)

    logits = lower(Q K^T) - lower(Q W^T) UE        Q <- Q - lower(Q W^T) UW

which moves it to the left edge of its tile. From there it walks left over the largest aligned
segment that ends where it stands: reads the keys aligned to the segment's right edge, then
crosses it, Q <- Q + Q (F - I)^T. Softmax is online, in base 2, with scale log2(e) folded into Q.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqmix.kernels.compiling import compiles_together, kernel
from seqmix.kernels.path.gate import LOG2E, Gate, summed
from seqmix.kernels.path.layout import Documents, documents
from seqmix.kernels.path.prepare import Prepared, padded, prepare, rows
from seqmix.kernels.path.tiles import Tile, forward_tile, sizes


@triton.jit
def read(s, values, high, total, sums, dtype: tl.constexpr):
    """One step of the online softmax: logits s in base 2, -inf where masked."""
    top = tl.maximum(high, tl.max(s, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    decay = tl.exp2(high - safe)
    total = total * decay + tl.sum(p, 1)
    sums = tl.dot(p.to(dtype), values, sums * decay[:, None], input_precision="tf32x3")
    return top, total, sums


@kernel
def path_forward_kernel(
    q, k, v, w, gate, gates, keys, transitions, corner, solved, y, lse, table, offsets, first,
    tokens, row, stride, N, H, G, scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr,
    S1, S2, M: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * H): HEADS heads side by side, their longest tiles first.

    One program: M query rows of one head; accumulates in float32; writes y and lse (natural).
    gate, gates, stride: module gate.py.
    """
    grid = tl.num_programs(0) // H * HEADS
    entry = tl.program_id(0) % grid // HEADS
    h = tl.program_id(0) // grid * HEADS + tl.program_id(0) % HEADS
    g = (h // (H // G)).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    position = tl.load(table + 2 * entry + 1) * M
    begin = tl.load(offsets + document)
    end = tl.load(offsets + document + 1)
    dtype: tl.constexpr = keys.dtype.element_ty

    channel = tl.arange(0, P)
    lane = tl.arange(0, C)
    value = tl.arange(0, PV)
    query = begin + position + tl.arange(0, M)
    alive = query < end
    qq = (
        tl.load(
            q + (query * H + h)[:, None] * K + channel[None, :],
            mask=alive[:, None] & (channel < K)[None, :],
            other=0.0,
        ).to(tl.float32)
        * scale
    )
    high = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, PV], tl.float32)
    if GATED:
        gate += (begin // row * H + h) * row - begin // row * row + begin
        gates += h.to(tl.int64) * stride + tl.load(first + document) * 64
        here = tl.load(gate + position)

    side = tl.arange(0, 64)
    for back in tl.range(M // 64, num_stages=1):
        block = begin + position + M - 64 - back * 64
        token = block + side
        living = token < end
        place = (token * G + g)[:, None]
        mask = living[:, None] & (channel < K)[None, :]
        kk = tl.load(k + place * K + channel[None, :], mask=mask, other=0.0).to(dtype)
        ww = tl.load(w + place * K + channel[None, :], mask=mask, other=0.0).to(dtype)
        vv = tl.load(
            v + place * V + value[None, :],
            mask=living[:, None] & (value < V)[None, :],
            other=0.0,
        )
        slot = (tl.load(first + document) + (block - begin) // 64).to(tl.int64) * G + g
        there = (side[:, None] >= 0) & (block < end)  # no branch: it would serialise every product
        square = slot * 4096 + side[:, None] * 64 + side[None, :]
        ue = tl.load(corner + square, mask=there, other=0.0)
        uw = tl.load(
            solved + slot * 64 * P + side[:, None] * P + channel[None, :], mask=there, other=0.0
        )
        causal = query[:, None] >= token[None, :]
        qh = qq.to(dtype)
        b = tl.dot(qh, tl.trans(ww), input_precision="tf32x3")
        b = tl.where(causal, b, 0.0).to(dtype)
        s = tl.dot(qh, tl.trans(kk), input_precision="tf32x3")
        s = tl.dot(b, ue, s, input_precision="tf32x3")
        qq = tl.dot(b, uw, qq, input_precision="tf32x3")
        if GATED:
            ages = here - tl.load(gate + token - begin, mask=living, other=0.0)
            s += (ages * 1.4426950408889634).to(tl.float32)[None, :]
        s = tl.where(causal, s, float("-inf"))
        high, total, sums = read(s, vv, high, total, sums, v.dtype.element_ty)

    steps = position % S1 // 64 + position % S2 // S1 + position // S2
    for _ in range(steps):
        near = position % S1 != 0
        middle = position % S2 != 0
        size = tl.where(near, 64, tl.where(middle, S1, S2))
        level = tl.where(near, 0, tl.where(middle, 1, 2))
        position -= size
        qh = qq.to(dtype)
        kp = keys + ((level * G + g) * tokens + begin + position) * P
        vp = v + ((begin + position) * G + g) * V
        if GATED:
            gap = here - tl.load(gate + position // S2 * S2)
            age = (gap * 1.4426950408889634).to(tl.float32)
        for j in range(0, size, C):
            kk = tl.load(kp + (j + lane)[:, None] * P + channel[None, :])
            vv = rows(vp, (j + lane) * (G * V), V, PV)
            if GATED:
                closer = age - tl.load(gates + tl.multiple_of(position, 64) + j + lane)
            s = tl.dot(qh, tl.trans(kk), input_precision="tf32x3")
            if GATED:
                s += closer[None, :]
            high, total, sums = read(s, vv, high, total, sums, v.dtype.element_ty)
        if position > 0:
            slot = (tl.load(first + level * N + document) + position // size).to(tl.int64) * G + g
            x = tl.load(transitions + slot * P * P + channel[:, None] * P + channel[None, :])
            qq = tl.dot(qh, tl.trans(x), qq, input_precision="tf32x3")

    sums = sums / total[:, None]
    tl.store(
        y + (query * H + h)[:, None] * V + value[None, :],
        sums.to(y.dtype.element_ty),
        mask=alive[:, None] & (value < V)[None, :],
    )
    top = (high + tl.log2(total)) * 0.6931471805599453
    if GATED:
        top += (tl.load(gate + query - begin, mask=alive, other=0.0) - here).to(tl.float32)
    tl.store(lse + query * H + h, top, mask=alive)


def launch(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, gate: Gate, made: Prepared,
    docs: Documents, levels: tuple[int, int, int], scale: float, tile: Tile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the forward kernel on what `prepare` made: y and lse."""
    H, K = q.shape[2:]
    G, V = v.shape[2:]
    new = q.new_zeros if docs.packed else q.new_empty  # tokens behind the last document
    y, lse = new(*q.shape[:3], V), new(q.shape[:3], dtype=torch.float32)
    tiles = docs.tiles(tile.block)
    path_forward_kernel[(len(tiles) * H,)](
        q, k, v, w, gate.total, gate.near, made.keys, made.transitions, made.corner,
        made.solved, y, lse, tiles.table, docs.offsets, made.first, docs.tokens, docs.row,
        gate.stride, docs.count, H, G,
        scale * LOG2E, K=K, V=V, P=padded(K), PV=padded(V), S1=levels[1], S2=levels[2],
        M=tile.block, C=tile.keys, HEADS=math.gcd(H, tile.heads), GATED=bool(gate),
        **tile.launch,
    )  # fmt: skip
    return y, lse


@compiles_together
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    log_forget: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    tile: Tile | None = None,
    levels: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] and lse [B, T, H] of contiguous inputs [B, T, heads, size]."""
    docs = documents(*q.shape[:2], cu_seqlens, q.device)
    levels = levels or sizes(docs.row)
    tile = tile or forward_tile(max(padded(q.shape[3]), padded(v.shape[3])), q.dtype, q.device)
    made = prepare(k, w, beta, docs, levels)
    gate = summed(log_forget, docs, made, levels)
    return launch(q, k, v, w, gate, made, docs, levels, scale, tile)
