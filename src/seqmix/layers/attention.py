"""Causal softmax attention as a layer: rotary, no or linear-bias positions, or the gate of FoX.

rope   rotary positions (arXiv 2104.09864)
nope   none
alibi  logits fall by slope_h a token (arXiv 2108.12409)
fox    logits fall by a learned gate (arXiv 2503.02130)
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from seqmix.layers.common import RMSNorm, documents, new_lengths, wide
from seqmix.layers.state import State, append, check_call
from seqmix.ops.attention import attention
from seqmix.ops.packing import pack_rows, pad_rows

POSITIONS = ("rope", "nope", "alibi")


@dataclass(frozen=True)
class KeyValueState(State):
    """keys [N, L, G, K], values [N, L, G, V]; decay [N, L, H]: log gates behind a key, summed."""

    keys: Tensor
    values: Tensor
    decay: Tensor | None

    def crop(self, length: int) -> Self:
        """Forget the last tokens; exact for attention."""
        surplus = self.surplus(length)
        seen = (self.seen - surplus).clamp(min=0)
        if self.decay is None or not surplus:
            return replace(self, seen=seen)
        last = (seen - 1).clamp(min=0)[:, None, None].expand(-1, 1, self.decay.shape[2])
        return replace(self, seen=seen, decay=self.decay - self.decay.gather(1, last))


class Attention(nn.Module):
    """Softmax attention over all past tokens; the state is the cache of keys and values.

    num_kv_heads: key and value heads, num_heads by default; query head h reads h // (H / G).
    head_dim: hidden_size / num_heads by default.
    position: "rope", "nope" or "alibi". rope_theta: base of the rotary frequencies.
    forget_gate: the gate of FoX; its bias starts at forget_bias (sigmoid(4) keeps 98% a token).
    qk_norm: RMSNorm of queries and keys per head.
    """

    mlp: ClassVar[bool] = True
    no_decay: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        position: str = "rope",
        rope_theta: float = 10_000.0,
        forget_gate: bool = False,
        forget_bias: float = 4.0,
        qk_norm: bool = False,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        if position not in POSITIONS:
            choices = ", ".join(map(repr, POSITIONS))
            raise ValueError(f"attention: position must be one of {choices}, got {position!r}")
        self.num_heads, self.groups, self.head_dim = head_sizes(
            "attention", hidden_size, num_heads, num_kv_heads, head_dim
        )
        if position == "rope" and self.head_dim % 2:
            raise ValueError(
                f"attention: head_dim must be even with position 'rope', got {self.head_dim}"
            )
        self.hidden_size, self.position, self.impl = hidden_size, position, impl
        self.rope_theta, self.forget_bias = rope_theta, forget_bias
        inner, outer = self.groups * self.head_dim, self.num_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, outer, bias=False)
        self.k_proj = nn.Linear(hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(outer, hidden_size, bias=False)
        self.f_proj = nn.Linear(hidden_size, self.num_heads) if forget_gate else None
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else None
        self.init_weights()

    def init_weights(self, std: float = 0.02) -> None:
        """Set every parameter: linear maps N(0, std), gate bias forget_bias, norms 1."""
        for module in (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.f_proj):
            if module is not None:
                nn.init.normal_(module.weight, std=std)
        if self.f_proj is not None:
            nn.init.constant_(self.f_proj.bias, self.forget_bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.init_weights()

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: KeyValueState | None = None,
        cu_seqlens: Int[Tensor, "N+1"] | None = None,
        *,
        return_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], KeyValueState | None]:
        """Mix x with its past; `state` holds what came before, one row a document."""
        check_call("attention", self.hidden_size, x, state, KeyValueState, cu_seqlens)
        q, k, v = self._project(x, state, cu_seqlens)
        log_forget = self._log_forget(x)
        rows = []
        if state is not None or return_state:
            rows = [pad_rows(t, cu_seqlens) for t in (q, k, v, log_forget)]
        if state is None:
            y = attention(q, k, v, log_forget, cu_seqlens=cu_seqlens, impl=self.impl).y
        else:
            y = self._attend(*rows, state)
            y = y if cu_seqlens is None else pack_rows(y, cu_seqlens, x.shape[1])
        state = self._extend(*rows[1:], new_lengths(x, cu_seqlens), state) if return_state else None
        return self.o_proj(y.flatten(2)), state

    def _project(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.position == "rope":
            angles = self._angles(x, state, cu_seqlens)
            q, k = rotate(q, angles), rotate(k, angles)
        return q, k, v

    def _angles(self, x: Tensor, state: State | None, cu_seqlens: Tensor | None) -> Tensor:
        """Rotary angles, [B or 1, T, K / 2], float32."""
        if cu_seqlens is None:
            position = torch.arange(x.shape[1], device=x.device)[None]
            if state is not None:
                position = position + state.seen[:, None]
        else:
            where = documents(cu_seqlens, x.shape[1])
            past = 0 if state is None else state.seen[where.document]
            position = (where.position + past)[None]
        half = self.head_dim // 2
        power = torch.arange(half, device=x.device, dtype=torch.float32) / half
        return position[..., None] * self.rope_theta**-power

    def _log_forget(self, x: Tensor) -> Tensor | None:
        if self.f_proj is not None:
            return F.logsigmoid(wide(self.f_proj(x)))
        if self.position == "alibi":
            slopes = alibi_slopes(self.num_heads).to(x.device)
            return -slopes.expand(*x.shape[:2], -1)
        return None

    def _extend(
        self,
        k: Tensor,
        v: Tensor,
        log_forget: Tensor | None,
        lengths: Tensor,
        past: KeyValueState | None,
    ) -> KeyValueState:
        """The cache with new rows behind it."""
        decay = None if log_forget is None else gates_behind(log_forget)
        if past is None:
            return KeyValueState(lengths, k, v, decay)
        if log_forget is not None:
            decay = append(past.decay + log_forget.sum(1, keepdim=True), past.seen, decay)
        keys, values = append(past.keys, past.seen, k), append(past.values, past.seen, v)
        return KeyValueState(past.seen + lengths, keys, values, decay)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor | None, past: KeyValueState
    ) -> Tensor:
        """New rows [N, T, ...] over what the cache holds and over themselves."""
        cached, new = past.keys.shape[1], q.shape[1]
        old = torch.arange(cached, device=q.device) < past.seen[:, None]  # N L
        causal = torch.ones(new, new, dtype=torch.bool, device=q.device).tril()
        mask = torch.cat([old[:, None].expand(-1, new, -1), causal.expand(q.shape[0], -1, -1)], -1)[
            :, None
        ]  # N 1 T L+T
        if log_forget is not None:
            to_old = past.decay[:, None] + log_forget.cumsum(1)[:, :, None]  # N T L H
            bias = torch.cat([to_old, gates_between(log_forget)], 2).permute(0, 3, 1, 2)
            mask = bias.masked_fill(~mask, -math.inf).to(q.dtype)
        k, v = torch.cat([past.keys, k], 1), torch.cat([past.values, v], 1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return y.transpose(1, 2)

    def flops(self, length: int) -> int:
        """Forward FLOPs of one sequence of `length` tokens."""
        weights = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        pairs = length * (length + 1) // 2
        return 2 * length * weights + 4 * pairs * self.num_heads * self.head_dim

    def state_bytes(self, length: int) -> int:
        """Bytes of the cache of one sequence of `length` tokens."""
        width = self.k_proj.weight.element_size()
        gates = 4 * self.num_heads if self._gated else 0
        return length * (2 * self.groups * self.head_dim * width + gates)

    @property
    def _gated(self) -> bool:
        return self.f_proj is not None or self.position == "alibi"


def head_sizes(
    name: str, hidden_size: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int, int]:
    """Heads, key/value heads and head size, checked."""
    groups = num_heads if num_kv_heads is None else num_kv_heads
    if groups < 1 or num_heads % groups:
        raise ValueError(
            f"{name}: num_heads must be a multiple of num_kv_heads, got {num_heads} and {groups}"
        )
    if head_dim is None:
        if hidden_size % num_heads:
            raise ValueError(
                f"{name}: hidden_size must be a multiple of num_heads unless head_dim is given, "
                f"got {hidden_size} and {num_heads}"
            )
        head_dim = hidden_size // num_heads
    return num_heads, groups, head_dim


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + K/2}) of x [B, T, H, K] by angles [B, T, K / 2]."""
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    a, b = wide(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def alibi_slopes(num_heads: int) -> Tensor:
    """2^(-8 h / H) for h = 1..H: the published slopes when H is a power of two."""
    return 2.0 ** (-8.0 * torch.arange(1, num_heads + 1) / num_heads)


def gates_behind(log_forget: Float[Tensor, "N T H"]) -> Float[Tensor, "N T H"]:
    """sum_{s > j} log_forget_s for each token j: sums of one sign, no differences."""
    later = log_forget.flip(1).cumsum(1).flip(1)
    return torch.cat([later[:, 1:], torch.zeros_like(later[:, :1])], 1)


def gates_between(log_forget: Float[Tensor, "N T H"]) -> Float[Tensor, "N T T H"]:
    """sum_{s=j+1..i} log_forget_s for query i and key j <= i, 0 elsewhere."""
    length = log_forget.shape[1]
    behind = torch.ones(length, length, dtype=torch.bool, device=log_forget.device).tril(-1)
    return torch.where(behind[..., None], log_forget[:, :, None], 0.0).cumsum(1)
