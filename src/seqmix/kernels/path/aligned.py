"""Keys aligned to the last token of their document: the start of a decoding cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqmix.kernels.path.layout import documents
from seqmix.kernels.path.prepare import padded, prepare
from seqmix.kernels.path.tiles import sizes


@triton.jit
def path_keys_kernel(
    keys, transitions, out, table, offsets, first, tokens, N, G,
    K: tl.constexpr, P: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr,
):  # fmt: skip
    """out [B, T, G, K]. Grid (blocks * G). One program: 64 keys of one key head.

    Takes them where the levels left them, then walks right over the largest segments that are
    there: keys <- keys F, in float32 with float16 products.
    """
    entry = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    begin = tl.load(offsets + document)
    length = (tl.load(offsets + document + 1) - begin).to(tl.int32)
    dtype: tl.constexpr = keys.dtype.element_ty
    channel = tl.arange(0, P)
    lane = index * 64 + tl.arange(0, 64)
    alive = lane < length
    whole = channel[:, None] * P + channel[None, :]

    far = (index * 64 // S2 + 1) * S2
    middle = (index * 64 // S1 + 1) * S1
    level = tl.where(far < length, 2, tl.where(middle < length, 1, 0))
    position = tl.where(far < length, far, tl.where(middle < length, middle, index * 64 + 64))
    source = keys + ((level * G + g) * tokens + begin + lane)[:, None] * P + channel[None, :]
    kk = tl.load(source, mask=alive[:, None], other=0.0).to(tl.float32)
    while position < length:
        top = (position % S2 == 0) & (position + S2 < length)
        half = (position % S1 == 0) & (position + S1 < length)
        size = tl.where(top, S2, tl.where(half, S1, 64))
        level = tl.where(top, 2, tl.where(half, 1, 0))
        slot = (tl.load(first + level * N + document) + position // size).to(tl.int64) * G + g
        x = tl.load(transitions + slot * P * P + whole)
        kk = tl.dot(kk.to(dtype), x, kk, input_precision="tf32x3")
        position += size
    tl.store(
        out + ((begin + lane) * G + g)[:, None] * K + channel[None, :],
        kk.to(out.dtype.element_ty),
        mask=alive[:, None] & (channel < K)[None, :],
    )


def aligned_keys(
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    levels: tuple[int, int, int] | None = None,
) -> Tensor:
    """Keys [B, T, G, K] moved to the last token of their document; zero behind the last one."""
    docs = documents(*k.shape[:2], cu_seqlens, k.device)
    levels = levels or sizes(docs.row)
    made = prepare(k, w, beta, docs, levels)
    blocks = docs.tiles(levels[0])
    out = torch.zeros_like(k) if docs.packed else torch.empty_like(k)
    G, K = k.shape[2:]
    path_keys_kernel[(len(blocks) * G,)](
        made.keys, made.transitions, out, blocks.table, docs.offsets, made.first, docs.tokens,
        docs.count, G, K=K, P=padded(K), S1=levels[1], S2=levels[2],
        num_warps=4 if K <= 64 else 8, num_stages=1,
    )  # fmt: skip
    return out
