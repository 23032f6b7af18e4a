"""Decoding: new queries over folded keys and over the tokens still pending, split over the keys.

Keys of a cache are aligned to a boundary r and stay as they are for up to 64 tokens; the tokens
since are pending, and the query moves to the boundary instead: q' = q - lower(q W^T) U W. First the
pending tokens and q', from their solution (here) or from one kept since (step.py); then the folded
keys in independent pieces. Where few rows wait for them, the piece that ends last sums up all, in
their order; another kernel does elsewhere. Query heads of a group and new tokens are rows of one
tile.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqmix.kernels.compiling import kernel
from seqmix.kernels.path.prepare import padded, product, rows, solve
from seqmix.kernels.path.tiles import decode_tile

LOG2E = math.log2(math.e)
PENDING = 64  # tokens behind the boundary at most: one block
SPLITS = 63  # pieces at most: with the pending tokens a power of two
PROGRAMS = 264  # that keep a GPU busy


@kernel
def path_decode_near_kernel(
    q, first, k, v, w, beta, log_forget, solved, corner, moved, bias, weights, sums, arrived,
    T, G, R, pending, slots, size, scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr, M: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Slot 0: the pending tokens. Grid (N * G, tiles of M rows); row r is token r / R, head r % R.

    solved [N, pending, G, K] = U W and corner [N, pending, G, 64] = U slower(W K^T). moved
    [N, G, rows, P] and bias [N, G, rows]: queries at the boundary, with scale log2(e), and the
    gates behind it. weights [2, N, G, rows, slots], of `size` elements each: logarithm and value of
    the denominators; sums [N, G, rows, slots, PV]. All float32. arrived [N, G]: 0.
    """
    n = (tl.program_id(0) // G).to(tl.int64)
    g = tl.program_id(0) % G
    row = tl.program_id(1) * M + tl.arange(0, M)
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
    mask = there & (channel < K)[None, :]
    ww = tl.load(w + place, mask=mask, other=0.0).to(tl.float32)
    kk = tl.load(k + place, mask=mask, other=0.0).to(tl.float32)
    bb = tl.load(beta + token, mask=side < pending, other=0.0).to(tl.float32)

    strict = side[:, None] > side[None, :]
    seen = side[None, :] <= (tl.load(first + n) + t)[:, None]
    gram = product(ww, tl.trans(ww), False)
    u = solve(tl.where(strict, -bb[:, None] * gram, 0.0), False) * bb[None, :]
    uw = product(u, ww, False)
    ue = product(u, tl.where(strict, product(ww, tl.trans(kk), False), 0.0), False)
    if tl.program_id(1) == 0:
        tl.store(solved + place, uw, mask=mask)
        tl.store(corner + token[:, None] * 64 + side[None, :], ue, mask=there)
        tl.store(arrived + tl.program_id(0), 0)
    qw = tl.where(seen, product(qq, tl.trans(ww), False), 0.0)
    s = product(qq, tl.trans(kk), False) - product(qw, ue, False)
    qq -= product(qw, uw, False)
    behind = tl.zeros([M], tl.float32)
    if GATED:
        place = (n * pending + side)[None, :] * (G * R) + h[:, None]
        gate = tl.load(log_forget + place, mask=seen & (side < pending)[None, :], other=0.0)
        gate = gate.to(tl.float32) * 1.4426950408889634
        behind = tl.sum(gate, 1)
        s += behind[:, None] - tl.cumsum(gate, 1)
    s = tl.where(seen & (side < pending)[None, :], s, float("-inf"))
    vv = tl.load(v + token[:, None] * V + value[None, :], mask=there & (value < V)[None, :],
                 other=0.0)  # fmt: skip
    line = (n * G + g) * (tl.num_programs(1) * M) + row
    put_near(qq, behind, s, vv, moved, bias, weights, sums, line, slots, size, P, PV)


@triton.jit
def put_near(
    qq, behind, s, vv, moved, bias, weights, sums, line, slots, size,
    P: tl.constexpr, PV: tl.constexpr,
):  # fmt: skip
    """Store moved queries [M, P] and slot 0, from logits s [M, S] and values vv [S, PV]."""
    top = tl.max(s, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    tl.store(moved + line[:, None] * P + tl.arange(0, P)[None, :], qq)
    tl.store(bias + line, behind)
    tl.store(weights + line * slots, top)
    tl.store(weights + size + line * slots, tl.sum(p, 1))
    acc = tl.dot(p.to(vv.dtype), vv, input_precision="tf32x3")
    tl.store(sums + line[:, None] * slots * PV + tl.arange(0, PV)[None, :], acc)


@triton.jit
def add_up(weights, sums, line, slots, size, PV: tl.constexpr, WIDE: tl.constexpr):
    """One row's softmax from its slots, [PV]."""
    slot = tl.arange(0, WIDE)
    there = slot < slots
    place = line * slots + slot
    top = tl.load(weights + place, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(weights + size + place, mask=there, other=0.0, cache_modifier=".cg")
    acc = tl.load(sums + place[:, None] * PV + tl.arange(0, PV)[None, :],
                  mask=there[:, None], other=0.0, cache_modifier=".cg")  # fmt: skip
    part = tl.exp2(top - tl.max(top, 0))
    return tl.sum(acc * part[:, None], 0) / tl.sum(total * part, 0)


@kernel
def path_decode_far_kernel(
    keys, values, decay, length, moved, bias, weights, sums, arrived, y,
    F, G, R, T, piece, slots, size,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr, M: tl.constexpr,
    C: tl.constexpr, WIDE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Slot 1 + i: folded tokens i piece ... (i + 1) piece. Grid (N * G, tiles, pieces).

    WIDE, a power of two: the last piece of a row's tile writes y [N, T, H, V]; slots <= WIDE.
    """
    n = (tl.program_id(0) // G).to(tl.int64)
    g = tl.program_id(0) % G
    row = tl.program_id(1) * M + tl.arange(0, M)
    h = g * R + row % R
    dtype: tl.constexpr = keys.dtype.element_ty
    lane = tl.arange(0, C)
    first_line = (n * G + g) * (tl.num_programs(1) * M)
    line = first_line + row
    qh = tl.load(moved + line[:, None] * P + tl.arange(0, P)[None, :]).to(dtype)
    behind = tl.load(bias + line)
    top = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M, C], tl.float32)  # summed over its columns at the end
    acc = tl.zeros([M, PV], tl.float32)
    start = tl.program_id(2) * piece
    stop = tl.minimum(start + piece, tl.load(length + n).to(tl.int32))
    for j in range(start, stop, C):
        real = j + lane < stop
        token = (n * F + tl.where(real, j + lane, start)) * G + g
        kk = rows(keys, token * K, K, P)
        vv = rows(values, token * V, V, PV)
        s = tl.dot(qh, tl.trans(kk), input_precision="tf32x3")
        if GATED:
            place = (n * F + j + lane)[None, :] * (G * R) + h[:, None]
            gate = tl.load(decay + place, mask=real[None, :], other=0.0).to(tl.float32)
            s += gate * 1.4426950408889634 + behind[:, None]
        s = tl.where(real[None, :], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        fall = tl.exp2(top - new)
        weight = weight * fall[:, None] + p
        acc = tl.dot(p.to(values.dtype.element_ty), vv, acc * fall[:, None],
                     input_precision="tf32x3")  # fmt: skip
        top = new
    out = line * slots + 1 + tl.program_id(2)
    tl.store(weights + out, top)
    tl.store(weights + size + out, tl.sum(weight, 1))
    tl.store(sums + out[:, None] * PV + tl.arange(0, PV)[None, :], acc)
    if WIDE:
        tl.debug_barrier()
        if tl.atomic_add(arrived + tl.program_id(0), 1) == tl.num_programs(2) - 1:
            value = tl.arange(0, PV)
            for r in range(T * R):
                one = add_up(weights, sums, first_line + r, slots, size, PV, WIDE)
                place = ((n * T + r // R) * (G * R) + g * R + r % R) * V
                tl.store(y + place + value, one.to(y.dtype.element_ty), mask=value < V)


@kernel
def path_decode_sum_kernel(
    weights, sums, y, T, G, R, lines, slots, size,
    V: tl.constexpr, PV: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y [N, T, H, V] from the slots. Grid (N * G * T * R)."""
    r = tl.program_id(0) % (T * R)
    g = tl.program_id(0) // (T * R) % G
    n = (tl.program_id(0) // (T * R * G)).to(tl.int64)
    value = tl.arange(0, PV)
    out = add_up(weights, sums, (n * G + g) * lines + r, slots, size, PV, WIDE)
    place = ((n * T + r // R) * (G * R) + g * R + r % R) * V
    tl.store(y + place + value, out.to(y.dtype.element_ty), mask=value < V)


@dataclass(frozen=True)
class Read:
    """Scratch of one read of the cache, and how its folded tokens are split; module top."""

    rows: int  # of a tile
    tiles: int
    piece: int  # folded tokens
    slots: int
    moved: Tensor
    bias: Tensor
    weights: Tensor
    sums: Tensor
    arrived: Tensor

    @classmethod
    def of(cls, N: int, G: int, count: int, F: int, sizes: tuple[int, int], like: Tensor) -> "Read":
        """For `count` rows of queries over F folded tokens; sizes: padded K and V."""
        block = 16 if count <= 16 else 64  # products need 16
        tiles = -(-count // block)
        pieces = max(1, min(SPLITS, -(-F // 256), PROGRAMS // max(1, N * G * tiles)))
        piece = -(-max(F, 1) // (pieces * 64)) * 64
        slots = 1 + -(-max(F, 1) // piece)
        shape = N, G, tiles * block
        new = {"device": like.device, "dtype": torch.float32}
        return cls(
            block, tiles, piece, slots,
            moved=torch.empty(*shape, sizes[0], **new),
            bias=torch.empty(shape, **new),
            weights=torch.empty(2, *shape, slots, **new),
            sums=torch.empty(*shape, slots, sizes[1], **new),
            arrived=torch.empty(N, G, device=like.device, dtype=torch.int32),
        )  # fmt: skip

    @property
    def size(self) -> int:
        return self.weights.numel() // 2

    def far(
        self, keys: Tensor, values: Tensor, decay: Tensor | None, length: Tensor, y: Tensor
    ) -> None:
        """Write y [N, T, H, V]: slot 0, which is there, and the folded tokens."""
        (N, T, H, V), (F, G, K) = y.shape, keys.shape[1:]
        P, PV, R = padded(K), padded(V), H // G
        tile = decode_tile(self.rows, max(P, PV), keys.dtype)
        last = SPLITS + 1 if self.rows == 16 else 0
        path_decode_far_kernel[(N * G, self.tiles, self.slots - 1)](
            keys, values, decay, length, self.moved, self.bias, self.weights, self.sums,
            self.arrived, y, F, G, R, T, self.piece, self.slots, self.size,
            K=K, V=V, P=P, PV=PV, M=self.rows, C=tile.keys, WIDE=last, GATED=decay is not None,
            **tile.launch,
        )  # fmt: skip
        if not last:
            path_decode_sum_kernel[(N * G * T * R,)](
                self.weights, self.sums, y, T, G, R, self.tiles * self.rows, self.slots,
                self.size, V=V, PV=PV, WIDE=triton.next_power_of_2(self.slots), num_warps=4,
            )  # fmt: skip


def read_on(
    y: Tensor, lse: Tensor, moved: Tensor, behind: Tensor | None, keys: Tensor, values: Tensor,
    decay: Tensor | None, length: Tensor,
) -> Tensor:  # fmt: skip
    """y [N, T, H, V] of queries that read other tokens already, over the folded ones as well.

    y and lse [N, T, H]: what those gave. moved [N, T, H, K], float32, with scale: the queries at
    the boundary. behind [N, T, H]: the gates from the boundary up to each.
    """
    (N, T, H, V), G = y.shape, keys.shape[2]
    count, K = T * H // G, moved.shape[3]
    read = Read.of(N, G, count, keys.shape[1], (padded(K), padded(V)), y)

    def by_group(x: Tensor) -> Tensor:
        return x.unflatten(2, (G, H // G)).transpose(1, 2).flatten(2, 3)  # N G rows ...

    read.moved.zero_()[:, :, :count, :K] = by_group(moved) * LOG2E
    read.bias.zero_()
    if behind is not None:
        read.bias[:, :, :count] = by_group(behind) * LOG2E
    read.weights[0, :, :, :count, 0] = by_group(lse) * LOG2E
    read.weights[1, :, :, :count, 0] = 1
    read.sums[:, :, :count, 0, :V] = by_group(y)
    read.sums[:, :, :count, 0, V:] = 0
    read.arrived.zero_()
    out = torch.empty_like(y)
    read.far(keys, values, decay, length, out)
    return out


def decode(
    q: Tensor, first: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor,
    log_forget: Tensor | None, keys: Tensor, values: Tensor, decay: Tensor | None,
    length: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y [N, T, H, V] of the pending tokens first[n], first[n] + 1, ... of each row; contiguous.

    k, v, w [N, P, G, size], beta [N, P, G] and log_forget [N, P, H]: pending tokens, P <= 64.
    keys, values [N, F, G, size] and decay [N, F, H]: folded tokens, of which row n has length[n].
    Also the solution of the pending tokens: U W [N, P, G, K], U slower(W K^T) [N, P, G, 64].
    """
    N, T, H, K = q.shape
    G, V = v.shape[2:]
    sizes = padded(K), padded(V)
    read = Read.of(N, G, T * H // G, keys.shape[1], sizes, q)
    solved = torch.empty_like(k, dtype=torch.float32)
    corner = solved.new_empty(*k.shape[:3], PENDING)
    y = torch.empty(N, T, H, V, device=q.device, dtype=q.dtype)
    path_decode_near_kernel[(N * G, read.tiles)](
        q, first, k, v, w, beta, log_forget, solved, corner, read.moved, read.bias, read.weights,
        read.sums, read.arrived, T, G, H // G, k.shape[1], read.slots, read.size, scale * LOG2E,
        K=K, V=V, P=sizes[0], PV=sizes[1], M=read.rows, GATED=log_forget is not None,
        num_warps=4 if max(sizes) <= 64 else 8, num_stages=1,
    )  # fmt: skip
    read.far(keys, values, decay, length, y)
    return y, solved, corner
