"""What heads of more than 128 channels do in PyTorch: P x P operands that no program can hold."""

import torch
from torch import Tensor

from seqmix.kernels.path.layout import Documents, Tiles
from seqmix.kernels.path.prepare import Prepared
from seqmix.kernels.path.spans import Spans


def move_back(
    made: Prepared, dkeys: Tensor, dtransitions: Tensor, spans: Spans, docs: Documents,
    segments: Tiles, sizes: tuple[int, int, int], level: int,
) -> None:  # fmt: skip
    """`path_move_back_kernel` as batched products in float32, all segments at once."""
    child, parent = sizes[level - 1 : level + 1]
    document, index = segments.table.long().unbind(1)
    real = document >= 0
    document = document.clamp(min=0)
    real &= (index + 1) * parent < docs.offsets.diff()[document]
    keep = real[:, None, None, None]
    pieces = parent // child

    def rows(base: Tensor, each: int) -> Tensor:
        return torch.where(real, base.long()[document] + index * each, 0)

    here, below = rows(made.first[level], 1), rows(made.first[level - 1], pieces)
    span = rows(
        spans.base[level - 1] + (pieces - 1) * (pieces - 2) // 2, pieces * (pieces - 1) // 2
    )
    token = rows(docs.offsets, parent)[:, None] + torch.arange(child, device=real.device)

    d = dtransitions[here].where(keep, 0.0)  # M G P P
    for j in range(pieces):
        step = d
        if j < pieces - 1:
            step = d + d @ _at(spans.products, torch.where(real, span + j, 0), keep).mT
        piece = torch.where(real, below + j, 0)
        dtransitions.index_add_(0, piece, step)
        d = d + _at(made.transitions, piece, keep).mT @ d
        now = torch.where(real[:, None], token + j * child, 0)
        k, dk = (x[:, now].float().transpose(0, 1) for x in (made.keys[level - 1], dkeys[level]))
        d += (k.mT @ dk).where(keep, 0.0)


def scale_down(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [M, G, P, P] as (rounded, factors [M, G]), like `scaled` of spans.py."""
    top = x.abs().amax((2, 3))
    factors = torch.exp2(torch.floor(torch.log2(torch.where(top > 1e-30, top, 1.0))))
    return (x / factors[..., None, None]).to(dtype), factors


def _at(products: Tensor, row: Tensor, keep: Tensor) -> Tensor:
    return products[row].float().where(keep, 0.0)
