"""Products of transitions over ranges of neighbouring segments, and gradients through them.

Siblings are the segments of one level inside one segment of the level above (inside the document,
for the top level). spans holds T(i, j) - I = F_i ... F_{j-1} - I for siblings 0 <= i < j, row
j (j - 1) / 2 + i behind the first row of their parent: with it keys and queries step over any
range at once. Lower levels have j <= r, r siblings a parent; the top one j < its segments.

Gradients are in units of `scaling` (backward.py) and kept in float32; operands of products are
brought to float16 by the power of two that their largest entry asks for.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqmix.kernels.compiling import kernel
from seqmix.kernels.path.layout import Documents, Tiles
from seqmix.kernels.path.prepare import Prepared


@dataclass(frozen=True)
class Spans:
    """products [rows, G, P, P]; base [3, N] int64: a document's first row, per level."""

    products: Tensor
    base: Tensor


@triton.jit
def scaled(x, dtype: tl.constexpr):
    """x as (rounded, factor) with x = rounded * factor, the largest entry between 1 and 2."""
    if dtype == tl.float32:
        return x, 1.0
    top = tl.max(tl.max(tl.abs(x), 1), 0)
    top = tl.where(top > 1e-30, top, 1.0)  # what is below is nothing, and has no inverse
    factor = tl.exp2(tl.floor(tl.log2(top)))
    return (x * (1.0 / factor)).to(dtype), factor


