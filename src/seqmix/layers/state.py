"""The state of a layer: what it must remember to go on.

A state is a frozen dataclass of tensors, each with one row a sequence, [N, ...]. Rows may be
ragged: `seen` counts the tokens of each. Layers never change a state they are given; they return a
new one. Every layer keeps the one protocol: `select` (beam search), `copy` (prefix reuse), `crop`
where the past can be restored exactly, `nbytes`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from seqmix.ops.check import Arguments


@dataclass(frozen=True)
class State:
    """seen [N]: the number of tokens each row has seen. Layers add their own tensors."""

    seen: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The state with `function` applied to every tensor."""
        tensors = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: function(x) for name, x in tensors if x is not None})

    def select(self, rows: Tensor) -> Self:
        """The given rows, in that order; a row may be named more than once."""
        return self.map(lambda x: x.index_select(0, rows.to(x.device)))

    def copy(self) -> Self:
        """A state that shares no memory with this one."""
        return self.map(torch.clone)

    def detach(self) -> Self:
        """The state cut off from the graph that computed it (truncated backpropagation)."""
        return self.map(torch.detach)

    def to(self, device: torch.device | str) -> Self:
        """The state on another device."""
        return self.map(lambda x: x.to(device))

    def crop(self, length: int) -> Self:
        """Forget the last tokens so that the longest row keeps `length` (negative: drop as many).

        Every row loses the same number of tokens. Raises ValueError where the past is gone.
        """
        surplus = self.surplus(length)
        if surplus:
            raise ValueError(
                f"{type(self).__name__}: cannot forget the last {surplus} tokens, the memory is "
                "folded into a state of fixed size; keep a copy() from before them"
            )
        return self

    def surplus(self, length: int) -> int:
        """How many tokens `crop(length)` takes from every row."""
        longest = int(self.seen.max()) if self.seen.numel() else 0
        return max(0, longest - length) if length >= 0 else min(-length, longest)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            x.numel() * x.element_size()
            for x in (getattr(self, field.name) for field in fields(self))
            if x is not None
        )


def check_call(
    layer: str, size: int, x: Tensor, state: State | None, kind: type, cu_seqlens: Tensor | None
) -> None:
    """Check what a layer is called with: x [B, T, size], offsets, a state of its kind and rows."""
    arguments = Arguments(layer, x)
    arguments.sizes["D"] = size
    arguments.tensor("x", x, "B T D")
    arguments.documents(cu_seqlens)
    if state is None:
        return
    if not isinstance(state, kind):
        arguments.fail(f"state must be a {kind.__name__}, got {type(state).__name__}")
    if state.seen.shape[0] != arguments.sizes["N"]:
        arguments.fail(
            f"state must have N={arguments.sizes['N']} rows, one a sequence, "
            f"got {state.seen.shape[0]}"
        )


def append(rows: Tensor, seen: Tensor, new: Tensor) -> Tensor:
    """Write `new` [N, T, ...] behind the `seen` tokens of each of `rows` [N, L, ...].

    Returns [N, L + T, ...]. Where fewer than T tokens are real, the rest lies behind the row's end,
    where the next call overwrites it.
    """
    if not rows.shape[1]:
        return new
    room = new.new_zeros(new.shape)
    index = seen[:, None] + torch.arange(new.shape[1], device=seen.device)
    row = torch.arange(new.shape[0], device=seen.device)[:, None].expand_as(index)
    return torch.cat([rows, room], 1).index_put((row, index), new)
