"""Palimpsa as a layer, on two backbones (arXiv 2602.09075v4, Sec. 2.2 and Appendix A.1).

    dt        = softplus(W_dt x + dt_bias)          log_decay = -exp(A_log) dt             per head
    beta      = s (.) sigmoid(W_up W_down x) (.) softplus(b_scale)                 per value channel
    y         = palimpsa(q, k, w = s v, beta, log_decay, prior) + D v

D  DeltaNet's: q, k = l2(SiLU(conv4(W x))), v = SiLU(conv4(W x)), input gate s = sigmoid(W_s x) per
   head, scale K^-1/2; out = W_o (RMSNorm per head of y, (.) SiLU(W_g x)); an MLP follows.
M  Mamba2's: z, (v, k, q), dt = split(W_in x); (v, k, q) = SiLU(conv4(.) + bias); s = dt, scale 1;
   out = W_o RMSNorm(y (.) SiLU(z)). Parameters bear the names of transformers' Mamba2.

Metaplasticity is what beta does. Without it the memory is gated linear attention with the write
s v: the ablation of D, and for M exactly Mamba2. Departure: b_scale is stored as the inverse of
softplus, so that the effective scale starts in [0.1, 1] as the paper says.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from seqmix.layers.attention import head_sizes
from seqmix.layers.common import LowRank, RMSNorm, ShortConv, l2_normalize, new_lengths, wide
from seqmix.layers.state import State, check_call
from seqmix.ops.linear import gated_linear_attention
from seqmix.ops.palimpsa import palimpsa


@dataclass(frozen=True)
class PalimpsaMemory(State):
    """conv [N, 3, channels]; content [N, H, V, K]; excess [N, H, M, K], None without beta."""

    conv: Tensor
    content: Tensor
    excess: Tensor | None


class _Palimpsa(nn.Module):
    """What the backbones share: decay, importance, memory and skip connection."""

    no_decay: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D", "b_scale", "log_prior")
    conv1d: ShortConv

    def __init__(
        self,
        name: str,
        hidden_size: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        scale: float | None,
        *,
        metaplasticity: bool,
        beta_groups: int | None,
        prior: float,
        learn_prior: bool,
        b_scale: tuple[float, float],
        impl: str | None,
    ) -> None:
        super().__init__()
        groups = value_dim if beta_groups is None else beta_groups
        if groups < 1 or value_dim % groups:
            raise ValueError(f"{name}: beta_groups must divide {value_dim}, got {groups}")
        if not prior > 0:
            raise ValueError(f"{name}: prior must be positive, got {prior}")
        if not 0 < b_scale[0] <= b_scale[1]:
            raise ValueError(f"{name}: b_scale must be a range of positive numbers, got {b_scale}")
        self.num_heads, self.key_dim, self.value_dim = num_heads, key_dim, value_dim
        self.scale, self.prior, self.b_range, self.impl = scale, prior, b_scale, impl
        self.groups = groups if metaplasticity else 0
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.beta_proj = self.b_scale = self.log_prior = None
        if metaplasticity:
            rank = max(1, hidden_size // 16)
            self.beta_proj = LowRank(hidden_size, num_heads * groups, rank)
            self.b_scale = nn.Parameter(torch.empty(num_heads))
            self.log_prior = nn.Parameter(torch.empty(num_heads)) if learn_prior else None

    @torch.no_grad()
    def init_weights(self, std: float = 0.02) -> None:
        """Set every parameter: linear maps N(0, std); steps, decays and importance as published."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            else:
                module.init_weights(std)
        nn.init.uniform_(self.A_log, 1, 16).log_()
        softplus_uniform_(self.dt_bias, 1e-3, 0.1)
        nn.init.ones_(self.D)
        if self.beta_proj is not None:
            bound = self.beta_proj.down.out_features**-0.5
            nn.init.uniform_(self.beta_proj.up.weight, -bound, bound)
            softplus_uniform_(self.b_scale, *self.b_range)
        if self.log_prior is not None:
            nn.init.constant_(self.log_prior, math.log(self.prior))

    def _step(self, dt: Tensor) -> Tensor:
        return F.softplus(wide(dt) + wide(self.dt_bias))

    def _beta(self, x: Tensor, s: Tensor) -> Tensor:
        """Precision of the observations, [B, T, H, M]."""
        importance = wide(self.beta_proj(x)).sigmoid().unflatten(-1, (self.num_heads, self.groups))
        return s[..., None] * importance * F.softplus(wide(self.b_scale))[:, None]

    def _remember(
        self,
        tokens: tuple[Tensor, ...],
        state: PalimpsaMemory | None,
        conv: Tensor,
        cu_seqlens: Tensor | None,
        return_state: bool,
    ) -> tuple[Tensor, PalimpsaMemory | None]:
        """y [B, T, H, V] with its skip connection, and the state; tokens: x, q, k, v, s, dt."""
        x, q, k, v, s, dt = tokens
        w, log_decay = (s[..., None] * v).to(q.dtype), -wide(self.A_log).exp() * dt
        options = {"scale": self.scale, "cu_seqlens": cu_seqlens, "return_state": return_state}
        options["impl"] = self.impl
        if self.beta_proj is None:
            start = state and state.content
            y, last = gated_linear_attention(q, k, w, log_decay, state=start, **options)
            y, last = y / self.prior, (last, None)
        else:
            prior = self.prior if self.log_prior is None else wide(self.log_prior).exp()
            start, beta = state and (state.content, state.excess), self._beta(x, s)
            y, last = palimpsa(q, k, w, beta, log_decay, prior, state=start, **options)
        y = (y + wide(self.D)[:, None] * v).to(q.dtype)
        if not return_state:
            return y, None
        seen = new_lengths(x, cu_seqlens) + (0 if state is None else state.seen)
        return y, PalimpsaMemory(seen, conv, *last)

    def flops(self, length: int) -> int:
        """Forward FLOPs of one sequence of `length` tokens."""
        weights = sum(p.numel() for p in self.parameters() if p.ndim > 1)
        update, read = 3 * (self.value_dim + self.groups), 2 * self.value_dim
        divide = self.groups and self.groups + self.value_dim
        memory = self.num_heads * self.key_dim * (update + read + divide)
        return length * (2 * weights + memory)

    def state_bytes(self, length: int) -> int:
        """Bytes of the state of one sequence, whatever its length."""
        memory = 4 * self.num_heads * self.key_dim * (self.value_dim + self.groups)
        weight = self.conv1d.weight
        return memory + (self.conv1d.width - 1) * weight.shape[0] * weight.element_size()


