"""Decoding one token: put it behind the pending ones and read them from a solution that is kept.

With the rows X = U W and E = U slower(W K^T) of the pending tokens, token t adds one to each,

    X_t = beta_t (w_t - (w_t W^T) X)        E_t = beta_t (w_t K^T - (w_t W^T) E)

so w_t goes through the same products as the queries q - (q W^T) X and q K^T - (q W^T) E.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqmix.kernels.compiling import kernel
from seqmix.kernels.path.decode import LOG2E, PENDING, Read, put_near
from seqmix.kernels.path.prepare import padded, product


@triton.jit
def put(old, new, at, side, own, n, size, G, g, SIZE: tl.constexpr, W: tl.constexpr):
    """Rows [S, W] of old [N, size, G, SIZE] with `at` [W] at `own`; stored in new, of size + 1."""
    channel = tl.arange(0, W)
    inside = (channel < SIZE)[None, :]
    here = (g * SIZE + channel)[None, :]
    place = (n * size + side)[:, None] * (G * SIZE) + here
    x = tl.load(old + place, mask=(side < size)[:, None] & inside, other=0.0).to(tl.float32)
    x = tl.where(own[:, None], at[None, :], x)
    place = (n * (size + 1) + side)[:, None] * (G * SIZE) + here
    tl.store(new + place, x.to(new.dtype.element_ty), mask=(side <= size)[:, None] & inside)
    return x


@triton.jit
def row_of(pointer, n, g, G, SIZE: tl.constexpr, W: tl.constexpr):
    """The new token's row [W] of one key head, float32."""
    channel = tl.arange(0, W)
    x = tl.load(pointer + (n * G + g) * SIZE + channel, mask=channel < SIZE, other=0.0)
    return x.to(tl.float32)


