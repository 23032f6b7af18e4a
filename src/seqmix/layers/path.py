"""PaTH attention as a layer, with or without the forget gate of FoX.

    w_t    = l2norm( conv3( low-rank(x) )_t )         per key head, in float32
    beta_t = min( 2 sigmoid(u . x_t + b), max_beta )  per key head, in float32
    f_t    = sigmoid(u_f . x_t + b_f)                 per query head, in float32
    y      = W_o path_attention(W_q x, W_k x, W_v x, w, beta, log f)

arXiv 2505.16381, Sec. 2.2. The state is a cache of keys and values. Old keys are folded: aligned to
a boundary, every transition before it applied. The tokens behind the boundary are pending, at most
`window` of them unless one call brings more; the next call that would overfill the window folds
them first. So the tokens of the last call, up to `window`, can always be cropped again.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from seqmix.chunked.path_blocks import BLOCK
from seqmix.chunked.path_cache import Folded, Pending, extend
from seqmix.layers.attention import gates_behind, head_sizes
from seqmix.layers.common import (
    LowRank,
    RMSNorm,
    ShortConv,
    WideLinear,
    l2_normalize,
    new_lengths,
)
from seqmix.layers.state import State, append, check_call
from seqmix.ops import path_cache
from seqmix.ops.choice import exactly
from seqmix.ops.packing import pack_rows, pad_rows
from seqmix.ops.path import path_attention

PREFILL = 4096  # new tokens at a time behind a cache: bounds what they need beside it


@dataclass(frozen=True)
class PathState(State):
    """Folded and pending tokens; of row n the first seen[n] - pending[n] and the first pending[n].

    keys [N, F, G, K] aligned to the boundary, values [N, F, G, V], decay [N, F, H] the sum of
    log_forget from behind a token to the boundary; k, v, w, beta, log_forget [N, P, ...] of the
    pending tokens as they came, in float32 but for v; conv [N, width - 1 + P, G K]: what went into
    the convolution at the pending tokens and just before them. moves, corner: what the
    kernels that decode keep of the pending tokens (ops/path_cache.py), None where unknown.
    """

    keys: Tensor
    values: Tensor
    decay: Tensor | None
    pending: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    log_forget: Tensor | None
    conv: Tensor
    moves: Tensor | None = None
    corner: Tensor | None = None

    def crop(self, length: int) -> Self:
        """Forget the last tokens; exact, and refused where they are folded into the keys."""
        surplus = self.surplus(length)
        lost = self.seen.clamp(max=surplus)
        if not surplus:
            return self
        if bool((lost > self.pending).any()):
            raise ValueError(
                f"PathState: cannot forget the last {surplus} tokens, older keys already carry the "
                f"transitions of all but {int(self.pending.min())}; keep a copy() from before them"
            )
        pending = self.pending - lost
        cropped = replace(self, seen=self.seen - lost, pending=pending)
        size = int(pending.max())
        kept = [x if x is None else x[:, :size] for x in (self.moves, self.corner)]
        cropped = cropped._pending_from(torch.zeros_like(pending), size)
        return replace(cropped, moves=kept[0], corner=kept[1])

    def take(
        self,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        beta: Tensor,
        log_forget: Tensor | None,
        conv: Tensor,
        lengths: Tensor,
    ) -> Self:
        """Put new rows [N, T, ...] behind the pending ones; of row n the first lengths[n] count."""
        before = self.conv.shape[1] - self.k.shape[1]
        if log_forget is not None and self.log_forget is not None:
            log_forget = append(self.log_forget, self.pending, log_forget)
        return replace(
            self,
            seen=self.seen + lengths,
            pending=self.pending + lengths,
            k=append(self.k, self.pending, k.to(self.k.dtype)),
            v=append(self.v, self.pending, v),
            w=append(self.w, self.pending, w),
            beta=append(self.beta, self.pending, beta),
            log_forget=log_forget,
            conv=append(self.conv, self.pending + before, conv),
            moves=None,
            corner=None,
        )

    def step(self, q: Tensor, rows: list, lengths: Tensor, scale: float) -> tuple[Tensor, Self]:
        """Outputs of one new row each [N, 1, H, K] on kernels, and the state behind it."""
        k, v, w, beta, log_forget, conv = rows
        heads, inner = (-1, self.k.shape[3]), self.conv.shape[2]
        old = [self.k, self.v, self.w, self.conv.unflatten(2, heads), self.beta, self.log_forget]
        solution = self._solution() or path_cache.Solution(
            self.w[:, :0], self.w.new_empty(*self.w[:, :0].shape[:3], 64)
        )
        new = (k, v, w, conv.unflatten(2, heads), beta, log_forget)
        y, grown, solution = path_cache.step(
            q, new, self.pending, old, solution, self._folded(), scale=scale
        )
        k, v, w, conv, beta, log_forget = grown
        after = replace(self, k=k, v=v, w=w, beta=beta, log_forget=log_forget)
        after = replace(after, conv=conv.view(*conv.shape[:2], inner), **solution._asdict())
        return y, replace(after, seen=self.seen + lengths, pending=self.pending + lengths)

    def fold(self, count: Tensor, keep: int, impl: str | None = None) -> Self:
        """Move the boundary over the first count[n] pending tokens; at most `keep` stay pending."""
        size = self.k.shape[1]
        is_folded = torch.arange(size, device=count.device) < count[:, None]
        beta = self.beta * is_folded[..., None]
        moved, new = path_cache.fold(self.keys, self.k, self.w, beta, impl)
        length, room, decay = self.seen - self.pending, size - keep, self.decay
        if decay is not None and self.log_forget is not None:
            gates = self.log_forget.where(is_folded[..., None], 0.0)
            older = decay + gates.sum(1, keepdim=True)
            decay = append(older, length, gates_behind(gates)[:, :room])
        folded = replace(
            self,
            keys=append(moved, length, new[:, :room].to(moved.dtype)),
            values=append(self.values, length, self.v[:, :room]),
            decay=decay,
            pending=self.pending - count,
        )
        return folded._pending_from(count, keep)

    def attend(
        self, q: Tensor, first: Tensor, scale: float, on_kernels: bool
    ) -> tuple[Tensor, Self]:
        """Outputs of the queries [N, T, H, K] of pending tokens first[n], first[n] + 1, ..."""
        pending = Pending(self.k, self.v, self.w, self.beta, self.log_forget)
        if not on_kernels or self.k.shape[1] > 64:
            return extend(q, first, pending, self._folded(), scale=scale), self
        y, solution = path_cache.extend(q, first, pending, self._folded(), scale=scale)
        return y, replace(self, **solution._asdict())

    def prefill(self, q: Tensor, tokens: Pending, scale: float, impl: str | None) -> Tensor:
        """Outputs of many new rows [N, T, ...] on kernels; no token may be pending."""
        return path_cache.prefill(q, tokens, self._folded(), scale=scale, impl=impl)

    def steps(self, q: Tensor) -> bool:
        """Whether `step` serves q [N, T, H, K]."""
        known = self.moves is not None or not self.k.shape[1]
        return known and path_cache.steps(q, self.k)

    def recent(self) -> Tensor:
        """The last inputs of the convolution, [N, width - 1, G K]."""
        return _rows_from(self.conv, self.pending, self.conv.shape[1] - self.k.shape[1])

    def _folded(self) -> Folded:
        return Folded(self.keys, self.values, self.decay, self.seen - self.pending)

    def _solution(self) -> path_cache.Solution | None:
        if self.moves is None or self.corner is None:
            return None
        return path_cache.Solution(self.moves, self.corner)

    def _pending_from(self, first: Tensor, size: int) -> Self:
        """Keep pending tokens from first[n] on, `size` of them; their solution is unknown."""
        k, v, w, beta = (_rows_from(x, first, size) for x in (self.k, self.v, self.w, self.beta))
        gates = None if self.log_forget is None else _rows_from(self.log_forget, first, size)
        conv = _rows_from(self.conv, first, self.conv.shape[1] - self.k.shape[1] + size)
        kept = replace(self, k=k, v=v, w=w, beta=beta, log_forget=gates, conv=conv)
        return replace(kept, moves=None, corner=None)


def _rows_from(x: Tensor, first: Tensor, size: int) -> Tensor:
    """x[n, first[n] : first[n] + size] of every row; anything where x ends before."""
    index = first[:, None] + torch.arange(size, device=first.device)
    row = torch.arange(x.shape[0], device=first.device)[:, None]
    return x[row, index.clamp(max=x.shape[1] - 1)]


class PathAttention(nn.Module):
    """Softmax attention along a path of data-dependent Householder transitions.

    num_kv_heads: key and value heads, num_heads by default; each has its own w and beta.
    head_dim: hidden_size / num_heads by default.
    forget_gate: the gate of FoX (this is then PaTH-FoX); its bias starts at forget_bias: sigmoid(4)
        keeps 98% a token, half after 38. A converted model may want 8: half after 2,000.
    beta_bias: where b starts; at 0 every token erases what lies along its w (beta = 1). At -5 the
        layer starts close to attention without positions (beta = 0.013).
    max_beta: the largest beta. 2, the exact reflection, rounds worse in half precision.
    w_rank: rank of the map to w; None for a full matrix. conv_size: width of its convolution.
    conv_activation: None, or "silu" as in the public implementation.
    qk_norm: RMSNorm of queries and keys per head.
    window: tokens between two folds of the cache.
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
        forget_gate: bool = False,
        forget_bias: float = 4.0,
        beta_bias: float = 0.0,
        max_beta: float = 2.0 - 1e-3,
        w_rank: int | None = 32,
        conv_size: int = 3,
        conv_activation: str | None = None,
        qk_norm: bool = False,
        window: int = 64,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.groups, self.head_dim = head_sizes(
            "path", hidden_size, num_heads, num_kv_heads, head_dim
        )
        if not 0 < max_beta <= 2:
            raise ValueError(f"path: max_beta must be in (0, 2], got {max_beta}")
        if window < 1:
            raise ValueError(f"path: window must be at least 1, got {window}")
        self.beta_bias, self.forget_bias, self.max_beta = beta_bias, forget_bias, max_beta
        self.window, self.impl = window, impl
        inner, outer = self.groups * self.head_dim, self.num_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, outer, bias=False)
        self.k_proj = nn.Linear(hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(hidden_size, inner, bias=False)
        self.w_proj = (
            nn.Linear(hidden_size, inner, bias=False)
            if w_rank is None
            else LowRank(hidden_size, inner, w_rank)
        )
        self.w_conv = ShortConv(inner, conv_size, activation=conv_activation)
        self.beta_proj = WideLinear(hidden_size, self.groups)
        self.f_proj = WideLinear(hidden_size, self.num_heads) if forget_gate else None
        self.o_proj = nn.Linear(outer, hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else None
        self.init_weights()

    def init_weights(self, std: float = 0.02) -> None:
        """Set every parameter: linear maps N(0, std), biases as given, norms 1."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=std)
        if isinstance(self.w_proj, LowRank):
            self.w_proj.init_weights(std)
        else:
            nn.init.normal_(self.w_proj.weight, std=std)
        self.w_conv.init_weights()
        gates = ((self.beta_proj, self.beta_bias), (self.f_proj, self.forget_bias))
        for linear, bias in gates:
            if linear is not None:
                nn.init.normal_(linear.weight, std=std)
                nn.init.constant_(linear.bias, bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.init_weights()

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: PathState | None = None,
        cu_seqlens: Int[Tensor, "N+1"] | None = None,
        *,
        return_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], PathState | None]:
        """Mix x with its past; `state` holds what came before, one row a document."""
        check_call("path", self.q_proj.in_features, x, state, PathState, cu_seqlens)
        q, k, v = self._heads(x)
        recent = None if state is None else state.recent()
        w, conv = self._directions(x, recent, cu_seqlens)
        beta, log_forget = self._gates(x)
        tokens, lengths = (k, v, w, beta, log_forget, conv), new_lengths(x, cu_seqlens)
        if state is None:
            y = path_attention(q, *tokens[:5], cu_seqlens=cu_seqlens, impl=self.impl).y
            if return_state:
                with exactly(x):
                    state = self._remember([pad_rows(t, cu_seqlens) for t in tokens], lengths)
        else:
            with exactly(x):
                rows = [pad_rows(t, cu_seqlens) for t in (q, *tokens)]
                y, state = self._extend(rows, lengths, state)
            y = y if cu_seqlens is None else pack_rows(y, cu_seqlens, x.shape[1])
        return self.o_proj(y.flatten(2)), state if return_state else None

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _directions(
        self, x: Tensor, recent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """w [B, T, G, K], and what went into its convolution."""
        conv = self.w_proj(x)
        w, _ = self.w_conv(conv, recent, cu_seqlens)
        return l2_normalize(w.unflatten(-1, (self.groups, self.head_dim))), conv

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """beta [B, T, G] and log_forget [B, T, H]."""
        beta = (2 * self.beta_proj(x).sigmoid()).clamp(max=self.max_beta)
        return beta, None if self.f_proj is None else F.logsigmoid(self.f_proj(x))

    def _remember(self, rows: list, lengths: Tensor) -> PathState:
        """The state behind the first tokens: the last `window` of each row stay pending."""
        k, v, w, beta, log_forget, conv = rows
        decay = None if log_forget is None else log_forget[:, :0]
        none = torch.zeros_like(lengths)
        before = conv.new_zeros(conv.shape[0], self.w_conv.width - 1, conv.shape[2])
        empty = (k[:, :0].to(w.dtype), v[:, :0], w[:, :0], beta[:, :0], decay, before)
        state = PathState(none, k[:, :0], v[:, :0], decay, none, *empty).take(*rows, lengths)
        if k.shape[1] > self.window:
            count = (lengths - self.window).clamp(min=0)
            state = state.fold(count, self.window, self.impl)
        return state

    def _extend(self, rows: list, lengths: Tensor, state: PathState) -> tuple[Tensor, PathState]:
        """Outputs of new rows behind `state`, and the state behind them, a window at a time."""
        q, *rows = rows
        on_kernels = path_cache.on_kernels(q, state.values, self.impl)
        if on_kernels and q.shape[1] > self.window:
            return self._prefill(q, rows, lengths, state)
        length, pieces = q.shape[1], [q[:, :0]]
        for stop in reversed(range(length, 0, -self.window)):
            start = max(0, stop - self.window)
            if state.k.shape[1] + stop - start > self.window:
                state = state.fold(state.pending, 0, self.impl)
            piece = [x if x is None else x[:, start:stop] for x in rows]
            some, scale = (lengths - start).clamp(0, stop - start), self.head_dim**-0.5
            if on_kernels and state.steps(q[:, start:stop]):
                y, state = state.step(q[:, start:stop], piece, some, scale)
            else:
                first = state.pending
                state = state.take(*piece, some)
                y, state = state.attend(q[:, start:stop], first, scale, on_kernels)
            pieces.append(y)
        return torch.cat(pieces, 1), state

    def _prefill(
        self, q: Tensor, rows: list, lengths: Tensor, state: PathState
    ) -> tuple[Tensor, PathState]:
        """`_extend` for many rows on kernels: a piece over itself and over what lies before it."""
        pieces = []
        for start in range(0, q.shape[1], PREFILL):
            state = state.fold(state.pending, 0, self.impl)
            now = slice(start, start + PREFILL)
            piece = [x if x is None else x[:, now] for x in rows]
            y = state.prefill(q[:, now], Pending(*piece[:5]), self.head_dim**-0.5, self.impl)
            some = (lengths - start).clamp(0, y.shape[1])
            state = state.take(*piece, some)
            count = (some - self.window).clamp(min=0)
            state = state.fold(count, min(self.window, y.shape[1]), self.impl)
            pieces.append(y)
        return torch.cat(pieces, 1), state

    def flops(self, length: int) -> int:
        """Forward FLOPs of one sequence of `length` tokens: products over all pairs included."""
        weights = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        weights += self.w_conv.weight.numel()
        pairs = length * (length + 1) // 2
        crossings = 2 * pairs * self.groups * self.head_dim**2 // BLOCK
        return 2 * length * weights + 4 * pairs * self.num_heads * self.head_dim + crossings

    def state_bytes(self, length: int) -> int:
        """Bytes of the state after one call with `length` tokens."""
        width, inner = self.k_proj.weight.element_size(), self.groups * self.head_dim
        pending = min(length, self.window)
        gates = 4 * self.num_heads if self.f_proj is not None else 0
        folded_bytes = 2 * inner * width + gates
        pending_bytes = 2 * inner * width + 2 * inner * 4 + self.groups * 4 + gates
        before = (self.w_conv.width - 1) * inner * width
        return (length - pending) * folded_bytes + pending * pending_bytes + before
