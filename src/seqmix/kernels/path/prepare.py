"""What PaTH needs to know of its keys, per key head: solve, transitions, keys moved on.

For a block of 64 tokens, with W the rows w_t and D = diag(beta):

    U  = (I + slower(D W W^T))^-1 D         E = slower(W K^T)
    UE = U E            UW = U W            both stored negated
    F  = H_first ... H_last = I - (UW)^T W  stored as F - I
    keys of level 0 = K - (UE)^T W          aligned to the last token of their block

and for a segment made of r smaller ones: F = F_1 ... F_r, keys of piece j times F_{j+1} ... F_r.
Segments that end a document are crossed by no query, so theirs are left unwritten.
16-bit inputs: products of the solve are split in three (error 1e-6), everything is stored in
float16. float32 inputs: every product in three tf32 ones, everything is stored in float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqmix.kernels.compiling import kernel
from seqmix.kernels.path.layout import BLOCK, Documents
from seqmix.kernels.path.tiles import Tile, prepare_tile


@dataclass(frozen=True)
class Prepared:
    """Scratch of one call; L levels, G key heads, M segments of all levels, P padded head size.

    keys [L, G, tokens, P]; transitions [M, G, P, P]: F - I; corner = -UE [blocks, G, 64, 64];
    solved = -UW [blocks, G, 64, P]; inverse = (I + slower(D W W^T))^-1 like corner, if asked for.
    first [L, N] int32: row in `transitions` of a document's first segment.
    """

    keys: Tensor
    transitions: Tensor
    corner: Tensor
    solved: Tensor
    inverse: Tensor
    first: Tensor


@triton.jit
def rows(pointer, offset, size: tl.constexpr, padded: tl.constexpr):
    """Rows of `size` channels at `offset` from pointer, zero up to `padded`."""
    channel = tl.arange(0, padded)
    place = pointer + offset[:, None] + channel[None, :]
    if size == padded:
        return tl.load(place)
    return tl.load(place, mask=(channel < size)[None, :], other=0.0)


@triton.jit
def product(a, b, WIDE: tl.constexpr, c=None, FULL: tl.constexpr = False):
    """a b + c of float32 matrices, exact to about 2^-21: three products in float16, or in tf32.

    FULL: the fourth product too, which matters where the low parts of all entries are alike.
    """
    if WIDE:
        return tl.dot(a, b, c, input_precision="tf32x3")
    a_high = a.to(tl.float16)
    b_high = b.to(tl.float16)
    a_low = (a - a_high.to(tl.float32)).to(tl.float16)
    b_low = (b - b_high.to(tl.float32)).to(tl.float16)
    if FULL:
        c = tl.dot(a_low, b_low, c)
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high, c)))


@triton.jit
def solve(a, WIDE: tl.constexpr):
    """(I - a)^-1 of a strictly lower 64 x 64 matrix.

    Blocks of 4 grow to blocks of 16, those to 64. Of a diagonal of 4 x 4 blocks D, the inverse
    X = (I - D)^-1 and the rest R, M = X R has M^4 = 0: (I - D - R)^-1 = (I + M^2) (I + M) X.
    The four blocks of 16 are one batch.
    """
    block = tl.arange(0, 4)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    inner = tl.sum(tl.where(same, tl.reshape(a, [4, 16, 4, 16]), 0.0), 2)  # 4 16 16
    r = tl.arange(0, 16)[None, :, None]
    c = tl.arange(0, 16)[None, None, :]
    near = tl.where(r // 4 == c // 4, inner, 0.0)  # near^4 = 0
    x = tl.where(r == c, 1.0, near)
    x += product(product(near, near, WIDE, FULL=True), x, WIDE, FULL=True)
    m = product(x, tl.where(r // 4 == c // 4, 0.0, inner), WIDE, FULL=True)
    x += product(m, x, WIDE, FULL=True)
    x += product(product(m, m, WIDE, FULL=True), x, WIDE, FULL=True)

    x = tl.reshape(tl.where(same, x[:, :, None, :], 0.0), [64, 64])
    row = tl.arange(0, 64)[:, None]
    column = tl.arange(0, 64)[None, :]
    m = product(x, tl.where(row // 16 > column // 16, a, 0.0), WIDE)
    x = product(m, x, WIDE, x)
    return product(product(m, m, WIDE), x, WIDE, x)


@kernel
def path_prepare_kernel(
    k, w, beta, keys, transitions, corner, solved, inverse, table, offsets, first,
    tokens, G, every,
    K: tl.constexpr, P: tl.constexpr, STORE_INVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks * G). One program: one block of one key head; see the module.

    every: key heads of a token in memory; k, w and beta start at the first of the G.
    """
    entry = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    begin = tl.load(offsets + document) + index * 64
    left = (tl.load(offsets + document + 1) - begin).to(tl.int32)
    slot = (tl.load(first + document) + index).to(tl.int64) * G + g
    dtype: tl.constexpr = keys.dtype.element_ty
    WIDE: tl.constexpr = dtype == tl.float32

    lane = tl.arange(0, 64)
    channel = tl.arange(0, P)
    alive = lane < left
    k += (begin * every + g) * K
    w += (begin * every + g) * K
    keys += (g * tokens + begin) * P
    place = lane[:, None] * (every * K) + channel[None, :]
    mask = alive[:, None] & (channel < K)[None, :]
    ww = tl.load(w + place, mask=mask, other=0.0)
    bb = tl.load(beta + begin * every + g + lane * every, mask=alive, other=0.0).to(tl.float32)

    row = tl.arange(0, 64)[:, None]
    column = tl.arange(0, 64)[None, :]
    gram = tl.dot(ww, tl.trans(ww), input_precision="tf32x3")  # of the inputs as they are: exact
    x = solve(tl.where(row > column, -bb[:, None] * gram, 0.0), WIDE)
    u = x * bb[None, :]
    tl.debug_barrier()  # load again what need not occupy registers through the solve
    ww = tl.load(w + place, mask=mask, other=0.0)
    kk = tl.load(k + place, mask=mask, other=0.0)
    e = tl.dot(ww, tl.trans(kk), input_precision="tf32x3")
    e = tl.where(row > column, e, 0.0).to(dtype)
    ww = ww.to(dtype)
    u_high = u.to(dtype)
    ue = tl.dot(u_high, e, input_precision="tf32x3")
    uw = tl.dot(u_high, ww, input_precision="tf32x3")
    if not WIDE:
        uw = tl.dot((u - u_high.to(tl.float32)).to(dtype), ww, uw)

    square = slot * 4096 + row * 64 + column
    ue_high = (-ue).to(dtype)
    tl.store(corner + square, ue_high)
    if STORE_INVERSE:
        tl.store(inverse + square, x.to(dtype))
    uw_high = (-uw).to(dtype)
    tl.store(solved + slot * 64 * P + row * P + channel[None, :], uw_high)
    moved = tl.dot(tl.trans(ue_high), ww, kk.to(tl.float32), input_precision="tf32x3")
    tl.store(keys + lane[:, None] * P + channel[None, :], moved.to(dtype), mask=alive[:, None])
    f = tl.dot(tl.trans(uw_high), ww, input_precision="tf32x3")
    if not WIDE:
        f = tl.dot(tl.trans((-uw - uw_high.to(tl.float32)).to(dtype)), ww, f)
    tl.store(transitions + slot * P * P + channel[:, None] * P + channel[None, :], f.to(dtype))