@kernel
def path_step_kernel(
    q, k, v, w, conv, beta, log_forget, pending,
    old_k, old_v, old_w, old_conv, old_beta, old_gate, old_solved, old_corner,
    new_k, new_v, new_w, new_conv, new_beta, new_gate, new_solved, new_corner,
    moved, bias, weights, sums, arrived, G, R, size, recent, slots, scratch, scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr, M: tl.constexpr,
    S: tl.constexpr, S_CONV: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Slot 0 and the appended rows. Grid (N * G); R + 1 <= M rows, size + 1 <= S tokens.

    One program: one key head of one sequence. old_* hold `size` tokens, old_conv `recent` more;
    scratch as in `path_decode_near_kernel`.
    """
    n = (tl.program_id(0) // G).to(tl.int64)
    g = tl.program_id(0) % G
    row = tl.arange(0, M)
    side = tl.arange(0, S)
    channel = tl.arange(0, P)
    count = tl.load(pending + n).to(tl.int32)
    own = side == count
    past = (side < count)[None, :]

    wt = row_of(w, n, g, G, K, P)
    place = (n * (G * R) + g * R + row)[:, None] * K + channel[None, :]
    x = tl.load(q + place, mask=(row < R)[:, None] & (channel < K)[None, :], other=0.0)
    x = tl.where((row == R)[:, None], wt[None, :], x.to(tl.float32) * scale)
    ww = put(old_w, new_w, wt, side, own, n, size, G, g, K, P)
    across = tl.where(past, product(x, tl.trans(ww), False), 0.0)
    kk = put(old_k, new_k, row_of(k, n, g, G, K, P), side, own, n, size, G, g, K, P)
    s = product(x, tl.trans(kk), False)
    mask = (side < count)[:, None] & (channel < K)[None, :]
    place = ((n * size + side) * G + g)[:, None]
    solved = tl.load(old_solved + place * K + channel[None, :], mask=mask, other=0.0)
    y = x - product(across, solved, False)
    mask = (side < count)[:, None] & (side[:, None] > side[None, :])
    corner = tl.load(old_corner + place * 64 + side[None, :], mask=mask, other=0.0)
    s -= product(across, corner, False)

    bt = tl.load(beta + n * G + g).to(tl.float32)
    xt = bt * tl.sum(tl.where((row == R)[:, None], y, 0.0), 0)
    et = bt * tl.sum(tl.where((row == R)[:, None] & past, s, 0.0), 0)
    place = ((n * (size + 1) + side) * G + g)[:, None]
    mask = (side <= size)[:, None]
    solved = tl.where(own[:, None], xt[None, :], solved)
    tl.store(new_solved + place * K + channel[None, :], solved, mask=mask & (channel < K)[None, :])
    corner = tl.where(own[:, None], et[None, :], corner)
    tl.store(new_corner + place * 64 + side[None, :], corner, mask=mask)
    along = tl.sum(x * wt[None, :], 1)
    y -= along[:, None] * xt[None, :]
    s -= along[:, None] * et[None, :]

    b = tl.load(old_beta + (n * size + side) * G + g, mask=side < size, other=0.0)
    place = (n * (size + 1) + side) * G + g
    tl.store(new_beta + place, tl.where(own, bt, b), mask=side <= size)
    behind = tl.zeros([M], tl.float32)
    if GATED:
        h = g * R + row
        live = (row < R)[:, None]
        place = (n * size + side)[None, :] * (G * R) + h[:, None]
        gate = tl.load(old_gate + place, mask=live & (side < size)[None, :], other=0.0)
        at = tl.load(log_forget + n * (G * R) + h, mask=row < R, other=0.0).to(tl.float32)
        gate = tl.where(own[None, :], at[:, None], gate)
        place = (n * (size + 1) + side)[None, :] * (G * R) + h[:, None]
        tl.store(new_gate + place, gate, mask=live & (side <= size)[None, :])
        gate = tl.where(past | own[None, :], gate * 1.4426950408889634, 0.0)
        behind = tl.sum(gate, 1)
        s += behind[:, None] - tl.cumsum(gate, 1)
    s = tl.where(past | own[None, :], s, float("-inf"))
    vv = put(old_v, new_v, row_of(v, n, g, G, V, PV), side, own, n, size, G, g, V, PV)
    vv = tl.where((side <= count)[:, None], vv, 0.0).to(v.dtype.element_ty)
    tl.store(arrived + tl.program_id(0), 0)
    line = (n * G + g) * M + row
    put_near(y, behind, s, vv, moved, bias, weights, sums, line, slots, scratch, P, PV)
    side = tl.arange(0, S_CONV)
    own = side == count + recent
    put(old_conv, new_conv, row_of(conv, n, g, G, K, P), side, own, n, size + recent, G, g, K, P)


def step(
    q: Tensor, new: list[Tensor | None], pending: Tensor, old: list[Tensor | None],
    keys: Tensor, values: Tensor, decay: Tensor | None, length: Tensor, scale: float,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """y [N, 1, H, V] of one new token, and `old` with its row behind pending[n]; contiguous.

    new: k, v, w [N, 1, G, size], conv [N, 1, G K], beta [N, 1, G] and log_forget [N, 1, H] or None.
    old: the same of P < 64 pending tokens, conv of any number more before them; then the solution
        of those, U W and U slower(W K^T) as `decode` returns it. Both, and k, w, beta and
        log_forget, in float32.
    """
    N, _, H, K = q.shape
    G, V = values.shape[2:]
    P, PV, R, size = padded(K), padded(V), H // G, old[0].shape[1]
    recent = old[3].shape[1] - size
    read = Read.of(N, G, R + 1, keys.shape[1], (P, PV), q)
    grown = [x if x is None else x.new_empty(N, x.shape[1] + 1, *x.shape[2:]) for x in old]
    y = torch.empty(N, 1, H, V, device=q.device, dtype=q.dtype)
    path_step_kernel[(N * G,)](
        q, *new, pending, *old, *grown, read.moved, read.bias, read.weights, read.sums,
        read.arrived, G, R, size, recent, read.slots, read.size, scale * LOG2E,
        K=K, V=V, P=P, PV=PV, M=read.rows, S=max(16, triton.next_power_of_2(size + 1)),
        S_CONV=triton.next_power_of_2(size + 1 + recent), GATED=decay is not None,
        num_warps=4 if max(P, PV) <= 64 else 8, num_stages=1,
    )  # fmt: skip
    read.far(keys, values, decay, length, y)
    return y, grown


def steps(heads: int, size: int) -> bool:
    """Whether `step` takes `heads` query heads a key head, behind `size` pending tokens."""
    return heads < 64 and size < PENDING
