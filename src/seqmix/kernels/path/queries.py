"""Query side of the backward pass: queries at the edges of their segments, and their gradients.

Units inside: queries carry scale log2(e), so that logits are base 2; gradients of logits carry
`scaling`, a power of two that keeps them within float16 whatever the size of dy. With ds the
scaled gradient of a natural logit and dq = sum ds k: true dq is scale / scaling dq, and every
gradient that meets a query (keys, transitions, w) is ln 2 / scaling times what is kept here.
"""

import triton
import triton.language as tl

from seqmix.kernels.path.prepare import rows
from seqmix.kernels.path.spans import scaled


@triton.jit
def path_queries_kernel(
    q, w, dy, y, lse, gates, scaling, solved, transitions, queries, row_max, delta,
    table, offsets, first,
    tokens, row, N, H, G, scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr,
    S1: tl.constexpr, S2: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """queries [3, H, tokens, P] at the left edge of their segment of each level.

    Grid (blocks * H). Also delta = scaling sum dy y, and row_max = lse less the gate, base 2, both
    [H, tokens] float32, so that p = exp2(q k - gate_j - row_max).
    """
    entry = tl.program_id(0) // H
    h = tl.program_id(0) % H
    g = (h // (H // G)).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    position = tl.load(table + 2 * entry + 1) * 64
    begin = tl.load(offsets + document)
    end = tl.load(offsets + document + 1)
    dtype: tl.constexpr = queries.dtype.element_ty
    side = tl.arange(0, 64)
    channel = tl.arange(0, P)
    value = tl.arange(0, PV)
    token = begin + position + side
    alive = token < end
    place = (token * H + h)[:, None]

    mask = alive[:, None] & (value < V)[None, :]
    dyy = tl.load(dy + place * V + value[None, :], mask=mask, other=0.0).to(tl.float32)
    yy = tl.load(y + place * V + value[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(
        delta + h.to(tl.int64) * tokens + token, tl.sum(dyy * yy, 1) * tl.load(scaling), mask=alive
    )
    top = tl.load(lse + token * H + h, mask=alive, other=0.0) * 1.4426950408889634
    if GATED:
        shift = (begin // row * H + h) * row - begin // row * row
        top -= tl.load(gates + shift + token, mask=alive, other=0.0)
    tl.store(row_max + h.to(tl.int64) * tokens + token, top, mask=alive)

    mask = alive[:, None] & (channel < K)[None, :]
    qq = tl.load(q + place * K + channel[None, :], mask=mask, other=0.0).to(tl.float32) * scale
    ww = tl.load(w + (token * G + g)[:, None] * K + channel[None, :], mask=mask, other=0.0)
    slot = (tl.load(first + document) + position // 64).to(tl.int64) * G + g
    uw = tl.load(solved + slot * 64 * P + side[:, None] * P + channel[None, :])
    b = tl.dot(qq.to(dtype), tl.trans(ww.to(dtype)), input_precision="ieee")
    b = tl.where(side[:, None] >= side[None, :], b, 0.0)
    qq = tl.dot(b.to(dtype), uw, qq, input_precision="ieee")
    out = queries + (h.to(tl.int64) * tokens + token)[:, None] * P + channel[None, :]
    tl.store(out, qq.to(dtype), mask=alive[:, None])

    whole = channel[:, None] * P + channel[None, :]
    base = tl.load(first + document)
    for _ in range(position % S1 // 64):
        position -= 64
        x = tl.load(transitions + ((base + position // 64).to(tl.int64) * G + g) * P * P + whole)
        qq = tl.dot(qq.to(dtype), tl.trans(x), qq, input_precision="ieee")
    out = queries + ((H + h.to(tl.int64)) * tokens + token)[:, None] * P + channel[None, :]
    tl.store(out, qq.to(dtype), mask=alive[:, None])
    base = tl.load(first + N + document)
    for _ in range(position % S2 // S1):
        position -= S1
        x = tl.load(transitions + ((base + position // S1).to(tl.int64) * G + g) * P * P + whole)
        qq = tl.dot(qq.to(dtype), tl.trans(x), qq, input_precision="ieee")
    out = queries + ((2 * H + h.to(tl.int64)) * tokens + token)[:, None] * P + channel[None, :]
    tl.store(out, qq.to(dtype), mask=alive[:, None])


@triton.jit
def path_dq_kernel(
    q, k, v, w, dy, gate, gates, scaling, keys, transitions, spans, corner, solved,
    queries, row_max, delta, dq, dleft, partial, drow, table, offsets, first, base, owners,
    tokens, row, N, H, G, scale, slots,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr,
    S1: tl.constexpr, S2: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """dq; dleft [H, tokens, P], the gradient at a block's left edge; parts of dF.

    Grid (segments of S1 * H). One program: the S1 queries of one segment and head, 64 at a time,
    walking right from the document's first token: cross, dq <- dq F with dF += dq^T q, then read,
    dq += ds K, over the largest segments. Keeps its dF in its own `partial` [slots, P, P] float32
    (plain stores: deterministic). drow [H, tokens]: row sums of ds, if gated.
    """
    grid = tl.num_programs(0) // H * HEADS
    entry = tl.program_id(0) % grid // HEADS
    h = (tl.program_id(0) // grid * HEADS + tl.program_id(0) % HEADS).to(tl.int64)
    g = h // (H // G)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    owner = tl.load(table + 2 * entry + 1)
    start = owner * S1
    begin = tl.load(offsets + document)
    end = tl.load(offsets + document + 1)
    dtype: tl.constexpr = keys.dtype.element_ty
    vtype: tl.constexpr = v.dtype.element_ty
    side = tl.arange(0, 64)
    lane = tl.arange(0, C)
    channel = tl.arange(0, P)
    value = tl.arange(0, PV)
    whole = channel[:, None] * P + channel[None, :]
    gs = tl.load(scaling)
    far_steps = start // S2
    steps = far_steps + start % S2 // S1
    partial += ((tl.load(owners + document) + owner).to(tl.int64) * H + h) * slots * P * P
    if GATED:
        shift = (begin // row * H + h) * row - begin // row * row + begin
        gate += shift
        gates += shift
        here = tl.load(gate + start // S2 * S2)

    for tile in range(tl.minimum(S1, (end - begin).to(tl.int32) - start + 63) // 64):
        edge0 = start + tile * 64
        token = begin + edge0 + side
        alive = token < end
        dd = tl.load(
            dy + (token * H + h)[:, None] * V + value[None, :],
            mask=alive[:, None] & (value < V)[None, :],
            other=0.0,
        ).to(vtype)
        top = tl.load(row_max + h * tokens + token, mask=alive, other=float("inf"))
        dl = tl.load(delta + h * tokens + token, mask=alive, other=0.0)
        dqq = tl.zeros([64, P], tl.float32)
        sums = tl.zeros([64], tl.float32)
        position = 0
        for step in range(steps + tile):
            far = step < far_steps
            middle = step < steps
            size = tl.where(far, S2, tl.where(middle, S1, 64))
            level = tl.where(far, 2, tl.where(middle, 1, 0))
            edge = tl.where(far, start // S2 * S2, tl.where(middle, start, edge0))
            qh = tl.load(
                queries + ((level * H + h) * tokens + token)[:, None] * P + channel[None, :],
                mask=alive[:, None],
                other=0.0,
            )
            if position + size < edge:
                siblings = tl.where(far, 1 << 20, tl.where(middle, S2 // S1, S1 // 64))
                i = (position // size + 1) % siblings
                j = edge // size % siblings
                parent = (edge // size // siblings).to(tl.int64)
                slot = tl.load(base + level * N + document) + j * (j - 1) // 2 + i
                slot += parent * (siblings.to(tl.int64) * (siblings + 1) // 2)
                c = tl.load(spans + (slot * G + g) * P * P + whole)
                qh = tl.dot(qh, tl.trans(c), qh.to(tl.float32), input_precision="ieee").to(dtype)
            if position > 0:
                dqh, factor = scaled(dqq, dtype)
                part = tl.where(
                    far,
                    S1 // 64 + S2 // S1 - 2 + step,
                    tl.where(middle, S1 // 64 - 1 + step - far_steps, step - steps),
                )
                fresh = tl.where(middle, 0, step - steps + 1)
                out = partial + part * P * P + whole
                outer = tl.dot(tl.trans(dqh), qh, input_precision="ieee") * factor
                if tile > fresh:
                    outer += tl.load(out)
                tl.store(out, outer)
                slot = (tl.load(first + level * N + document) + position // size).to(tl.int64)
                x = tl.load(transitions + (slot * G + g) * P * P + whole)
                dqq += tl.dot(dqh, x, input_precision="ieee") * factor
            kp = keys + ((level * G + g) * tokens + begin + position) * P
            vp = v + ((begin + position) * G + g) * V
            if GATED:
                age = here - tl.load(gate + position // S2 * S2)
                shifted = top - (age * 1.4426950408889634).to(tl.float32)
                ahead = tl.load(gates + position + lane)
            else:
                shifted = top
            for n in range(0, size, C):
                kk = tl.load(kp + (n + lane)[:, None] * P + channel[None, :])
                vv = rows(vp, (n + lane) * (G * V), V, PV)
                s = tl.dot(qh, tl.trans(kk), input_precision="ieee") - shifted[:, None]
                if GATED:
                    s -= ahead[None, :]
                    ahead = tl.load(
                        gates + position + n + C + lane, mask=lane + n + C < size, other=0.0
                    )
                dp = tl.dot(dd, tl.trans(vv), input_precision="ieee")
                ds = tl.exp2(s) * (dp * gs - dl[:, None])
                if GATED:
                    sums += tl.sum(ds, 1)
                dqq = tl.dot(ds.to(dtype), kk, dqq, input_precision="ieee")
            position += size

        living = alive[:, None] & (channel < K)[None, :]
        place = (token * G + g)[:, None]
        qh = tl.load(q + (token * H + h)[:, None] * K + channel[None, :], mask=living, other=0.0)
        qh = (qh.to(tl.float32) * scale).to(dtype)
        kk = tl.load(k + place * K + channel[None, :], mask=living, other=0.0).to(dtype)
        ww = tl.load(w + place * K + channel[None, :], mask=living, other=0.0).to(dtype)
        vv = tl.load(
            v + place * V + value[None, :], mask=alive[:, None] & (value < V)[None, :], other=0.0
        )
        slot = (tl.load(first + document) + edge0 // 64).to(tl.int64) * G + g
        ue = tl.load(corner + slot * 4096 + side[:, None] * 64 + side[None, :])
        uw = tl.load(solved + slot * 64 * P + side[:, None] * P + channel[None, :])
        causal = side[:, None] >= side[None, :]
        b = tl.where(causal, tl.dot(qh, tl.trans(ww), input_precision="ieee"), 0.0)
        s = tl.dot(qh, tl.trans(kk), input_precision="ieee") - top[:, None]
        s = tl.dot(b.to(dtype), ue, s, input_precision="ieee")
        if GATED:
            s -= tl.load(gates + edge0 + side, mask=alive, other=0.0)[None, :]
        p = tl.where(causal, tl.exp2(s), 0.0)
        ds = p * (tl.dot(dd, tl.trans(vv), input_precision="ieee") * gs - dl[:, None])
        dsh = ds.to(dtype)
        tl.store(
            dleft + (h * tokens + token)[:, None] * P + channel[None, :], dqq, mask=alive[:, None]
        )
        dqh, factor = scaled(dqq, dtype)
        db = tl.dot(dqh, tl.trans(uw), input_precision="ieee") * factor
        db = tl.dot(dsh, tl.trans(ue), db, input_precision="ieee")
        dbh, factor = scaled(tl.where(causal, db, 0.0), dtype)
        dqq = tl.dot(dsh, kk, dqq, input_precision="ieee")
        dqq += tl.dot(dbh, ww, input_precision="ieee") * factor
        dqq *= scale * 0.6931471805599453 / gs
        tl.store(
            dq + (token * H + h)[:, None] * K + channel[None, :],
            dqq.to(dq.dtype.element_ty),
            mask=living,
        )
        if GATED:
            tl.store(drow + h * tokens + token, sums + tl.sum(ds, 1), mask=alive)
