"""Last step of the backward pass: inside each block, and through its solve.

logits = lower(Q K^T) + B UE    Q_left = Q + B UW    B = lower(Q W^T)        (UE, UW negated)
keys = K + UE^T W    F - I = UW^T W    UE = -U E    UW = -U W    E = slower(W K^T)
U = (I + slower(D W W^T))^-1 D:  with L = slower(W W^T),  dL = -slower(U^T dU U^T)  and
dbeta = diag( (I - U L)^T dU (I - L U)^T ),  which divides by no beta.
"""

import triton.language as tl

from seqmix.kernels.compiling import kernel
from seqmix.kernels.path.spans import scaled


@kernel
def path_pairs_back_kernel(
    q, k, v, w, outer, gates, scaling, corner, solved, row_max, delta, dleft, dvalues, dgates,
    dq, dv, dinner, table, offsets, first,
    tokens, lines, G, scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr, GROUP: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """dq and dv, and what the block's own pairs leave for its keys and its solve.

    Grid (blocks * G). One program: one block of one key head; its query heads in turn. dinner
    [blocks, G, 4, 64, max(P, 64)]: gradients of UE, UW, W (through B) and K (through Q K^T). Adds
    the block's own pairs to dvalues and, if gated, to dgates.
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
    place = (token * G + g)[:, None]
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
        qh = tl.load(q + (token * (G * GROUP) + h)[:, None] * K + channel[None, :],
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
        tl.store(dq + (token * (G * GROUP) + h)[:, None] * K + channel[None, :],
                 dqq.to(dq.dtype.element_ty), mask=living)  # fmt: skip


@kernel
def path_solve_back_kernel(
    k, w, scaling, corner, solved, inverse, dkeys, dtransitions, dinner, dk, dw, dbeta,
    table, offsets, first, tokens, G, K: tl.constexpr, P: tl.constexpr,
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
    begin = tl.load(offsets + document)
    end = tl.load(offsets + document + 1)
    dtype: tl.constexpr = corner.dtype.element_ty
    WIDTH: tl.constexpr = P if P > 64 else 64
    side = tl.arange(0, 64)
    channel = tl.arange(0, P)
    token = begin + index * 64 + side
    alive = token < end
    living = alive[:, None] & (channel < K)[None, :]
    place = (token * G + g)[:, None]
    causal = side[:, None] >= side[None, :]
    strict = side[:, None] > side[None, :]
    unit = 0.6931471805599453 / tl.load(scaling)
    slot = (tl.load(first + document) + index).to(tl.int64) * G + g
    square = slot * 4096 + side[:, None] * 64 + side[None, :]
    part = dinner + slot * 4 * 64 * WIDTH + side[:, None] * WIDTH
    wide = part + channel[None, :]
    ww = tl.load(w + place * K + channel[None, :], mask=living, other=0.0).to(dtype)

    # Whoever is behind the block reads its keys and crosses it; nobody behind the last one.
    inner = (channel[None, :] >= 0) & ((index + 1) * 64 < end - begin)
    dkk = tl.load(dkeys + (g * tokens + token)[:, None] * P + channel[None, :],
                  mask=inner & alive[:, None], other=0.0)  # fmt: skip
    dkh, factor = scaled(dkk, dtype)
    due = tl.load(part + side[None, :]).to(tl.float32)
    due += tl.dot(ww, tl.trans(dkh), input_precision="tf32x3") * factor
    ue = tl.load(corner + square)
    dww = tl.load(wide + 2 * 64 * WIDTH).to(tl.float32)
    dww += tl.dot(ue, dkh, input_precision="tf32x3") * factor
    df = tl.load(dtransitions + slot * P * P + channel[:, None] * P + channel[None, :],
                 mask=inner, other=0.0)  # fmt: skip
    dfh, factor = scaled(df, dtype)
    uw = tl.load(solved + slot * 64 * P + side[:, None] * P + channel[None, :])
    dww += tl.dot(uw, dfh, input_precision="tf32x3") * factor
    duw = tl.load(wide + 64 * WIDTH).to(tl.float32)
    duw += tl.dot(ww, tl.trans(dfh), input_precision="tf32x3") * factor
    duwh, factor = scaled(duw, dtype)
    u = tl.load(inverse + square)
    du = -tl.dot(duwh, tl.trans(ww), input_precision="tf32x3") * factor
    dww -= tl.dot(tl.trans(u), duwh, input_precision="tf32x3") * factor

    kk = tl.load(k + place * K + channel[None, :], mask=living, other=0.0).to(dtype)
    dueh, factor = scaled(due, dtype)
    e = tl.where(strict, tl.dot(ww, tl.trans(kk), input_precision="tf32x3"), 0.0).to(dtype)
    du -= tl.dot(dueh, tl.trans(e), input_precision="tf32x3") * factor
    de = tl.where(strict, -tl.dot(tl.trans(u), dueh, input_precision="tf32x3") * factor, 0.0)
    deh, factor = scaled(de, dtype)
    dww += tl.dot(deh, kk, input_precision="tf32x3") * factor
    dkk += tl.load(wide + 3 * 64 * WIDTH).to(tl.float32)
    dkk += tl.dot(tl.trans(deh), ww, input_precision="tf32x3") * factor
    tl.store(dk + place * K + channel[None, :], (dkk * unit).to(dk.dtype.element_ty), mask=living)

    duh, factor = scaled(tl.where(causal, du, 0.0), dtype)
    gram = tl.where(strict, tl.dot(ww, tl.trans(ww), input_precision="tf32x3"), 0.0).to(dtype)
    one = tl.where(side[:, None] == side[None, :], 1.0, 0.0)
    left = (one - tl.dot(u, gram, input_precision="tf32x3")).to(dtype)
    right = one - tl.dot(gram, u, input_precision="tf32x3")
    along = tl.dot(tl.trans(left), duh, input_precision="tf32x3") * factor
    along = tl.sum(along * right, 1) * unit
    tl.store(dbeta + token * G + g, along.to(dbeta.dtype.element_ty), mask=alive)
    half, factor = scaled(tl.dot(tl.trans(u), duh, input_precision="tf32x3") * factor, dtype)
    dgram = tl.where(strict, -tl.dot(half, tl.trans(u), input_precision="tf32x3") * factor, 0.0)
    dgramh, factor = scaled(dgram + tl.trans(dgram), dtype)
    dww += tl.dot(dgramh, ww, input_precision="tf32x3") * factor
    tl.store(dw + place * K + channel[None, :], (dww * unit).to(dw.dtype.element_ty), mask=living)