@kernel
def path_move_kernel(
    keys, transitions, table, offsets, first,
    tokens, N, G, child, parent, run, level,
    P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Keys and transitions of `level` from those of the level below.

    Grid (segments * pieces / run * G, P / C): the longest products first. One program: C columns
    of `run` neighbouring pieces of one segment of one key head. It walks from the segment's last
    piece with y = F_{j+1} ... F_r - I in float32: keys (I + y) of its own pieces, then
    y <- F_j (I + y) - I, which the program of the first piece stores.
    """
    pieces = parent // child
    runs = pieces // run
    entry = tl.program_id(0) // (runs * G)
    begun = tl.program_id(0) // G % runs * run
    g = (tl.program_id(0) % G).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    begin = tl.load(offsets + document)
    length = tl.load(offsets + document + 1) - begin
    if (index + 1) * parent >= length:
        return
    dtype: tl.constexpr = keys.dtype.element_ty
    row = tl.arange(0, P)
    column = tl.program_id(1) * C + tl.arange(0, C)
    lane = tl.arange(0, 64)
    whole = row[:, None] * P + row[None, :]
    part = row[:, None] * P + column[None, :]
    below = tl.load(first + (level - 1) * N + document) + index * pieces
    source = keys + (((level - 1) * G + g) * tokens + begin + index * parent) * P
    target = keys + ((level * G + g) * tokens + begin + index * parent) * P

    y = tl.zeros([P, C], tl.float32)
    for back in range(pieces - begun):
        j = pieces - 1 - back
        yh = y.to(dtype)
        if j < begun + run:
            for t in range(0, child, 64):
                token = (j * child + t + lane)[:, None] * P
                kk = tl.load(source + token + row[None, :])
                kc = tl.load(source + token + column[None, :]).to(tl.float32)
                kc = tl.dot(kk, yh, kc, input_precision="tf32x3")
                tl.store(target + token + column[None, :], kc.to(dtype))
        if (j > begun) | (begun == 0):
            x = transitions + ((below + j).to(tl.int64) * G + g) * P * P
            xx = tl.load(x + whole)
            xc = tl.load(x + part).to(tl.float32)
            y = tl.dot(xx, yh, y + xc, input_precision="tf32x3")
    if begun == 0:
        slot = (tl.load(first + level * N + document) + index).to(tl.int64) * G + g
        tl.store(transitions + slot * P * P + part, y.to(dtype))


def padded(size: int) -> int:
    """The width at which kernels hold a head of `size` channels."""
    return max(16, triton.next_power_of_2(size))


def prepare(
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    docs: Documents,
    sizes: tuple[int, int, int],
    *,
    inverse: bool = False,
    every: int | None = None,
    tile: Tile | None = None,
) -> Prepared:
    """Solve every block and move keys and transitions up the levels of `sizes` tokens.

    every: key heads of a token in memory, of which k, w and beta [B, T, G] show some.
    """
    G, K = k.shape[2:]
    P = padded(K)
    dtype = torch.float32 if k.dtype == torch.float32 else torch.float16
    levels, first = docs.levels(sizes)
    new = {"device": k.device, "dtype": dtype}
    blocks = len(levels[0])
    made = Prepared(
        keys=torch.empty(len(sizes), G, docs.tokens, P, **new),
        transitions=torch.empty(sum(map(len, levels)), G, P, P, **new),
        corner=torch.empty(blocks, G, BLOCK, BLOCK, **new),
        solved=torch.empty(blocks, G, BLOCK, P, **new),
        inverse=torch.empty(blocks if inverse else 0, G, BLOCK, BLOCK, **new),
        first=first,
    )
    path_prepare_kernel[(blocks * G,)](
        k, w, beta, made.keys, made.transitions, made.corner, made.solved, made.inverse,
        levels[0].table, docs.offsets, made.first, docs.tokens, G, every or G,
        K=K, P=P, STORE_INVERSE=inverse, **(tile or prepare_tile(P, k.dtype, k.device)).launch,
    )  # fmt: skip
    columns = min(P, 64)
    for level in range(1, len(sizes)):
        pieces = sizes[level] // sizes[level - 1]
        run = pieces if level == 1 else 1  # few segments: each piece by itself
        path_move_kernel[(len(levels[level]) * pieces // run * G, P // columns)](
            made.keys, made.transitions, levels[level].table, docs.offsets, made.first,
            docs.tokens, docs.count, G, sizes[level - 1], sizes[level], run, level,
            P=P, C=columns, num_warps=4, num_stages=2,
        )  # fmt: skip
    return made
