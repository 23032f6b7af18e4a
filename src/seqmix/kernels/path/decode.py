"""Decoding: new queries over folded keys and over the tokens still pending, split over the keys.

Keys of a cache are aligned to a boundary r and stay as they are for up to 64 tokens; the tokens
since are pending, and the query moves to the boundary instead: q' = q - lower(q W^T) U W. Three
launches: the pending tokens and q'; the folded keys in independent pieces; their sum. Query heads
of a group and new tokens are rows of one tile.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqmix.kernels.path.prepare import padded, product, solve

LOG2E = math.log2(math.e)
PENDING = 64  # tokens behind the boundary at most: one block
SPLITS = 64


@triton.jit
def path_decode_near_kernel(
    q, first, k, v, w, beta, log_forget, moved, bias, high, total, sums, T, G, R, pending, scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr, M: tl.constexpr,
    SLOTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Slot 0: the pending tokens. Grid (N * G, tiles of M rows); row r is token r / R, head r % R.

    moved [N, G, rows, P] and bias [N, G, rows]: queries at the boundary, with scale log2(e), and
    the gates behind it. high, total [N, G, rows, SLOTS] and sums [.., PV]: partial softmax. All
    float32.
    """
    n = (tl.program_id(0) // G).to(tl.int64)
    g = tl.program_id(0) % G
    row = tl.program_id(1) * M + tl.arange(0, M)
    rows = tl.num_programs(1) * M
    t = row // R
    h = g * R + row % R
    side = tl.arange(0, 64)
    channel = tl.arange(0, P)
    value = tl.arange(0, PV)
    alive = t < T
    there = (side < pending)[:, None]
    place = ((n * T + t) * (G * R) + h)[:, None] * K + channel[None, :]
    qq = tl.load(q + place, mask=alive[:, None] & (channel < K)[None, :], other=0.0)
    qq = qq.to(tl.float32) * scale
    token = (n * pending + side) * G + g
    place = token[:, None] * K + channel[None, :]
    ww = tl.load(w + place, mask=there & (channel < K)[None, :], other=0.0).to(tl.float32)
    kk = tl.load(k + place, mask=there & (channel < K)[None, :], other=0.0).to(tl.float32)
    bb = tl.load(beta + token, mask=side < pending, other=0.0).to(tl.float32)

    strict = side[:, None] > side[None, :]
    seen = side[None, :] <= (tl.load(first + n) + t)[:, None]
    gram = product(ww, tl.trans(ww), False)
    u = solve(tl.where(strict, bb[:, None] * gram, 0.0), bb, False)
    qu = product(tl.where(seen, product(qq, tl.trans(ww), False), 0.0), u, False)
    e = tl.where(strict, product(ww, tl.trans(kk), False), 0.0)
    s = product(qq, tl.trans(kk), False) - product(qu, e, False)
    qq -= product(qu, ww, False)
    if GATED:
        place = (n * pending + side)[None, :] * (G * R) + h[:, None]
        gate = tl.load(log_forget + place, mask=seen & (side < pending)[None, :], other=0.0)
        gate = gate.to(tl.float32) * 1.4426950408889634
        behind = tl.sum(gate, 1)
        s += behind[:, None] - tl.cumsum(gate, 1)
    else:
        behind = tl.zeros([M], tl.float32)
    s = tl.where(seen & (side < pending)[None, :], s, float("-inf"))
    top = tl.max(s, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    vv = tl.load(v + token[:, None] * V + value[None, :], mask=there & (value < V)[None, :],
                 other=0.0).to(tl.float32)  # fmt: skip
    out = (n * G + g) * rows + row
    tl.store(moved + out[:, None] * P + channel[None, :], qq)
    tl.store(bias + out, behind)
    tl.store(high + out * SLOTS, top)
    tl.store(total + out * SLOTS, tl.sum(p, 1))
    tl.store(sums + out[:, None] * SLOTS * PV + value[None, :], product(p, vv, False))


@triton.jit
def path_decode_far_kernel(
    keys, values, decay, length, moved, bias, high, total, sums, F, G, R, piece,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr, M: tl.constexpr,
    C: tl.constexpr, SLOTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Slot 1 + i: folded tokens i piece ... (i + 1) piece. Grid (N * G, tiles, pieces)."""
    n = (tl.program_id(0) // G).to(tl.int64)
    g = tl.program_id(0) % G
    row = tl.program_id(1) * M + tl.arange(0, M)
    rows = tl.num_programs(1) * M
    h = g * R + row % R
    dtype: tl.constexpr = keys.dtype.element_ty
    lane = tl.arange(0, C)
    channel = tl.arange(0, P)
    value = tl.arange(0, PV)
    here = (n * G + g) * rows + row
    qh = tl.load(moved + here[:, None] * P + channel[None, :]).to(dtype)
    behind = tl.load(bias + here)
    top = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, PV], tl.float32)
    start = tl.program_id(2) * piece
    stop = tl.minimum(start + piece, tl.load(length + n).to(tl.int32))
    for j in range(start, stop, C):
        real = j + lane < stop
        token = (n * F + j + lane) * G + g
        kk = tl.load(keys + token[:, None] * K + channel[None, :],
                     mask=real[:, None] & (channel < K)[None, :], other=0.0)  # fmt: skip
        vv = tl.load(values + token[:, None] * V + value[None, :],
                     mask=real[:, None] & (value < V)[None, :], other=0.0)  # fmt: skip
        s = tl.dot(qh, tl.trans(kk), input_precision="tf32x3") + behind[:, None]
        if GATED:
            place = (n * F + j + lane)[None, :] * (G * R) + h[:, None]
            gate = tl.load(decay + place, mask=real[None, :], other=0.0).to(tl.float32)
            s += gate * 1.4426950408889634
        s = tl.where(real[None, :], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        fall = tl.exp2(top - new)
        weight = weight * fall + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype.element_ty), vv, acc * fall[:, None],
                     input_precision="tf32x3")  # fmt: skip
        top = new
    out = here * SLOTS + 1 + tl.program_id(2)
    tl.store(high + out, top)
    tl.store(total + out, weight)
    tl.store(sums + out[:, None] * PV + value[None, :], acc)


@triton.jit
def path_decode_sum_kernel(
    high, total, sums, y, T, G, R, rows,
    V: tl.constexpr, PV: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y [N, T, H, V] from the slots. Grid (N * G * T * R)."""
    r = tl.program_id(0) % (T * R)
    g = tl.program_id(0) // (T * R) % G
    n = (tl.program_id(0) // (T * R * G)).to(tl.int64)
    slot = tl.arange(0, WIDE)
    value = tl.arange(0, PV)
    line = ((n * G + g) * rows + r) * SLOTS
    top = tl.load(high + line + slot, mask=slot < SLOTS, other=float("-inf"))
    part = tl.exp2(top - tl.max(top, 0))
    weight = tl.sum(part * tl.load(total + line + slot, mask=slot < SLOTS, other=0.0), 0)
    acc = tl.load(sums + (line + slot)[:, None] * PV + value[None, :],
                  mask=(slot < SLOTS)[:, None], other=0.0)  # fmt: skip
    out = tl.sum(acc * part[:, None], 0) / weight
    place = ((n * T + r // R) * (G * R) + g * R + r % R) * V
    tl.store(y + place + value, out.to(y.dtype.element_ty), mask=value < V)


def decode(
    q: Tensor, first: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor,
    log_forget: Tensor | None, keys: Tensor, values: Tensor, decay: Tensor | None,
    length: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """y [N, T, H, V] of the pending tokens first[n], first[n] + 1, ... of each row; contiguous.

    k, v, w [N, P, G, size], beta [N, P, G] and log_forget [N, P, H]: pending tokens, P <= 64.
    keys, values [N, F, G, size] and decay [N, F, H]: folded tokens, of which row n has length[n].
    """
    N, T, H, K = q.shape
    G, V = v.shape[2:]
    R, F = H // G, keys.shape[1]
    P, PV = padded(K), padded(V)
    M = 16 if T * R <= 16 else 64  # rows of a tile; products need 16
    tiles = -(-T * R // M)
    tile = 32 if keys.dtype == torch.float32 or P > 128 else 64
    pieces = max(1, min(SPLITS, -(-F // 256), -(-264 // max(1, N * G * tiles))))
    piece = -(-max(F, 1) // (pieces * tile)) * tile
    slots = pieces + 1
    wide = {"device": q.device, "dtype": torch.float32}
    moved = torch.empty(N, G, tiles * M, P, **wide)
    bias = torch.empty(N, G, tiles * M, **wide)
    high, total = (torch.empty(N, G, tiles * M, slots, **wide) for _ in range(2))
    sums = torch.empty(N, G, tiles * M, slots, PV, **wide)
    y = torch.empty(N, T, H, V, device=q.device, dtype=q.dtype)
    size = {"K": K, "V": V, "P": P, "PV": PV, "M": M, "SLOTS": slots}
    path_decode_near_kernel[(N * G, tiles)](
        q, first, k, v, w, beta, log_forget, moved, bias, high, total, sums, T, G, R, k.shape[1],
        scale * LOG2E, **size, GATED=log_forget is not None, num_warps=4, num_stages=1,
    )  # fmt: skip
    path_decode_far_kernel[(N * G, tiles, pieces)](
        keys, values, decay, length, moved, bias, high, total, sums, F, G, R, piece, **size,
        C=tile, GATED=decay is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    path_decode_sum_kernel[(N * G * T * R,)](
        high, total, sums, y, T, G, R, tiles * M, V=V, PV=PV, SLOTS=slots,
        WIDE=triton.next_power_of_2(slots), num_warps=4,
    )  # fmt: skip
    return y
