"""Keys aligned to the last token of their document: the start of a decoding cache, and its fold."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqmix.kernels.compiling import compiles_together, kernel
from seqmix.kernels.path.layout import Documents, Tiles, documents
from seqmix.kernels.path.prepare import Prepared, padded, prepare, rows
from seqmix.kernels.path.tiles import sizes


@triton.jit
def walk(
    kk, transitions, first, document, position, length, N, G, g,
    P: tl.constexpr, S1, S2,
):  # fmt: skip
    """Keys [64, P] at `position` of a document, moved to its end over the largest segments there.

    keys <- keys + keys (F - I), in float32 with float16 products (float32 ones for float32 inputs).
    """
    dtype: tl.constexpr = transitions.dtype.element_ty
    channel = tl.arange(0, P)
    whole = channel[:, None] * P + channel[None, :]
    while position < length:
        top = (position % S2 == 0) & (position + S2 < length)
        half = (position % S1 == 0) & (position + S1 < length)
        size = tl.where(top, S2, tl.where(half, S1, 64))
        level = tl.where(top, 2, tl.where(half, 1, 0))
        slot = (tl.load(first + level * N + document) + position // size).to(tl.int64) * G + g
        x = tl.load(transitions + slot * P * P + whole)
        kk = tl.dot(kk.to(dtype), x, kk, input_precision="tf32x3")
        position += size
    return kk


@kernel
def path_keys_kernel(
    keys, transitions, out, table, offsets, first, tokens, N, G,
    K: tl.constexpr, P: tl.constexpr, S1, S2,
):  # fmt: skip
    """out [B, T, G, K]. Grid (blocks * G). One program: 64 keys of one key head.

    Takes them where the levels left them and walks on.
    """
    entry = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    begin = tl.load(offsets + document)
    length = (tl.load(offsets + document + 1) - begin).to(tl.int32)
    channel = tl.arange(0, P)
    lane = index * 64 + tl.arange(0, 64)
    alive = lane < length

    far = (index * 64 // S2 + 1) * S2
    middle = (index * 64 // S1 + 1) * S1
    level = tl.where(far < length, 2, tl.where(middle < length, 1, 0))
    position = tl.where(far < length, far, tl.where(middle < length, middle, index * 64 + 64))
    source = keys + ((level * G + g) * tokens + begin + lane)[:, None] * P + channel[None, :]
    kk = tl.load(source, mask=alive[:, None], other=0.0).to(tl.float32)
    kk = walk(kk, transitions, first, document, position, length, N, G, g, P, S1, S2)
    tl.store(
        out + ((begin + lane) * G + g)[:, None] * K + channel[None, :],
        kk.to(out.dtype.element_ty),
        mask=alive[:, None] & (channel < K)[None, :],
    )


@kernel
def path_fold_kernel(
    keys, transitions, out, first, N, F, G, length,
    K: tl.constexpr, P: tl.constexpr, S1, S2,
):  # fmt: skip
    """out [N, F, G, K] = keys carried over `length` tokens. Grid (N * G, F / 64)."""
    n = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    lane = tl.program_id(1) * 64 + tl.arange(0, 64)
    channel = tl.arange(0, P)
    token = (n * F + tl.minimum(lane, F - 1)) * G + g
    kk = rows(keys, token * K, K, P).to(tl.float32)
    kk = walk(kk, transitions, first, n, tl.full((), 0, tl.int32), length, N, G, g, P, S1, S2)
    tl.store(
        out + token[:, None] * K + channel[None, :],
        kk.to(out.dtype.element_ty),
        mask=(lane < F)[:, None] & (channel < K)[None, :],
    )


def launch(
    made: Prepared, docs: Documents, blocks: Tiles, levels: tuple[int, int, int], out: Tensor
) -> None:
    """Write the keys that `prepare` made into out [B, T, G, K], at the end of their document."""
    G, K = out.shape[2:]
    path_keys_kernel[(len(blocks) * G,)](
        made.keys, made.transitions, out, blocks.table, docs.offsets, made.first, docs.tokens,
        docs.count, G, K=K, P=padded(K), S1=levels[1], S2=levels[2], **_options(K),
    )  # fmt: skip


def _options(K: int) -> dict[str, int]:
    return {"num_warps": 4 if K <= 64 else 8, "num_stages": 1}


@compiles_together
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
    out = torch.zeros_like(k) if docs.packed else torch.empty_like(k)
    launch(prepare(k, w, beta, docs, levels), docs, docs.tiles(levels[0]), levels, out)
    return out


def fold(
    keys: Tensor, k: Tensor, w: Tensor, beta: Tensor, levels: tuple[int, int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Carry old keys [N, F, G, K] over P tokens, and those tokens' k [N, P, G, K] to their end.

    Contiguous; returns both in the dtype of the old keys. O(F K^2 + P K^2) a head.
    """
    N, F, G, K = keys.shape
    docs = documents(*k.shape[:2], None, k.device)
    levels = levels or sizes(docs.row)
    exact = torch.float32 if keys.dtype == torch.float32 else torch.float16  # as transitions are
    made = prepare(k.to(exact), w.to(exact), beta, docs, levels)
    moved, new = torch.empty_like(keys), torch.empty_like(k, dtype=keys.dtype)
    launch(made, docs, docs.tiles(levels[0]), levels, new)
    if F:
        path_fold_kernel[(N * G, -(-F // 64))](
            keys, made.transitions, moved, made.first, N, F, G, docs.row,
            K=K, P=padded(K), S1=levels[1], S2=levels[2], **_options(K),
        )  # fmt: skip
    return moved, new
