"""Padding becomes packed documents: a row of the batch is one document, its padding left out."""

from typing import NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from seqmix.ops.check import Arguments


class Packing(NamedTuple):
    """How the tokens of a batch go through the layers.

    batch, length: B and T as the caller sees them.
    real [P]: where the real tokens are among all B T, None where nothing is left out.
    cu_seqlens [N+1]: the borders of documents, None where every row is full.
    padded: how many columns, from the left, may hold padding.
    """

    batch: int
    length: int
    real: Int[Tensor, "P"] | None
    cu_seqlens: Int[Tensor, "N+1"] | None
    padded: int = 0

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "B T D"],
        attention_mask: Tensor | None,
        past: int,
        cu_seqlens: Int[Tensor, "N+1"] | None,
    ) -> Self:
        """From what the caller gave; `past` columns lie in the cache. Reads the mask's device.

        Raises ValueError for a mask that is not [B, T] or [B, past + T], and for padding beside
        `cu_seqlens`; beside a mask of ones `cu_seqlens` counts.
        """
        check = Arguments("SeqmixModel", x)
        check.tensor("inputs_embeds", x, "B T D")
        check.documents(cu_seqlens)
        batch, length = x.shape[:2]
        if attention_mask is None:
            return cls(batch, length, None, cu_seqlens)
        if tuple(attention_mask.shape) not in ((batch, length), (batch, past + length)):
            behind = f" or [B={batch}, past + T={past + length}]" if past else ""
            check.fail(
                f"attention_mask must have shape [B={batch}, T={length}]{behind}, 0 at padding, "
                f"got {list(attention_mask.shape)}"
            )
        mask = attention_mask[:, attention_mask.shape[1] - length :].bool()
        if mask.all():
            return cls(batch, length, None, cu_seqlens)
        if cu_seqlens is not None:
            check.fail("attention_mask beside cu_seqlens must be all ones, got padding")
        real, ends = mask.flatten().nonzero()[:, 0], mask.sum(1).cumsum(0)
        padded = int((~mask).any(0).nonzero().max()) + 1
        return cls(batch, length, real, torch.cat([ends.new_zeros(1), ends]), padded)

    @property
    def rows(self) -> int:
        """The number of states: documents, or rows of the batch."""
        return self.batch if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def pack(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The batch as the layers see it: [1, P, D] if anything is left out."""
        return x if self.real is None else x.flatten(0, 1)[self.real][None]

    def unpack(self, packed: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The batch as the caller sees it, zero at padding."""
        if self.real is None:
            return packed
        x = packed.new_zeros(self.batch * self.length, packed.shape[2])
        return x.index_copy(0, self.real, packed[0]).view(self.batch, self.length, -1)
