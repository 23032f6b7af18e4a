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
from seqmix.kernels.path.gate import LOG2E, Blocks, by_blocks, unit_row
from seqmix.kernels.path.layout import Documents, documents
from seqmix.kernels.path.prepare import Prepared, padded, prepare, rows
from seqmix.kernels.path.tiles import Tile, forward_tile, sizes


@triton.jit
def read(s, values, high, total, sums, age, dtype: tl.constexpr):
    """One step of the online softmax: logits s + age in base 2, -inf where masked."""
    top = tl.maximum(high, tl.max(s, 1) + age)
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - (safe - age)[:, None])
    decay = tl.exp2(high - safe)
    total = total * decay + tl.sum(p, 1)
    sums = tl.dot(p.to(dtype), values, sums * decay[:, None], input_precision="tf32x3")
    return top, total, sums


@kernel
def path_forward_kernel(
    q, k, v, w, gates, parts, keys, transitions, corner, solved, y, lse, table, offsets, first,
    tokens, blocks, N, H, G, scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr,
    S1, S2, M: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * H): HEADS heads side by side, their longest tiles first.

    One program: M query rows of one head; accumulates in float32; writes y and lse (natural).
    gates, parts: module gate.py. Logits are relative to the gates behind the tile's last row: a
    product adds those of a key up to the end of its block, `age` is the blocks behind it.
    EARLY: load a transition before the keys that are read first; worth it where one program has
    the whole multiprocessor.
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
    length = (tl.load(offsets + document + 1) - begin).to(tl.int32)
    base = tl.load(first + document)
    dtype: tl.constexpr = keys.dtype.element_ty
    narrow: tl.constexpr = v.dtype.element_ty

    channel = tl.arange(0, P)
    lane = tl.arange(0, C)
    value = tl.arange(0, PV)
    query = position + tl.arange(0, M)
    alive = query < length
    q += (begin * H + h) * K
    k += (begin * G + g) * K
    w += (begin * G + g) * K
    v += (begin * G + g) * V
    high = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, PV], tl.float32)
    age = 0.0
    if GATED:
        gates += h.to(tl.int64) * blocks + base
        parts += (h.to(tl.int64) * blocks + base) * 1024
        part = tl.arange(0, 16)
        unit = tl.broadcast_to(unit_row(), [M, 16]).to(dtype)
        behind = tl.zeros([], tl.float64)
        shift = tl.zeros([M], tl.float32)

    side = tl.arange(0, 64)
    left = tl.load(
        q + query.to(tl.int64)[:, None] * (H * K) + channel[None, :],
        mask=alive[:, None] & (channel < K)[None, :],
        other=0.0,
    )
    qq = left.to(tl.float32)
    for back in tl.static_range(M // 64):
        block = position + M - 64 - back * 64
        token = block + side
        living = token < length
        line = token.to(tl.int64)[:, None] * G
        mask = living[:, None] & (channel < K)[None, :]
        own = tl.load(k + line * K + channel[None, :], mask=mask, other=0.0)
        ww = tl.load(w + line * K + channel[None, :], mask=mask, other=0.0)
        values = tl.load(
            v + line * V + value[None, :],
            mask=living[:, None] & (value < V)[None, :],
            other=0.0,
        )
        slot = (base + block // 64).to(tl.int64) * G + g
        # A mask of rows, not a branch: that would serialise every product.
        there = (side[:, None] >= 0) & (block < length)
        square = slot * 4096 + side[:, None] * 64 + side[None, :]
        ue = tl.load(corner + square, mask=there, other=0.0)
        uw = tl.load(
            solved + slot * 64 * P + side[:, None] * P + channel[None, :], mask=there, other=0.0
        )
        if back > 0:
            left = qq.to(dtype)
            own = own.to(dtype)
            ww = ww.to(dtype)
        causal = query[:, None] >= token[None, :]
        b = tl.dot(left, tl.trans(ww), input_precision="tf32x3")
        b = tl.where(causal, b, 0.0).to(dtype)
        s = tl.dot(left, tl.trans(own), input_precision="tf32x3")
        s = tl.dot(b, ue, s, input_precision="tf32x3")
        qq = tl.dot(b, uw, qq, input_precision="tf32x3")
        if back == 0:  # the inputs themselves go into the first products: unscaled
            s *= scale
            qq *= scale
        if GATED:
            behind_own = parts + (block + side)[:, None] * 16 + part[None, :]
            behind_own = tl.load(behind_own, mask=there, other=0.0)
            s = tl.dot(unit, tl.trans(behind_own), s, input_precision="tf32x3")
            age = behind.to(tl.float32)
            shift = tl.where(query < block + 64, age, shift)
            behind += tl.load(gates + block // 64, mask=block < length, other=0.0)
        s = tl.where(causal, s, float("-inf"))
        high, total, sums = read(s, values, high, total, sums, age, narrow)

    steps = position % S1 // 64 + position % S2 // S1 + position // S2
    for _ in range(steps):
        near = position % S1 != 0
        middle = position % S2 != 0
        size = tl.where(near, 64, tl.where(middle, S1, S2))
        level = tl.where(near, 0, tl.where(middle, 1, 2))
        position -= size
        qh = qq.to(dtype)
        kp = keys + ((level * G + g) * tokens + begin + position) * P
        vp = v + position.to(tl.int64) * (G * V)
        slot = (tl.load(first + level * N + document) + position // size).to(tl.int64) * G + g
        whole = transitions + slot * P * P + channel[:, None] * P + channel[None, :]
        if EARLY:
            x = tl.load(whole, mask=(channel[:, None] >= 0) & (position > 0), other=0.0)
        for step in range(0, size, C):
            j = size - C - step if GATED else step
            kk = tl.load(kp + (j + lane)[:, None] * P + channel[None, :])
            vv = rows(vp, (j + lane) * (G * V), V, PV)
            far = tl.dot(qh, tl.trans(kk), input_precision="tf32x3")
            if GATED:
                block = position + j
                inner = tl.load(parts + (block + lane)[:, None] * 16 + part[None, :])
                far = tl.dot(unit, tl.trans(inner), far, input_precision="tf32x3")
                age = behind.to(tl.float32)
                gap = tl.load(gates + block // 64)
                behind += gap if C == 64 else tl.where(block % 64 == 0, gap, 0.0)
            high, total, sums = read(far, vv, high, total, sums, age, narrow)
        if EARLY:
            qq = tl.dot(qh, tl.trans(x), qq, input_precision="tf32x3")
        elif position > 0:
            qq = tl.dot(qh, tl.trans(tl.load(whole)), qq, input_precision="tf32x3")

    sums *= (1.0 / total)[:, None]
    tl.store(
        y + ((begin + query) * H + h)[:, None] * V + value[None, :],
        sums.to(y.dtype.element_ty),
        mask=alive[:, None] & (value < V)[None, :],
    )
    top = high + tl.log2(total)
    if GATED:
        inner = tl.load(parts + query[:, None] * 16 + part[None, :], mask=alive[:, None], other=0.0)
        top -= tl.sum(inner.to(tl.float32) * unit_row(), 1) + shift
    tl.store(lse + (begin + query) * H + h, top * 0.6931471805599453, mask=alive)


def launch(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, gate: Blocks, made: Prepared,
    docs: Documents, levels: tuple[int, int, int], scale: float, tile: Tile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the forward kernel on what `prepare` made: y and lse."""
    H, K = q.shape[2:]
    G, V = v.shape[2:]
    new = q.new_zeros if docs.packed else q.new_empty  # tokens behind the last document
    y, lse = new(*q.shape[:3], V), new(q.shape[:3], dtype=torch.float32)
    tiles = docs.tiles(tile.block)
    path_forward_kernel[(len(tiles) * H,)](
        q, k, v, w, gate.sums, gate.parts, made.keys, made.transitions, made.corner,
        made.solved, y, lse, tiles.table, docs.offsets, made.first, docs.tokens,
        made.corner.shape[0], docs.count, H, G,
        scale * LOG2E, K=K, V=V, P=padded(K), PV=padded(V), S1=levels[1], S2=levels[2],
        M=tile.block, C=tile.keys, HEADS=math.gcd(H, tile.heads), GATED=bool(gate),
        EARLY=tile.early, **tile.launch,
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
    gate = by_blocks(log_forget, docs, made)
    return launch(q, k, v, w, gate, made, docs, levels, scale, tile)
