"""Query side of the backward pass: queries at the edges of their segments, and their gradients.

Units inside: queries carry scale log2(e), so that logits are base 2; gradients of logits carry
`scaling`, a power of two that keeps them within float16 whatever the size of dy. With ds the
scaled gradient of a natural logit and dq = sum ds k: true dq is scale / scaling dq, and every
gradient that meets a query (keys, transitions, w) is ln 2 / scaling times what is kept here.
"""

import triton.language as tl

from seqmix.kernels.compiling import kernel
from seqmix.kernels.path.prepare import rows
from seqmix.kernels.path.spans import scaled


@kernel
def path_queries_kernel(
    q, w, dy, y, lse, gates, scaling, solved, transitions, queries, outer, row_max, delta,
    table, offsets, first,
    lines, N, H, G, every, scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr,
    S1, S2, GATED: tl.constexpr,
):  # fmt: skip
    """queries [3, H, lines, P] at the left edge of their segment of each level.

    Grid (blocks * H). Also outer, dy in the same order [H, lines, PV], delta = scaling sum dy y,
    and row_max = lse less the gate, base 2, both [H, lines] float32, so that
    p = exp2(q k - gate_j - row_max). lines: 64 a block; every: key heads of a token in memory.
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
    place = token * (every * (H // G)) + h

    # Scratch of the query side goes by blocks: rows behind a document are there, and neutral.
    base = tl.load(first + document)
    line = h.to(tl.int64) * lines + base * 64 + position + side
    mask = alive[:, None] & (value < V)[None, :]
    dyy = tl.load(dy + place[:, None] * V + value[None, :], mask=mask, other=0.0)
    yy = tl.load(y + place[:, None] * V + value[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(outer + line[:, None] * PV + value[None, :], dyy.to(outer.dtype.element_ty))
    tl.store(delta + line, tl.sum(dyy.to(tl.float32) * yy, 1) * tl.load(scaling))
    top = tl.load(lse + place, mask=alive, other=float("inf")) * 1.4426950408889634
    if GATED:
        top -= tl.load(gates + line)
    tl.store(row_max + line, top)

    mask = alive[:, None] & (channel < K)[None, :]
    qq = tl.load(q + place[:, None] * K + channel[None, :], mask=mask, other=0.0)
    qq = qq.to(tl.float32) * scale
    ww = tl.load(w + (token * every + g)[:, None] * K + channel[None, :], mask=mask, other=0.0)
    slot = (base + position // 64).to(tl.int64) * G + g
    uw = tl.load(solved + slot * 64 * P + side[:, None] * P + channel[None, :])
    b = tl.dot(qq.to(dtype), tl.trans(ww.to(dtype)), input_precision="tf32x3")
    b = tl.where(side[:, None] >= side[None, :], b, 0.0)
    qq = tl.dot(b.to(dtype), uw, qq, input_precision="tf32x3")
    out = queries + line[:, None] * P + channel[None, :]
    tl.store(out, qq.to(dtype))

    whole = channel[:, None] * P + channel[None, :]
    for _ in range(position % S1 // 64):
        position -= 64
        x = tl.load(transitions + ((base + position // 64).to(tl.int64) * G + g) * P * P + whole)
        qq = tl.dot(qq.to(dtype), tl.trans(x), qq, input_precision="tf32x3")
    line += tl.full((), 1, tl.int64) * H * lines
    tl.store(queries + line[:, None] * P + channel[None, :], qq.to(dtype))
    base = tl.load(first + N + document)
    for _ in range(position % S2 // S1):
        position -= S1
        x = tl.load(transitions + ((base + position // S1).to(tl.int64) * G + g) * P * P + whole)
        qq = tl.dot(qq.to(dtype), tl.trans(x), qq, input_precision="tf32x3")
    line += tl.full((), 1, tl.int64) * H * lines
    tl.store(queries + line[:, None] * P + channel[None, :], qq.to(dtype))


@kernel
def path_dq_kernel(
    v, outer, gate, gates, scaling, keys, transitions, spans, queries, row_max, delta,
    dleft, partial, dgates, table, offsets, first, base, owners,
    tokens, row, lines, N, H, G, every, slots,
    V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr,
    S1, S2, M: tl.constexpr, C: tl.constexpr,
    FAR: tl.constexpr, NEAR: tl.constexpr, HEADS, GATED: tl.constexpr,
):  # fmt: skip
    """dleft [H, lines, P], the gradient of queries at their block's left edge, and parts of dF.

    Grid (segments of S1 * H). One program: the S1 queries of one segment and head, M at a time,
    walking right from the document's first token: cross, dq <- dq F with dF += dq^T q, then read,
    dq += ds K, over the largest segments. FAR: up to the queries' own segment of S1; NEAR, with
    M = 64: from there to their block, going on from what FAR left. Keeps its dF in its own
    `partial` [slots, P, P] float32 (plain stores: deterministic). dgates [H, lines]: row sums of
    ds, if gated.
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
    length = (tl.load(offsets + document + 1) - begin).to(tl.int32)
    dtype: tl.constexpr = keys.dtype.element_ty
    side = tl.arange(0, M)
    lane = tl.arange(0, C)
    channel = tl.arange(0, P)
    value = tl.arange(0, PV)
    whole = channel[:, None] * P + channel[None, :]
    tall = side[:, None] * P + channel[None, :]
    column = tl.arange(0, 64)[None, :]
    COPIES: tl.constexpr = 16 if P <= 64 else 1  # of sums, by columns
    ones = tl.full([C, COPIES], 1.0, dtype)
    gs = tl.load(scaling)
    far_steps = start // S2
    steps = far_steps + start % S2 // S1
    partial += ((tl.load(owners + document) + owner).to(tl.int64) * H + h) * slots * P * P
    head_line = h * lines + tl.load(first + document) * 64
    if GATED:
        gate += (begin // row * H + h) * row - begin // row * row + begin
        gates += head_line
        here = tl.load(gate + start // S2 * S2)

    for tile in range(tl.cdiv(tl.minimum(S1, length - start), M)):
        edge0 = start + tile * M
        line = head_line + tl.multiple_of(edge0, 64)
        alive = edge0 + side < tl.cdiv(length, 64) * 64
        moved = (dleft + line * P).to(tl.pointer_type(dtype))
        living = alive[:, None] & (channel >= 0)[None, :]
        dd = tl.load(
            outer + line * PV + side[:, None] * PV + value[None, :],
            mask=alive[:, None], other=0.0,
        )  # fmt: skip
        top = tl.load(row_max + line + side, mask=alive, other=float("inf"))
        dl = tl.load(delta + line + side, mask=alive, other=0.0)
        sums = tl.zeros([M, COPIES], tl.float32)
        if FAR:
            dq = tl.zeros([M, P], tl.float32)
        else:
            dq = tl.load(dleft + line * P + tall, mask=living, other=0.0)
            tl.debug_barrier()
            if GATED:
                sums += tl.load(dgates + line + side, mask=alive, other=0.0)[:, None]
        position = 0 if FAR else start
        for step in range(0 if FAR else steps, steps + tile if NEAR else steps):
            far = step < far_steps
            middle = step < steps
            size = tl.where(far, S2, tl.where(middle, S1, 64))
            level = tl.where(far, 2, tl.where(middle, 1, 0))
            edge = tl.where(far, start // S2 * S2, tl.where(middle, start, edge0))
            cross = position > 0
            behind = position + size < edge
            siblings = tl.where(far, 1 << 20, tl.where(middle, S2 // S1, S1 // 64))
            i = (position // size + 1) % siblings
            j = edge // size % siblings
            parent = (edge // size // siblings).to(tl.int64)
            slot = tl.load(base + level * N + document) + (j - 1) * (j - 2) // 2 + i - 1
            slot += parent * (siblings.to(tl.int64) * (siblings - 1) // 2)
            # First all loads, if registers suffice.
            c = tl.load(
                spans + (slot * G + g) * P * P + whole, mask=(whole >= 0) & behind, other=0.0
            )
            qh = queries + (level.to(tl.int64) * H * lines + line) * P + tall
            qh = tl.load(qh, mask=living, other=0.0)
            slot = (tl.load(first + level * N + document) + position // size).to(tl.int64)
            xp = transitions + (slot * G + g) * P * P + whole
            part = tl.where(middle, S1 // 64 - 1 + step - far_steps, step - steps)
            part = tl.where(far, S1 // 64 + S2 // S1 - 2 + step, part)
            again = cross & (tile > tl.where(middle, 0, step - steps + 1))
            out = partial + part * P * P
            # No branches around products: they would serialise all of them.
            if P <= 64:
                x = tl.load(xp, mask=(whole >= 0) & cross, other=0.0)
                old = tl.load(out + whole, mask=(whole >= 0) & again, other=0.0)
                qh = tl.dot(qh, tl.trans(c), qh.to(tl.float32), input_precision="tf32x3").to(dtype)
                dqh, factor = scaled(dq, dtype)
                old += tl.dot(tl.trans(dqh), qh, input_precision="tf32x3") * factor
                tl.store(out + whole, old, mask=(whole >= 0) & cross)
            else:
                qh = tl.dot(qh, tl.trans(c), qh.to(tl.float32), input_precision="tf32x3").to(dtype)
                tl.store(moved + tall, qh, mask=living)
                tl.debug_barrier()
                dqh, factor = scaled(dq, dtype)
                for half in tl.static_range(P // 64):
                    place = out + channel[:, None] * P + half * 64 + column
                    qs = moved + side[:, None] * P + half * 64 + column
                    qs = tl.load(qs, mask=alive[:, None], other=0.0)
                    old = tl.load(place, mask=(column >= 0) & again, other=0.0)
                    old += tl.dot(tl.trans(dqh), qs, input_precision="tf32x3") * factor
                    tl.store(place, old, mask=(column >= 0) & cross)
                tl.debug_barrier()
                x = tl.load(xp, mask=(whole >= 0) & cross, other=0.0)
                # Through memory: as an operand loaded it lies in shared memory, not in registers.
                qh = tl.load(moved + tall, mask=living, other=0.0)
            dq += tl.dot(dqh, x, input_precision="tf32x3") * factor
            kp = keys + ((level * G + g) * tokens + begin + position) * P
            vp = v + ((begin + position) * every + g) * V
            if GATED:
                age = here - tl.load(gate + position // S2 * S2)
                shifted = top - (age * 1.4426950408889634).to(tl.float32)
            else:
                shifted = top
            for n in range(0, size, C):
                kk = tl.load(kp + (n + lane)[:, None] * P + channel[None, :])
                vv = rows(vp, (n + lane) * (every * V), V, PV)
                if GATED:
                    near = tl.load(gates + tl.multiple_of(position, 64) + n + lane)
                s = tl.dot(qh, tl.trans(kk), input_precision="tf32x3") - shifted[:, None]
                if GATED:
                    s -= near[None, :]
                dp = tl.dot(dd, tl.trans(vv), input_precision="tf32x3")
                ds = tl.exp2(s) * (dp * gs - dl[:, None])
                if GATED:
                    if COPIES > 1:  # by a product: cheaper than additions and shuffles
                        sums = tl.dot(ds.to(dtype), ones, sums, input_precision="tf32x3")
                    else:
                        sums += tl.sum(ds, 1, keep_dims=True)
                dq = tl.dot(ds.to(dtype), kk, dq, input_precision="tf32x3")
            position += size

        tl.store(dleft + line * P + tall, dq, mask=living)
        if GATED:
            tl.store(dgates + line + side, tl.max(sums, 1), mask=alive)  # columns are the same
