"""Where documents lie: the tables that every PaTH kernel reads instead of shapes.

Batch rows and packed documents are the same thing here: a stream of tokens cut into documents by
`offsets`. Each document is cut, from its own first token, into segments of three sizes, each
dividing the next: blocks of 64, then S1, then S2. All tables are made on the device without a
read, so a packed call does not synchronise; counts are upper bounds and spare entries name
document -1.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

BLOCK = 64  # tokens of a block: the solve is 64 x 64


@dataclass(frozen=True)
class Tiles:
    """table [M, 2] int32: (document or -1, index in it, last first); first [N]: rows before it."""

    table: Tensor
    first: Tensor

    def __len__(self) -> int:
        return self.table.shape[0]


@dataclass(frozen=True)
class Documents:
    """offsets [N+1] int64; row: tokens of a batch row, an upper bound of the lengths.

    Tables of packed documents are made once and kept in `cut`; those of rows outlive the call.
    """

    offsets: Tensor
    batch: int
    row: int
    packed: bool
    cut: dict[int, Tiles] = field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> int:
        return self.batch * self.row

    @property
    def count(self) -> int:
        return self.offsets.shape[0] - 1

    def tiles(self, size: int) -> Tiles:
        """The documents cut into pieces of `size` tokens."""
        if not self.packed:
            return _even_tiles(self.batch, self.row, size, self.offsets.device)
        if size not in self.cut:
            self.cut[size] = _packed_tiles(self.offsets, self.row // size + self.count, size)
        return self.cut[size]

    def levels(self, sizes: tuple[int, ...]) -> tuple[list[Tiles], Tensor]:
        """Tiles of all `sizes`, and [L, N] int32: rows before a document in a table of them all."""
        if not self.packed:
            return _even_levels(self.batch, self.row, sizes, self.offsets.device)
        return _levels([self.tiles(size) for size in sizes])


def documents(batch: int, row: int, cu_seqlens: Tensor | None, device: torch.device) -> Documents:
    """The documents of a call: the batch rows, or what `cu_seqlens` says."""
    if cu_seqlens is None:
        return Documents(_even_offsets(batch, row, device), batch, row, False)
    return Documents(cu_seqlens.to(device=device, dtype=torch.int64), batch, row, True)


@lru_cache(64)
def _even_offsets(batch: int, row: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, device=device, dtype=torch.int64) * row


@lru_cache(256)
def _even_tiles(batch: int, row: int, size: int, device: torch.device) -> Tiles:
    count = -(-row // size)
    document = torch.arange(batch, device=device, dtype=torch.int32)
    index = torch.arange(count - 1, -1, -1, device=device, dtype=torch.int32)
    table = torch.stack([document.repeat_interleave(count), index.repeat(batch)], 1)
    return Tiles(table.contiguous(), document * count)


@lru_cache(64)
def _even_levels(
    batch: int, row: int, sizes: tuple[int, ...], device: torch.device
) -> tuple[list[Tiles], Tensor]:
    return _levels([_even_tiles(batch, row, size, device) for size in sizes])


def _levels(levels: list[Tiles]) -> tuple[list[Tiles], Tensor]:
    before = accumulate((len(tiles) for tiles in levels), initial=0)
    first = torch.stack([tiles.first + rows for tiles, rows in zip(levels, before, strict=False)])
    return levels, first


def _packed_tiles(offsets: Tensor, bound: int, size: int) -> Tiles:
    counts = (offsets.diff() + size - 1) // size
    ends = counts.cumsum(0)
    entry = torch.arange(bound, device=offsets.device)
    document = torch.searchsorted(ends, entry, right=True)
    real = document < counts.shape[0]
    document = document.clamp(max=counts.shape[0] - 1)
    index = ends[document] - 1 - entry
    table = torch.stack([torch.where(real, document, -1), index], 1).int()
    return Tiles(table.contiguous(), (ends - counts).int())