class PalimpsaD(_Palimpsa):
    """Palimpsa on DeltaNet's backbone.

    head_dim: key size, hidden_size / num_heads by default. expand_v: value size / key size.
    metaplasticity: whether the memory tracks precision. beta_groups: groups of value channels that
    share beta, one a channel by default. prior, learn_prior: I_prior, and whether it is learned per
    head. b_scale: range of the effective scale of beta at the start.
    """

    mlp: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        conv_size: int = 4,
        metaplasticity: bool = True,
        beta_groups: int | None = None,
        prior: float = 1.0,
        learn_prior: bool = False,
        b_scale: tuple[float, float] = (0.1, 1.0),
        impl: str | None = None,
    ) -> None:
        *_, key_dim = head_sizes("palimpsa_d", hidden_size, num_heads, None, head_dim)
        value_dim = int(expand_v * key_dim)
        super().__init__(
            "palimpsa_d",
            hidden_size,
            num_heads,
            key_dim,
            value_dim,
            None,  # K^-1/2
            metaplasticity=metaplasticity,
            beta_groups=beta_groups,
            prior=prior,
            learn_prior=learn_prior,
            b_scale=b_scale,
            impl=impl,
        )
        self.sizes = [num_heads * key_dim, num_heads * key_dim, num_heads * value_dim]
        self.qkv_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.conv1d = ShortConv(sum(self.sizes), conv_size, activation="silu")
        self.s_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.dt_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.gate_proj = nn.Linear(hidden_size, num_heads * value_dim, bias=False)
        self.norm = RMSNorm(value_dim)
        self.out_proj = nn.Linear(num_heads * value_dim, hidden_size, bias=False)
        self.init_weights()

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: PalimpsaMemory | None = None,
        cu_seqlens: Int[Tensor, "N+1"] | None = None,
        *,
        return_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], PalimpsaMemory | None]:
        """Mix x with its past; `state` holds what came before, one row a document."""
        check_call("palimpsa_d", self.qkv_proj.in_features, x, state, PalimpsaMemory, cu_seqlens)
        qkv, conv = self.conv1d(self.qkv_proj(x), state and state.conv, cu_seqlens)
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)) for part in qkv.split(self.sizes, dim=-1)
        )
        q, k = l2_normalize(q).to(v.dtype), l2_normalize(k).to(v.dtype)
        s, dt = wide(self.s_proj(x)).sigmoid(), self._step(self.dt_proj(x))
        y, state = self._remember((x, q, k, v, s, dt), state, conv, cu_seqlens, return_state)
        return self.out_proj(self.norm(y).flatten(2) * F.silu(self.gate_proj(x))), state


