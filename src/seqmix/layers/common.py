"""Parts that several layers share: norms, short convolutions, low-rank maps, document positions."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from seqmix.ops.choice import exactly


class Documents(NamedTuple):
    """Where tokens of a packed sequence belong: document [T], position in it [T], lengths [N]."""

    document: Tensor
    position: Tensor
    lengths: Tensor


def documents(cu_seqlens: Int[Tensor, "N+1"], length: int) -> Documents:
    """The document and position of each of `length` tokens; a tail counts to the last document."""
    offsets = cu_seqlens.long()
    token = torch.arange(length, device=offsets.device)
    document = torch.searchsorted(offsets[1:], token, right=True)
    document = document.clamp(max=max(offsets.shape[0] - 2, 0))
    return Documents(document, token - offsets[document], offsets.diff())


def new_lengths(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """How many tokens each row of `x` [B, T, ...] brings, [N]."""
    if cu_seqlens is not None:
        return cu_seqlens.long().diff()
    return torch.full((x.shape[0],), x.shape[1], dtype=torch.long, device=x.device)


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is that already: for gates, norms and states."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / |x| along the last dimension, in float32 (float64 stays); a zero vector stays zero."""
    x = wide(x)
    return x * (x.square().sum(-1, keepdim=True) + eps * eps).rsqrt()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32; returned in the dtype of x."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.init_weights()

    def init_weights(self, std: float = 0.0) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        y = wide(x)
        y = y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (y * self.weight.to(y.dtype)).to(x.dtype)


class WideLinear(nn.Linear):
    """A linear map computed in float32 (float64 stays), also under autocast.

    For gates, which feel a rounding at every later token. A class, not a function of the weight, so
    that adapters can wrap it.
    """

    def forward(self, input: Tensor) -> Tensor:
        with exactly(input):
            bias = None if self.bias is None else wide(self.bias)
            return F.linear(wide(input), wide(self.weight), bias)


class LowRank(nn.Module):
    """A linear map through `rank` dimensions."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def init_weights(self, std: float) -> None:
        nn.init.normal_(self.down.weight, std=std)
        nn.init.normal_(self.up.weight, std=self.down.out_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class ShortConv(nn.Module):
    """Causal depthwise convolution: y_t = sum_j weight_j x_{t - width + 1 + j}, then activation.

    The state [N, width - 1, D] holds the last inputs of each row, zeros before the first token.
    """

    def __init__(
        self, channels: int, width: int, *, bias: bool = False, activation: str | None = None
    ) -> None:
        super().__init__()
        if activation not in (None, "silu"):
            raise ValueError(f"ShortConv: activation must be None or 'silu', got {activation!r}")
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.width, self.activation = width, activation
        self.init_weights()

    def init_weights(self, std: float = 0.0) -> None:
        bound = self.width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: Float[Tensor, "N W D"] | None = None,
        cu_seqlens: Int[Tensor, "N+1"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N W D"]]:
        """The convolved tokens and the state behind the last of them."""
        past = self.width - 1
        if state is None:
            rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            state = x.new_zeros(rows, past, x.shape[2])
        state = state.to(x.dtype)
        if cu_seqlens is None:
            whole = torch.cat([state, x], 1)
            taps = [whole[:, j : j + x.shape[1]] for j in range(self.width)]
            state = whole[:, whole.shape[1] - past :]
        else:
            taps, state = self._packed(x, state, cu_seqlens)
        weight = self.weight.to(x.dtype)[:, 0].T
        y = sum(tap * w for tap, w in zip(taps, weight, strict=True))
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return F.silu(y) if self.activation == "silu" else y, state

    def _packed(self, x: Tensor, state: Tensor, cu_seqlens: Tensor) -> tuple[list[Tensor], Tensor]:
        """Every tap of each token, and the new state, from within its own document."""
        past, length = self.width - 1, x.shape[1]
        if not (past and length and state.shape[0]):
            return [x] * self.width, state
        where = documents(cu_seqlens, length)
        token = torch.arange(length, device=x.device)

        def look(token: Tensor, document: Tensor, position: Tensor) -> Tensor:
            inside = x[0, token.clamp(0, length - 1)]
            before = state[document, (past + position).clamp(0, past - 1)]
            return torch.where((position >= 0)[..., None], inside, before)

        taps = [
            look(token - back, where.document, where.position - back)[None]
            for back in range(past, -1, -1)
        ]
        slot = torch.arange(past, device=x.device) - past
        ends = cu_seqlens[1:].long()[:, None] + slot
        rows = torch.arange(state.shape[0], device=x.device)[:, None].expand_as(ends)
        return taps, look(ends, rows, where.lengths[:, None] + slot)
