"""Products of transitions over ranges of neighbouring segments, and gradients through them.

Siblings are the segments of one level inside one segment of the level above (inside the document,
for the top level). spans holds T(i, j) - I = F_i ... F_{j-1} - I for siblings 1 <= i < j, row
(j - 1) (j - 2) / 2 + i - 1 behind the first row of their parent: with it keys and queries step
over any range at once. Lower levels have j <= r, r siblings a parent; the top one j < its segments.

Gradients are in units of `scaling` (backward.py) and kept in float32; operands of products are
brought to float16 by the power of two that their largest entry asks for.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqmix.kernels.compiling import kernel
from seqmix.kernels.path.layout import Documents, Tiles, documents
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
    if i == 0:  # nothing lies on its left
        return
    crossed = tl.minimum((length - 1) // size - parent * siblings, siblings).to(tl.int32)
    rows = tl.program_id(1) * C + tl.arange(0, C)
    columns = tl.arange(0, P)
    part = rows[:, None] * P + columns[None, :]
    whole = columns[:, None] * P + columns[None, :]
    source = tl.load(first + level * N + document) + parent * siblings
    source = transitions + source.to(tl.int64) * G * P * P
    pairs = siblings * (siblings - 1) // 2  # overflows at the top level, whose parent is 0
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
        row = (j * (j - 1) // 2 + i - 1) * G + g
        tl.store(target + row * P * P + part, y.to(dtype))


@kernel
def path_gather_kernel(
    partial, out, table, offsets, first, owners, H, G, slots, N, S1, S2, blocks,
    LEVEL: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradients of transitions: the parts left by the programs of `path_dq_kernel`, added up.

    Grid (segments * G, P * P / C). Query tiles cross a segment if they lie behind it in its
    parent; those of one owner (S1 queries) share a part. out may start behind `blocks` rows.
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
    if LEVEL == 0:
        begin = index // r0
        end = tl.where(index % r0 == r0 - 1, begin, begin + 1)
        slot = index % r0
        size = 64
    elif LEVEL == 1:
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
    row = (tl.load(first + LEVEL * N + document) + index - blocks).to(tl.int64) * G + g
    tl.store(out + row * P * P + lane, total)


@triton.jit
def met(d, keys, dkeys, low, high, mask):
    """d + keys^T dkeys of one tile."""
    dk = tl.load(dkeys + high, mask=mask, other=0.0).to(tl.float32)
    kk = tl.load(keys + low, mask=mask, other=0.0)
    dkh, factor = scaled(dk, keys.dtype.element_ty)
    return d + tl.dot(tl.trans(kk), dkh, input_precision="tf32x3") * factor


@kernel
def path_move_back_kernel(
    keys, dkeys, transitions, wide, narrow, factors, partial, spans,
    table, offsets, first, owners, base, tokens, N, H, G, slots, blocks, child, parent,
    LEVEL: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Back through `path_move_kernel`, from gradients of transitions of LEVEL to the level below.

    Grid (segments * G). keys_out = keys R_j with R_j = F_{j+1} ... F_r, R_{j-1} = F_j R_j:
    dF_j += D R_j^T, then D <- F_j^T D + sum keys^T dkeys_out, from D = dF of the segment.
    Level 2 adds to those of level 1 in `wide` (`path_gather_kernel`). Level 1 adds the parts that
    its own queries left to those of the blocks, and stores them as `narrow` times `factors`.
    """
    entry = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    begin = tl.load(offsets + document)
    length = (tl.load(offsets + document + 1) - begin).to(tl.int32)
    crossed = (index + 1) * parent < length
    if LEVEL == 2 and index * parent + parent >= length:
        return
    dtype: tl.constexpr = keys.dtype.element_ty
    channel = tl.arange(0, P)
    whole = channel[:, None] * P + channel[None, :]
    tile = tl.arange(0, 64)[:, None] * P + channel[None, :]
    inside = (whole >= 0) & crossed
    pieces = parent // child
    below = (tl.load(first + (LEVEL - 1) * N + document) + index * pieces).to(tl.int64)
    here = (tl.load(first + LEVEL * N + document) + index - blocks).to(tl.int64) * G + g
    span = tl.load(base + (LEVEL - 1) * N + document)
    span += index.to(tl.int64) * (pieces * (pieces - 1) // 2) + (pieces - 1) * (pieces - 2) // 2
    start = begin + index * parent
    low = ((LEVEL - 1) * G + g) * tokens + start
    high = (LEVEL * G + g) * tokens + start
    owner = (tl.load(owners + document) + index).to(tl.int64) * H

    d = tl.load(wide + here * P * P + whole, mask=inside, other=0.0)
    for j in range(pieces):
        dh, factor = scaled(d, dtype)
        more = inside & (j < pieces - 1)
        r = tl.load(spans + ((span + j) * G + g) * P * P + whole, mask=more, other=0.0)
        total = d + tl.dot(dh, tl.trans(r), input_precision="tf32x3") * factor
        x = tl.load(transitions + ((below + j) * G + g) * P * P + whole, mask=more, other=0.0)
        d += tl.dot(tl.trans(x), dh, input_precision="tf32x3") * factor
        if LEVEL == 2:
            out = wide + ((below + j - blocks) * G + g) * P * P + whole
            tl.store(out, tl.load(out) + total)
        else:
            block = index * pieces + j
            alive = (block + 1) * child < length
            part = (whole >= 0) & alive & (block > 0) & (j < pieces - 1)
            for head in range(GROUP):
                row = (owner + g * GROUP + head) * slots + j
                total += tl.load(partial + row * P * P + whole, mask=part, other=0.0)
            th, factor = scaled(total, dtype)
            row = (below + j) * G + g
            tl.store(narrow + row * P * P + whole, th, mask=(whole >= 0) & alive)
            tl.store(factors + row, factor, mask=alive)
        within = (tile >= 0) & crossed & (j < pieces - 1)
        if LEVEL == 1:  # one tile: no loop, so that the outer one can be pipelined
            d = met(d, keys, dkeys, (low + j * 64) * P + tile, (high + j * 64) * P + tile, within)
        else:
            for t in range(j * child, (j + 1) * child, 64):
                d = met(d, keys, dkeys, (low + t) * P + tile, (high + t) * P + tile, within)


def make_spans(
    made: Prepared, docs: Documents, levels: list[Tiles], sizes: tuple[int, int, int]
) -> Spans:
    """The spans of all three levels."""
    G, P = made.transitions.shape[1:3]
    base, rows = span_rows(docs, sizes)
    shape = max(rows, 1), G, P, P
    spans = Spans(torch.empty(shape, device=base.device, dtype=made.keys.dtype), base)
    for level, tiles in enumerate(levels):
        path_spans_kernel[(len(tiles) * G, P // min(P, 64))](
            made.transitions, spans.products, tiles.table, docs.offsets, made.first, base, G,
            sizes[level], siblings(sizes, level), level, docs.count,
            P=P, C=min(P, 64), num_warps=4, num_stages=1,
        )  # fmt: skip
    return spans


def siblings(sizes: tuple[int, int, int], level: int) -> int:
    """Segments of a level in one of the level above; many at the top."""
    return sizes[level + 1] // sizes[level] if level < 2 else 1 << 20


def span_rows(docs: Documents, sizes: tuple[int, int, int]) -> tuple[Tensor, int]:
    """Spans.base of the documents, and an upper bound of the rows."""
    if docs.packed:
        return _rows(docs, sizes)
    return _even_rows(docs.batch, docs.row, sizes, docs.offsets.device)


@lru_cache(64)
def _even_rows(
    batch: int, row: int, sizes: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, int]:
    return _rows(documents(batch, row, None, device), sizes)


def _rows(docs: Documents, sizes: tuple[int, int, int]) -> tuple[Tensor, int]:
    bases, rows = [], 0
    for level in (0, 1):
        parents, r = docs.tiles(sizes[level + 1]), siblings(sizes, level)
        pairs = r * (r - 1) // 2
        bases.append(parents.first.long() * pairs + rows)
        rows += len(parents) * pairs
    crossed = ((docs.offsets.diff() - 1) // sizes[2]).clamp(min=0)
    pairs = crossed * (crossed - 1) // 2
    bases.append(pairs.cumsum(0) - pairs + rows)
    most = (docs.row - 1) // sizes[2]
    rows += (1 if docs.packed else docs.batch) * most * (most - 1) // 2
    return torch.stack(bases), rows
