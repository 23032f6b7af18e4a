"""The forget gate: its logarithms summed, exactly enough at any length, and the way back."""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqmix.kernels.compiling import kernel
from seqmix.kernels.path.layout import BLOCK, Documents
from seqmix.kernels.path.prepare import Prepared

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Gate:
    """total [B, H, T] float64: log_forget summed from its row's first token, natural.

    near [H, stride / 64, 64] float32, base 2, by block: the sum from the first token of the
    largest segment, so that differences inside one need no float64. Both None without a gate.
    """

    total: Tensor | None
    near: Tensor | None
    stride: int

    def __bool__(self) -> bool:
        return self.total is not None


@dataclass(frozen=True)
class Blocks:
    """log_forget by blocks, base 2, so that a product adds it to logits and nothing cancels.

    sums [H, blocks] float64: of whole blocks. parts [H, blocks, 64, 16]: the sum behind a token,
    up to the end of its block, is parts @ unit_row()^T, exact to float32. Both None without a gate.
    """

    sums: Tensor | None
    parts: Tensor | None

    def __bool__(self) -> bool:
        return self.sums is not None


@triton.jit
def unit_row():
    """What the parts of a sum count: 16, 1, 1 and padding, [1, 16] float32."""
    part = tl.arange(0, 16)[None, :]
    return tl.where(part == 0, 16.0, tl.where(part < 3, 1.0, 0.0))


@kernel
def path_gate_blocks_kernel(log_forget, sums, parts, table, offsets, first, H, blocks):
    """See Blocks. Grid (blocks * H). One program: one block of one query head, in float64."""
    entry = tl.program_id(0) // H
    h = tl.program_id(0) % H
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    lane = tl.arange(0, 64)
    token = tl.load(offsets + document) + index * 64 + lane
    alive = token < tl.load(offsets + document + 1)
    x = tl.load(log_forget + token * H + h, mask=alive, other=0.0).to(tl.float64)
    x = tl.where(x < -1e4, -1e4, x) * 1.4426950408889634
    total = tl.sum(x, 0)
    slot = h.to(tl.int64) * blocks + tl.load(first + document) + index
    tl.store(sums + slot, total)
    rest = (total - tl.cumsum(x, 0)).to(tl.float32)
    dtype: tl.constexpr = parts.dtype.element_ty
    high = (rest * 0.0625).to(dtype)
    rest -= high.to(tl.float32) * 16.0
    middle = rest.to(dtype)
    low = (rest - middle.to(tl.float32)).to(dtype)
    part = tl.arange(0, 16)[None, :]
    low = tl.where(part == 2, low[:, None], tl.zeros([64, 16], dtype))
    packed = tl.where(part == 0, high[:, None], tl.where(part == 1, middle[:, None], low))
    tl.store(parts + slot * 1024 + lane[:, None] * 16 + part, packed)


@kernel
def path_gate_kernel(total, near, table, offsets, first, row, H, stride, S2):
    """near from total. Grid (blocks * H)."""
    entry = tl.program_id(0) // H
    h = (tl.program_id(0) % H).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    position = tl.load(table + 2 * entry + 1) * 64
    begin = tl.load(offsets + document)
    token = begin + position + tl.arange(0, 64)
    total += (begin // row * H + h) * row - begin // row * row
    start = tl.load(total + begin + position // S2 * S2)
    here = tl.load(total + token, mask=token < tl.load(offsets + document + 1), other=0.0)
    place = h * stride + tl.load(first + document) * 64 + position + tl.arange(0, 64)
    tl.store(near + place, ((here - start) * 1.4426950408889634).to(tl.float32))


def by_blocks(log_forget: Tensor | None, docs: Documents, made: Prepared) -> Blocks:
    """log_forget [B, T, H] by blocks. Below -1e4 a gate is 0 in every precision."""
    if log_forget is None:
        return Blocks(None, None)
    H = log_forget.shape[2]
    blocks = docs.tiles(BLOCK)
    new = {"device": log_forget.device}
    sums = torch.empty(H, len(blocks), dtype=torch.float64, **new)
    parts = torch.empty(H, len(blocks), BLOCK, 16, dtype=made.keys.dtype, **new)
    path_gate_blocks_kernel[(len(blocks) * H,)](
        log_forget, sums, parts, blocks.table, docs.offsets, made.first, H, len(blocks),
        num_warps=1,
    )  # fmt: skip
    return Blocks(sums, parts)


def summed(log_forget: Tensor | None, docs: Documents, made: Prepared, sizes: tuple) -> Gate:
    """log_forget [B, T, H] summed. Below -1e4 a gate is 0 in every precision."""
    if log_forget is None:
        return Gate(None, None, 0)
    H = log_forget.shape[2]
    total = log_forget.transpose(1, 2).double().clamp(min=-1e4).cumsum(-1)
    blocks = docs.tiles(sizes[0])
    stride = (len(blocks) + 1) * 64  # one more: readers look a tile ahead
    near = torch.empty(H, stride, device=total.device, dtype=torch.float32)
    path_gate_kernel[(len(blocks) * H,)](
        total, near, blocks.table, docs.offsets, made.first, docs.row, H, stride, sizes[2],
        num_warps=1,
    )  # fmt: skip
    return Gate(total, near, stride)


def gradient(
    dsum: Tensor, factor: Tensor, log_forget: Tensor, docs: Documents, first: Tensor
) -> Tensor:
    """The gradient of log_forget: that of its sums [H, lines], added up to the document's end."""
    token = torch.arange(docs.tokens, device=dsum.device)
    document = torch.searchsorted(docs.offsets[1:], token, right=True).clamp(max=docs.count - 1)
    line = first[document] * 64 + token - docs.offsets[document]
    dsum = dsum[:, line.clamp(max=dsum.shape[1] - 1)]
    dsum = dsum.view(-1, docs.batch, docs.row).double().cumsum(-1)
    before = torch.nn.functional.pad(dsum, (1, 0))
    if docs.packed:
        token = torch.arange(docs.row, device=dsum.device)
        document = torch.searchsorted(docs.offsets[1:], token, right=True)
        tail = document >= docs.count
        end = docs.offsets[1:][document.clamp(max=docs.count - 1)]
        after = (before[..., end] - before[..., :-1]).masked_fill(tail, 0.0)
    else:
        after = before[..., -1:] - before[..., :-1]
    return (after / factor).permute(1, 2, 0).to(log_forget.dtype).contiguous()
