"""Lattice as a layer: unit slots written orthogonally (arXiv 2504.05646v2, Sec. 3 and Fig. 4).

    q, k  = l2(conv4(W x)) in R^S        v = W_v x in R^V        gamma = sigmoid(W_gamma x) per head
    mu    = 1 - (1 - FLOOR) gamma sigmoid(W_lambda x + b)        per head, about .99 at the start
    y     = W_o (RMSNorm(lattice(q, k, v, gamma, mu)) (.) GELU(W_g x))

The slots start at S_0, learned per head and column-normalised at every forward pass. Settled here
because the paper leaves it open: S_0, no feature map beyond l2, the form of mu.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from seqmix.layers.common import RMSNorm, ShortConv, l2_normalize, new_lengths, wide
from seqmix.layers.state import State, append, check_call
from seqmix.ops.check import Arguments
from seqmix.ops.lattice import check_rule, lattice
from seqmix.ops.packing import pack_rows, pad_rows

FLOOR = 0.01  # mu never falls below: the slots keep a direction
START = math.log(0.02 / 0.98)  # bias of lambda; with gamma = 1/2, mu starts at .99
NEUTRAL = (0.0, 0.0, 0.0, 0.0, 1.0)  # q, k, v, gamma, mu of a token that changes nothing


@dataclass(frozen=True)
class LatticeState(State):
    """slots [N, H, V, S] at the last chunk border, conv [N, 3, 2 H S], and the tokens since.

    k, v, gamma and mu hold the seen % C tokens behind the border, [N, C - 1, H, ...]; None at
    C = 1.
    """

    slots: Tensor
    conv: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    gamma: Tensor | None = None
    mu: Tensor | None = None


class Lattice(nn.Module):
    """A memory of `slots` unit vectors of size `head_dim` a head.

    head_dim: hidden_size / num_heads by default. slots: head_dim by default.
    objective, chunk_size, form, norm, sweeps: the rule, as in `seqmix.ops.lattice`; chunk_size 1 is
    the exact one. forget_gate: mu < 1; without it nothing decays.
    """

    mlp: ClassVar[bool] = True
    no_decay: ClassVar[tuple[str, ...]] = ("initial_slots",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        slots: int | None = None,
        objective: str = "dec",
        chunk_size: int = 1,
        form: str = "gated",
        norm: str = "token",
        sweeps: int = 1,
        forget_gate: bool = True,
        conv_size: int = 4,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        check_rule(Arguments("lattice"), objective, chunk_size, form, norm, sweeps)
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                "lattice: hidden_size must be a multiple of num_heads unless head_dim is given, "
                f"got {hidden_size} and {num_heads}"
            )
        self.num_heads, self.head_dim = num_heads, head_dim or hidden_size // num_heads
        self.slots, self.chunk_size = slots or self.head_dim, chunk_size
        self.rule = {"objective": objective, "chunk_size": chunk_size, "form": form, "norm": norm}
        self.rule |= {"sweeps": sweeps, "impl": impl}
        codes, values = num_heads * self.slots, num_heads * self.head_dim
        self.qk_proj = nn.Linear(hidden_size, 2 * codes, bias=False)
        self.qk_conv = ShortConv(2 * codes, conv_size)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.gamma_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.lambda_proj = nn.Linear(hidden_size, num_heads) if forget_gate else None
        self.gate_proj = nn.Linear(hidden_size, values, bias=False)
        self.initial_slots = nn.Parameter(torch.empty(num_heads, self.head_dim, self.slots))
        self.norm = RMSNorm(self.head_dim)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.init_weights()

    def init_weights(self, std: float = 0.02) -> None:
        """Set every parameter: linear maps N(0, std), random slots, mu about .99."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
        if self.lambda_proj is not None:
            nn.init.constant_(self.lambda_proj.bias, START)
        nn.init.normal_(self.initial_slots, std=self.head_dim**-0.5)
        self.qk_conv.init_weights()
        self.norm.init_weights()

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: LatticeState | None = None,
        cu_seqlens: Int[Tensor, "N+1"] | None = None,
        *,
        return_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], LatticeState | None]:
        """Mix x with its past; `state` holds what came before, one row a document."""
        check_call("lattice", self.qk_proj.in_features, x, state, LatticeState, cu_seqlens)
        conv = None if state is None else state.conv
        qk, conv = self.qk_conv(self.qk_proj(x), conv, cu_seqlens)
        q, k = l2_normalize(qk.unflatten(-1, (2, self.num_heads, self.slots))).unbind(2)
        q, k = q.to(x.dtype), k.to(x.dtype)
        v = self.v_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        gamma = wide(self.gamma_proj(x)).sigmoid()
        mu = None
        if self.lambda_proj is not None:
            mu = 1 - (1 - FLOOR) * gamma * wide(self.lambda_proj(x)).sigmoid()

        lengths = new_lengths(x, cu_seqlens)
        tokens = (q, k, v, gamma, mu)
        if self.chunk_size == 1 or (state is None and not return_state):
            slots = self._start(len(lengths)) if state is None else state.slots
            y, slots = lattice(
                *tokens, state=slots, cu_seqlens=cu_seqlens, return_state=return_state, **self.rule
            )
            pending = ()
        else:
            rows = [pad_rows(t, cu_seqlens, n) for t, n in zip(tokens, NEUTRAL, strict=True)]
            y, slots, pending = self._in_chunks(rows, lengths, state)
            y = y if cu_seqlens is None else pack_rows(y, cu_seqlens, x.shape[1])
        if return_state:
            seen = lengths if state is None else state.seen + lengths
            state = LatticeState(seen, slots, conv, *pending)
        y = self.norm(y).flatten(2) * F.gelu(self.gate_proj(x))
        return self.o_proj(y), state if return_state else None

    def _start(self, rows: int) -> Tensor:
        """S_0 with unit columns, for every row."""
        return F.normalize(wide(self.initial_slots), dim=1).expand(rows, -1, -1, -1)

    def _in_chunks(
        self, rows: list[Tensor | None], lengths: Tensor, state: LatticeState | None
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """y of the new rows, the slots at the last chunk border and the tokens behind it.

        Whole chunks, the pending tokens first, run from the last border to the next; what is left,
        less than a chunk, runs from there and stays pending.
        """
        size = self.chunk_size
        slots, pending, count = self._pending(rows, lengths, state)
        tokens = [
            None if new is None else append(old, count, new)
            for old, new in zip(pending, rows, strict=True)
        ]
        total = count + lengths
        border = total // size * size
        position = torch.arange(tokens[0].shape[1], device=total.device)

        whole = tokens[0].shape[1] // size * size
        first = self._neutral_from(border, position[:whole], [_cut(t, whole) for t in tokens])
        y, slots = lattice(*first, state=slots, return_state=True, **self.rule)

        index = border[:, None] + position[: size - 1]
        inside = index.clamp(max=len(position) - 1)
        rest = [None if t is None else _take(t, inside) for t in tokens]
        rest = self._neutral_from(total, index, rest)
        left, _ = lattice(*rest, state=slots, **self.rule)

        room = y.new_zeros(y.shape[0], len(position) + size - whole, *y.shape[2:])
        row = torch.arange(len(total), device=total.device)[:, None].expand_as(index)
        y = torch.cat([y, room], 1).index_put((row, index), left)
        new = torch.arange(rows[0].shape[1], device=total.device)
        return _take(y, count[:, None] + new), slots, rest[1:]

    def _pending(
        self, rows: list[Tensor | None], lengths: Tensor, state: LatticeState | None
    ) -> tuple[Tensor, list[Tensor | None], Tensor]:
        """The slots at the last border, the tokens since (their q is done with), their number."""
        size = self.chunk_size - 1
        room = [t if t is None else t.new_zeros(len(t), size, *t.shape[2:]) for t in rows]
        if state is None:
            return self._start(len(lengths)), room, torch.zeros_like(lengths)
        past = [room[0], state.k, state.v, state.gamma, state.mu]
        return state.slots, past, state.seen % self.chunk_size

    def _neutral_from(
        self, end: Tensor, position: Tensor, tokens: list[Tensor | None]
    ) -> list[Tensor | None]:
        """The tokens, neutral at and behind `end` [N]."""
        behind = position >= end[:, None]
        return [
            t if t is None else t.masked_fill(behind.view(*behind.shape, *(1,) * (t.ndim - 2)), n)
            for t, n in zip(tokens, NEUTRAL, strict=True)
        ]

    def flops(self, length: int) -> int:
        """Forward FLOPs of one sequence of `length` tokens, the rule counted as at C = 1."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        weights += self.qk_conv.weight.numel()
        return length * (2 * weights + 9 * self.initial_slots.numel())

    def state_bytes(self, length: int) -> int:
        """Bytes of the state of one sequence after `length` tokens."""
        width = self.o_proj.weight.element_size()
        codes, values = self.num_heads * self.slots, self.num_heads * self.head_dim
        gates = 4 * self.num_heads * (1 if self.lambda_proj is None else 2)
        pending = (self.chunk_size - 1) * (width * (codes + values) + gates)
        return (
            4 * self.initial_slots.numel() + width * (self.qk_conv.width - 1) * 2 * codes + pending
        )


def _cut(x: Tensor | None, length: int) -> Tensor | None:
    return x if x is None else x[:, :length]


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [N, L, ...] at index [N, T] of its second dimension."""
    row = torch.arange(len(x), device=x.device)[:, None].expand_as(index)
    return x[row, index]