@kernel
def path_spans_kernel(
    transitions, spans, table, offsets, first, base, G, size, siblings, level, N,
    P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid (segments * G, P / C). One program: T(i, j) for one i and all j, C rows of them."""
    entry = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    length = tl.load(offsets + document + 1) - tl.load(offsets + document)
    dtype: tl.constexpr = spans.dtype.element_ty
    parent = index // siblings
    i = index % siblings
    crossed = tl.minimum((length - 1) // size - parent * siblings, siblings).to(tl.int32)
    rows = tl.program_id(1) * C + tl.arange(0, C)
    columns = tl.arange(0, P)
    part = rows[:, None] * P + columns[None, :]
    whole = columns[:, None] * P + columns[None, :]
    source = tl.load(first + level * N + document) + parent * siblings
    source = transitions + source.to(tl.int64) * G * P * P
    pairs = siblings * (siblings + 1) // 2  # overflows at the top level, whose parent is 0
    target = spans + (tl.load(base + level * N + document) + parent * pairs) * G * P * P
    y = tl.zeros([C, P], tl.float32)
    for j in range(i, crossed):
        x = source + (j * G + g) * P * P
        y = tl.dot(
            y.to(dtype),
            tl.load(x + whole),
            y + tl.load(x + part).to(tl.float32),
            input_precision="tf32x3",
        )
        row = ((j + 1) * j // 2 + i) * G + g
        tl.store(target + row * P * P + part, y.to(dtype))


@kernel
def path_gather_kernel(
    partial, out, table, offsets, first, owners, H, G, slots, N, S1, S2,
    level: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradients of transitions: the parts left by the programs of `path_dq_kernel`, added up.

    Grid (segments * G, P * P / C). Query tiles cross a segment if they lie behind it in its
    parent; those of one owner (S1 queries) share a part.
    """
    entry = tl.program_id(0) // G
    g = tl.program_id(0) % G
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    length = (tl.load(offsets + document + 1) - tl.load(offsets + document)).to(tl.int32)
    r0 = S1 // 64
    r1 = S2 // S1
    count = (length + S1 - 1) // S1
    if level == 0:
        begin = index // r0
        end = tl.where(index % r0 == r0 - 1, begin, begin + 1)
        slot = index % r0
        size = 64
    elif level == 1:
        begin = index + 1
        end = tl.minimum((index // r1 + 1) * r1, count)
        slot = r0 - 1 + index % r1
        size = S1
    else:
        begin = (index + 1) * r1
        end = count
        slot = r0 + r1 - 2 + index
        size = S2
    if (index + 1) * size >= length:
        return
    end = tl.where(index == 0, begin, end)  # no key before the first segment
    lane = tl.program_id(1) * C + tl.arange(0, C)
    total = tl.zeros([C], tl.float32)
    group = H // G
    for owner in range(begin, end):
        for head in range(group):
            row = (tl.load(owners + document) + owner).to(tl.int64) * H + g * group + head
            total += tl.load(partial + (row * slots + slot) * P * P + lane)
    row = (tl.load(first + level * N + document) + index).to(tl.int64) * G + g
    tl.store(out + row * P * P + lane, total)


@kernel
def path_move_back_kernel(
    keys, dkeys, transitions, dtransitions, spans, table, offsets, first, base,
    tokens, N, G, child, parent, level, P: tl.constexpr,
):  # fmt: skip
    """Back through `path_move_kernel`: dtransitions of the level below grow.

    Grid (segments * G). keys_out = keys R_j with R_j = F_{j+1} ... F_r, R_{j-1} = F_j R_j:
    dF_j += D R_j^T, then D <- F_j^T D + sum keys^T dkeys_out, from D = dF of the segment.
    """
    entry = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    begin = tl.load(offsets + document)
    if (index + 1) * parent >= tl.load(offsets + document + 1) - begin:
        return
    dtype: tl.constexpr = keys.dtype.element_ty
    channel = tl.arange(0, P)
    whole = channel[:, None] * P + channel[None, :]
    tile = tl.arange(0, 64)[:, None] * P + channel[None, :]
    pieces = parent // child
    below = (tl.load(first + (level - 1) * N + document) + index * pieces).to(tl.int64) * G + g
    here = (tl.load(first + level * N + document) + index).to(tl.int64) * G + g
    pairs = pieces * (pieces + 1) // 2
    span = tl.load(base + (level - 1) * N + document) + index.to(tl.int64) * pairs
    span = (span + pieces * (pieces - 1) // 2) * G + g
    start = begin + index * parent
    low = ((level - 1) * G + g) * tokens + start
    high = (level * G + g) * tokens + start

    d = tl.load(dtransitions + here * P * P + whole)
    for j in range(pieces):
        dh, factor = scaled(d, dtype)
        out = dtransitions + (below + j * G) * P * P + whole
        last = j == pieces - 1
        r = tl.load(
            spans + (span + (j + 1) * G) * P * P + whole, mask=(whole >= 0) & (not last), other=0.0
        )
        step = tl.dot(dh, tl.trans(r), input_precision="tf32x3") * factor
        tl.store(out, tl.load(out) + d + step)
        x = tl.load(transitions + (below + j * G) * P * P + whole)
        d += tl.dot(tl.trans(x), dh, input_precision="tf32x3") * factor
        for t in range(j * child, (j + 1) * child, 64):
            dk = tl.load(dkeys + (high + t) * P + tile)
            kk = tl.load(keys + (low + t) * P + tile)
            dkh, factor = scaled(dk, dtype)
            d += tl.dot(tl.trans(kk), dkh, input_precision="tf32x3") * factor


def make_spans(
    made: Prepared, docs: Documents, levels: list[Tiles], sizes: tuple[int, int, int]
) -> Spans:
    """The spans of all three levels."""
    G, P = made.transitions.shape[1:3]
    device = made.keys.device
    siblings = [sizes[1] // sizes[0], sizes[2] // sizes[1], 1 << 20]
    bases, rows = [], 0
    for level in (0, 1):
        pairs = siblings[level] * (siblings[level] + 1) // 2
        bases.append(levels[level + 1].first.long() * pairs + rows)
        rows += len(levels[level + 1]) * pairs
    segments = (docs.offsets.diff() + sizes[2] - 1) // sizes[2]
    pairs = segments * (segments - 1) // 2
    bases.append(pairs.cumsum(0) - pairs + rows)
    most = -(-docs.row // sizes[2])
    rows += (1 if docs.packed else docs.batch) * most * (most - 1) // 2
    made_spans = Spans(
        torch.empty(max(rows, 1), G, P, P, device=device, dtype=made.keys.dtype),
        torch.stack(bases),
    )
    for level, tiles in enumerate(levels):
        path_spans_kernel[(len(tiles) * G, P // min(P, 64))](
            made.transitions, made_spans.products, tiles.table, docs.offsets, made.first,
            made_spans.base, G, sizes[level], siblings[level], level, docs.count,
            P=P, C=min(P, 64), num_warps=4, num_stages=1,
        )  # fmt: skip
    return made_spans
