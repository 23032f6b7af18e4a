"""Last step of the backward pass: inside each block, and through its solve.

logits = lower(Q K^T) + B UE    Q_left = Q + B UW    B = lower(Q W^T)        (UE, UW negated)
keys = K + UE^T W    F - I = UW^T W    UE = -U E    UW = -U W    E = slower(W K^T)
U = X D with X = (I + D L)^-1, L = slower(W W^T). From dUE and dUW, with a = X^T dUE,
c = X^T dUW, M = -(a E^T + c W^T) = X^T dU and Z = M U^T:

    dE = -slower(D a)    dW -= D c    dL = -slower(D Z)    dbeta_i = M_ii - sum_k L_ik Z_ik

which divides by no beta.
"""

import triton
import triton.language as tl

from seqmix.kernels.compiling import kernel
from seqmix.kernels.path.spans import scaled


@kernel
def path_pairs_back_kernel(
    q, k, v, w, outer, gates, scaling, corner, solved, row_max, delta, dleft, dvalues, dgates,
    dq, dv, dinner, table, offsets, first,
    tokens, lines, G, every, scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr, GROUP: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """dq and dv, and what the block's own pairs leave for its keys and its solve.

    Grid (blocks * G). One program: one block of one key head; its query heads in turn. dinner
    [blocks, G, 4, 64, max(P, 64)]: gradients of UE, UW, W (through B) and K (through Q K^T). Adds
    the block's own pairs to dvalues and, if gated, to dgates. every: key heads of a token in
    memory.
    """
    entry = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    begin = tl.load(offsets + document)
    end = tl.load(offsets + document + 1)
    dtype: tl.constexpr = corner.dtype.element_ty
    vtype: tl.constexpr = v.dtype.element_ty
    itype: tl.constexpr = dinner.dtype.element_ty
    WIDTH: tl.constexpr = P if P > 64 else 64
    WIDE: tl.constexpr = dtype == tl.float32 or P > 128
    side = tl.arange(0, 64)
    channel = tl.arange(0, P)
    value = tl.arange(0, PV)
    token = begin + index * 64 + side
    alive = token < end
    living = alive[:, None] & (channel < K)[None, :]
    giving = alive[:, None] & (value < V)[None, :]
    place = (token * every + g)[:, None]
    gs = tl.load(scaling)
    kk = tl.load(k + place * K + channel[None, :], mask=living, other=0.0).to(dtype)
    ww = tl.load(w + place * K + channel[None, :], mask=living, other=0.0).to(dtype)
    vv = tl.load(v + place * V + value[None, :], mask=giving, other=0.0)
    slot = (tl.load(first + document) + index).to(tl.int64) * G + g
    ue = tl.load(corner + slot * 4096 + side[:, None] * 64 + side[None, :])
    uw = tl.load(solved + slot * 64 * P + side[:, None] * P + channel[None, :])
    causal = side[:, None] >= side[None, :]
    part = dinner + slot * 4 * 64 * WIDTH
    wide = part + side[:, None] * WIDTH + channel[None, :]
    square = part + side[:, None] * WIDTH + side[None, :]

    for head in range(GROUP):
        h = g * GROUP + head
        more = (side[:, None] >= 0) & (head > 0)
        qh = tl.load(q + (token * (every * GROUP) + h)[:, None] * K + channel[None, :],
                     mask=living, other=0.0)  # fmt: skip
        qh = (qh.to(tl.float32) * scale).to(dtype)
        line = h * lines + (tl.load(first + document) + index) * 64 + side
        dd = tl.load(outer + line[:, None] * PV + value[None, :])
        top = tl.load(row_max + line)
        dl = tl.load(delta + line)
        if WIDE:
            tl.debug_barrier()
            kk = tl.load(k + place * K + channel[None, :], mask=living, other=0.0).to(dtype)
            ww = tl.load(w + place * K + channel[None, :], mask=living, other=0.0).to(dtype)
            ue = tl.load(corner + slot * 4096 + side[:, None] * 64 + side[None, :])
        b = tl.where(causal, tl.dot(qh, tl.trans(ww), input_precision="tf32x3"), 0.0).to(dtype)
        s = tl.dot(qh, tl.trans(kk), input_precision="tf32x3") - top[:, None]
        s = tl.dot(b, ue, s, input_precision="tf32x3")
        if GATED:
            s -= tl.load(gates + line)[None, :]
        p = tl.where(causal, tl.exp2(s), 0.0)
        if WIDE:  # large operands: none stays in shared memory for long
            tl.debug_barrier()
            vv = tl.load(v + place * V + value[None, :], mask=giving, other=0.0)
            dd = tl.load(outer + line[:, None] * PV + value[None, :])
        ds = p * (tl.dot(dd, tl.trans(vv), input_precision="tf32x3") * gs - dl[:, None])
        if GATED:
            own = tl.sum(ds, 1) - tl.sum(ds, 0)
            tl.store(dgates + line, tl.load(dgates + line) + own)
        dsh = ds.to(dtype)

        out = dvalues + (g * tokens + token)[:, None] * PV + value[None, :]
        dvv = tl.load(out, mask=alive[:, None], other=0.0)
        dvv = tl.dot(tl.trans(p.to(vtype)), dd, dvv, input_precision="tf32x3")
        tl.store(out, dvv, mask=alive[:, None] & (head < GROUP - 1))
        tl.store(dv + place * V + value[None, :], dvv.to(dv.dtype.element_ty),
                 mask=giving & (head == GROUP - 1))  # fmt: skip
        dkk = tl.load(wide + 3 * 64 * WIDTH, mask=more, other=0.0).to(tl.float32)
        dkk = tl.dot(tl.trans(dsh), qh, dkk, input_precision="tf32x3")
        tl.store(wide + 3 * 64 * WIDTH, dkk.to(itype))
        due = tl.load(square, mask=more, other=0.0).to(tl.float32)
        tl.store(square, tl.dot(tl.trans(b), dsh, due, input_precision="tf32x3").to(itype))

        dqq = tl.load(dleft + line[:, None] * P + channel[None, :])
        dqh, factor = scaled(dqq, dtype)
        duw = tl.load(wide + 64 * WIDTH, mask=more, other=0.0).to(tl.float32)
        duw += tl.dot(tl.trans(b), dqh, input_precision="tf32x3") * factor
        tl.store(wide + 64 * WIDTH, duw.to(itype))
        if WIDE:
            tl.debug_barrier()
            uw = tl.load(solved + slot * 64 * P + side[:, None] * P + channel[None, :])
            ue = tl.load(corner + slot * 4096 + side[:, None] * 64 + side[None, :])
        db = tl.dot(dqh, tl.trans(uw), input_precision="tf32x3") * factor
        db = tl.dot(dsh, tl.trans(ue), db, input_precision="tf32x3")
        dbh, factor = scaled(tl.where(causal, db, 0.0), dtype)
        dww = tl.load(wide + 2 * 64 * WIDTH, mask=more, other=0.0).to(tl.float32)
        dww += tl.dot(tl.trans(dbh), qh, input_precision="tf32x3") * factor
        tl.store(wide + 2 * 64 * WIDTH, dww.to(itype))
        if WIDE:
            tl.debug_barrier()
            kk = tl.load(k + place * K + channel[None, :], mask=living, other=0.0).to(dtype)
            ww = tl.load(w + place * K + channel[None, :], mask=living, other=0.0).to(dtype)
        dqq = tl.dot(dsh, kk, dqq, input_precision="tf32x3")
        dqq += tl.dot(dbh, ww, input_precision="tf32x3") * factor
        dqq *= scale * 0.6931471805599453 / gs
        tl.store(dq + (token * (every * GROUP) + h)[:, None] * K + channel[None, :],
                 dqq.to(dq.dtype.element_ty), mask=living)  # fmt: skip


@triton.jit
def dot(a, b):
    """a b, accumulated in float32."""
    return tl.dot(a, b, input_precision="tf32x3")


@kernel
def path_solve_back_kernel(
    k, w, beta, scaling, corner, solved, inverse, dkeys, dtransitions, factors, dinner,
    dk, dw, dbeta, table, offsets, first, tokens, G, every, K: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """dk, dw and dbeta. Grid (blocks * G); one program: one block of one key head.

    From dinner (`path_pairs_back_kernel`), the gradient of the block's keys at its right edge and
    that of its transition. Accumulates in float32.
    """
    entry = tl.program_id(0) // G
    g = (tl.program_id(0) % G).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    index = tl.load(table + 2 * entry + 1)
    begin = tl.load(offsets + document) + index * 64
    left = (tl.load(offsets + document + 1) - begin).to(tl.int32)
    dtype: tl.constexpr = corner.dtype.element_ty
    WIDE: tl.constexpr = dtype == tl.float32 or P > 128
    WIDTH: tl.constexpr = P if P > 64 else 64
    side = tl.arange(0, 64)
    row = side[:, None]
    column = side[None, :]
    channel = tl.arange(0, P)[None, :]
    alive = side < left
    there = row < left
    living = there & (channel < K)
    strict = row > column
    unit = 0.6931471805599453 / tl.load(scaling)
    token = begin * every + g
    place = token * K + row * (every * K) + channel
    slot = (tl.load(first + document) + index).to(tl.int64) * G + g
    square = slot * 4096 + row * 64 + column
    tall = slot * 64 * P + row * P + channel
    whole = tl.arange(0, P)[:, None] * P + channel
    part = dinner + slot * 4 * 64 * WIDTH + row * WIDTH
    # Whoever is behind the block reads its keys and crosses it; nobody behind the last one.
    inner = left > 64
    edge = dkeys + (g * tokens + begin) * P + row * P + channel

    ww = tl.load(w + place, mask=living, other=0.0).to(dtype)
    dfh = tl.load(dtransitions + slot * P * P + whole, mask=(whole >= 0) & inner, other=0.0)
    df_factor = tl.load(factors + slot, mask=inner, other=0.0)
    duw = tl.load(part + 64 * WIDTH + channel).to(tl.float32)
    x = tl.load(inverse + square)
    bb = tl.load(beta + token + side * every, mask=alive, other=0.0).to(tl.float32)
    duw += dot(ww, tl.trans(dfh)) * df_factor
    duwh, factor = scaled(duw, dtype)
    c = dot(tl.trans(x), duwh) * factor
    ch, factor = scaled(c, dtype)
    dww = -bb[:, None] * c
    m = dot(ch, tl.trans(ww)) * -factor
    uw = tl.load(solved + tall)
    dww += dot(uw, dfh) * df_factor

    if WIDE:  # large operands: none stays in shared memory for long
        tl.debug_barrier()
        ww = tl.load(w + place, mask=living, other=0.0).to(dtype)
        x = tl.load(inverse + square)
    moved = tl.load(edge, mask=there & inner, other=0.0).to(tl.float32)
    due = tl.load(part + column).to(tl.float32)
    dkh, factor = scaled(moved, dtype)
    due += dot(ww, tl.trans(dkh)) * factor
    ue = tl.load(corner + square)
    dww += dot(ue, dkh) * factor
    dueh, factor = scaled(due, dtype)
    a = dot(tl.trans(x), dueh) * factor
    ah, factor = scaled(a, dtype)
    if WIDE:
        tl.debug_barrier()
        ww = tl.load(w + place, mask=living, other=0.0).to(dtype)
    kk = tl.load(k + place, mask=living, other=0.0).to(dtype)
    e = tl.where(strict, dot(ww, tl.trans(kk)), 0.0).to(dtype)
    m -= dot(ah, tl.trans(e)) * factor
    deh = tl.where(strict, bb[:, None] * ah.to(tl.float32), 0.0).to(dtype)
    dww -= dot(deh, kk) * factor
    dkk = dot(tl.trans(deh), ww) * -factor
    dkk += tl.load(part + 3 * 64 * WIDTH + channel).to(tl.float32)
    dkk += tl.load(edge, mask=there & inner, other=0.0).to(tl.float32)
    tl.store(dk + place, (dkk * unit).to(dk.dtype.element_ty), mask=living)

    if WIDE:
        tl.debug_barrier()
        ww = tl.load(w + place, mask=living, other=0.0).to(dtype)
        x = tl.load(inverse + square)
    mh, factor = scaled(m, dtype)
    u = (x.to(tl.float32) * bb[None, :]).to(dtype)
    z = dot(mh, tl.trans(u))
    gram = tl.where(strict, dot(ww, tl.trans(ww)), 0.0)
    along = tl.sum(tl.where(row == column, mh.to(tl.float32), 0.0) - gram * z, 1) * factor
    tl.store(dbeta + token + side * every, (along * unit).to(dbeta.dtype.element_ty), mask=alive)
    z = tl.where(strict, bb[:, None] * z * factor, 0.0)
    zh, factor = scaled(z + tl.trans(z), dtype)
    dww -= dot(zh, ww) * factor
    dww += tl.load(part + 2 * 64 * WIDTH + channel).to(tl.float32)
    tl.store(dw + place, (dww * unit).to(dw.dtype.element_ty), mask=living)