class PalimpsaM(_Palimpsa):
    """Palimpsa on Mamba2's backbone: without metaplasticity, Mamba2.

    state_size: key size, hidden_size / num_heads by default. num_groups: heads that share q and k
    come in so many groups, one a head by default. expand_v: inner width / hidden_size.
    norm_groups: parts of the inner width that are normalised apart; released Mamba2 weights with
    several groups need norm_groups = num_groups. Other options are those of `PalimpsaD`.
    """

    mlp: ClassVar[bool] = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        state_size: int | None = None,
        num_groups: int | None = None,
        expand_v: float = 2.0,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_groups: int = 1,
        norm_eps: float = 1e-5,
        metaplasticity: bool = True,
        beta_groups: int | None = None,
        prior: float = 1.0,
        learn_prior: bool = False,
        b_scale: tuple[float, float] = (0.1, 1.0),
        impl: str | None = None,
    ) -> None:
        inner, num_groups = int(expand_v * hidden_size), num_groups or num_heads
        for name, part, whole in (
            ("num_heads", num_heads, inner),
            ("num_groups", num_groups, num_heads),
            ("norm_groups", norm_groups, inner),
        ):
            if part < 1 or whole % part:
                raise ValueError(f"palimpsa_m: {name} must divide {whole}, got {part}")
        state_size = state_size or hidden_size // num_heads
        super().__init__(
            "palimpsa_m",
            hidden_size,
            num_heads,
            state_size,
            inner // num_heads,
            1.0,
            metaplasticity=metaplasticity,
            beta_groups=beta_groups,
            prior=prior,
            learn_prior=learn_prior,
            b_scale=b_scale,
            impl=impl,
        )
        self.sizes = [inner, num_groups * state_size, num_groups * state_size]
        self.in_proj = nn.Linear(hidden_size, inner + sum(self.sizes) + num_heads, bias=bias)
        self.conv1d = ShortConv(sum(self.sizes), conv_size, bias=conv_bias, activation="silu")
        self.norm = GatedRMSNorm(inner, norm_groups, norm_eps)
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias)
        self.init_weights()

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: PalimpsaMemory | None = None,
        cu_seqlens: Int[Tensor, "N+1"] | None = None,
        *,
        return_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], PalimpsaMemory | None]:
        """Mix x with its past; `state` holds what came before, one row a document."""
        check_call("palimpsa_m", self.in_proj.in_features, x, state, PalimpsaMemory, cu_seqlens)
        widths = [self.sizes[0], sum(self.sizes), self.num_heads]
        z, vkq, dt = self.in_proj(x).split(widths, dim=-1)
        vkq, conv = self.conv1d(vkq, state and state.conv, cu_seqlens)
        v, k, q = vkq.split(self.sizes, dim=-1)
        v = v.unflatten(-1, (self.num_heads, -1))
        q, k = (self._per_head(part) for part in (q, k))
        dt = self._step(dt)
        y, state = self._remember((x, q, k, v, dt, dt), state, conv, cu_seqlens, return_state)
        return self.out_proj(self.norm(y.flatten(2), z)), state

    def _per_head(self, x: Tensor) -> Tensor:
        """Groups of keys or queries, repeated for every head of the group: [B, T, H, K]."""
        x = x.unflatten(-1, (-1, self.key_dim))
        return x.repeat_interleave(self.num_heads // x.shape[2], dim=2)


class GatedRMSNorm(nn.Module):
    """RMSNorm of x SiLU(z), in groups of channels that are normalised apart; float32 inside."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.groups, self.eps = groups, eps

    def init_weights(self, std: float = 0.0) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "... D"], z: Float[Tensor, "... D"]) -> Tensor:
        y = (wide(x) * F.silu(wide(z))).unflatten(-1, (self.groups, -1))
        y = (y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2)
        return (y * self.weight.to(y.dtype)).to(x.dtype)


def softplus_uniform_(x: Tensor, low: float, high: float) -> None:
    """Fill x so that softplus(x) is log-uniform between low and high."""
    nn.init.uniform_(x, math.log(low), math.log(high)).exp_()
    x.add_((-torch.expm1(-x)).log_())
