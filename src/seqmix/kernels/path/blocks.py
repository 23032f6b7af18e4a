"""Last step of the backward pass: inside each block, and through its solve.

logits = lower(Q K^T) + B UE    Q_left = Q + B UW    B = lower(Q W^T)        (UE, UW negated)
keys = K + UE^T W    F - I = UW^T W    UE = -U E    UW = -U W    E = slower(W K^T)
U = (I + slower(D W W^T))^-1 D:  with L = slower(W W^T),  dL = -slower(U^T dU U^T)  and
dbeta = diag( (I - U L)^T dU (I - L U)^T ),  which divides by no beta.
"""

import triton
import triton.language as tl

from seqmix.kernels.path.spans import scaled


@triton.jit
def path_blocks_back_kernel(
    q, k, v, w, dy, gates, scaling, corner, solved, inverse, row_max, delta,
    dleft, dkeys, dtransitions, dvalues, dgates, dq, dk, dv, dw, dbeta, table, offsets, first,
    tokens, stride, H, G, scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv, dw and dbeta. Grid (blocks * G); one program: one block of one key head.

    Reads the gradients of its queries at their left edge, of its keys at their right edge and of
    its transition; adds the block's own pairs to dgates, if gated. Accumulates in float32.
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
    square = slot * 4096 + side[:, None] * 64 + side[None, :]
    ue = tl.load(corner + square)
    uw = tl.load(solved + slot * 64 * P + side[:, None] * P + channel[None, :])
    causal = side[:, None] >= side[None, :]
    strict = side[:, None] > side[None, :]

    due = tl.zeros([64, 64], tl.float32)
    duw = tl.zeros([64, P], tl.float32)
    dww = tl.zeros([64, P], tl.float32)
    dkk = tl.zeros([64, P], tl.float32)
    dvv = tl.load(
        dvalues + (g * tokens + token)[:, None] * PV + value[None, :],
        mask=alive[:, None],
        other=0.0,
    )
    for head in range(H // G):
        h = g * (H // G) + head
        qh = tl.load(q + (token * H + h)[:, None] * K + channel[None, :], mask=living, other=0.0)
        qh = (qh.to(tl.float32) * scale).to(dtype)
        dd = tl.load(dy + (token * H + h)[:, None] * V + value[None, :], mask=giving, other=0.0)
        dd = dd.to(vtype)
        top = tl.load(row_max + h * tokens + token, mask=alive, other=float("inf"))
        dl = tl.load(delta + h * tokens + token, mask=alive, other=0.0)
        b = tl.where(causal, tl.dot(qh, tl.trans(ww), input_precision="ieee"), 0.0).to(dtype)
        s = tl.dot(qh, tl.trans(kk), input_precision="ieee") - top[:, None]
        s = tl.dot(b, ue, s, input_precision="ieee")
        if GATED:
            place_gate = h * stride + (tl.load(first + document) + index) * 64
            s -= tl.load(gates + place_gate + side)[None, :]
        p = tl.where(causal, tl.exp2(s), 0.0)
        dvv = tl.dot(tl.trans(p.to(vtype)), dd, dvv, input_precision="ieee")
        ds = p * (tl.dot(dd, tl.trans(vv), input_precision="ieee") * gs - dl[:, None])
        if GATED:
            out = dgates + h * tokens + token
            own = tl.sum(ds, 1) - tl.sum(ds, 0)
            tl.store(out, tl.load(out, mask=alive, other=0.0) + own, mask=alive)
        dsh = ds.to(dtype)
        dkk = tl.dot(tl.trans(dsh), qh, dkk, input_precision="ieee")
        due = tl.dot(tl.trans(b), dsh, due, input_precision="ieee")
        dqq = tl.load(
            dleft + (h * tokens + token)[:, None] * P + channel[None, :],
            mask=alive[:, None],
            other=0.0,
        )
        dqh, factor = scaled(dqq, dtype)
        duw += tl.dot(tl.trans(b), dqh, input_precision="ieee") * factor
        db = tl.dot(dqh, tl.trans(uw), input_precision="ieee") * factor
        db = tl.dot(dsh, tl.trans(ue), db, input_precision="ieee")
        dbh, factor = scaled(tl.where(causal, db, 0.0), dtype)
        dww += tl.dot(tl.trans(dbh), qh, input_precision="ieee") * factor
        dqq = tl.dot(dsh, kk, dqq, input_precision="ieee")
        dqq += tl.dot(dbh, ww, input_precision="ieee") * factor
        dqq *= scale * 0.6931471805599453 / gs
        out = dq + (token * H + h)[:, None] * K + channel[None, :]
        tl.store(out, dqq.to(dq.dtype.element_ty), mask=living)

    inner = (index + 1) * 64 < end - begin  # somebody behind the block reads and crosses it
    if inner:
        dkr = tl.load(dkeys + (g * tokens + token)[:, None] * P + channel[None, :])
        dkh, factor = scaled(dkr, dtype)
        dkk += dkr
        due += tl.dot(ww, tl.trans(dkh), input_precision="ieee") * factor
        dww += tl.dot(ue, dkh, input_precision="ieee") * factor
        df = tl.load(dtransitions + slot * P * P + channel[:, None] * P + channel[None, :])
        dfh, factor = scaled(df, dtype)
        duw += tl.dot(ww, tl.trans(dfh), input_precision="ieee") * factor
        dww += tl.dot(uw, dfh, input_precision="ieee") * factor

    u = tl.load(inverse + square)
    e = tl.where(strict, tl.dot(ww, tl.trans(kk), input_precision="ieee"), 0.0).to(dtype)
    gram = tl.where(strict, tl.dot(ww, tl.trans(ww), input_precision="ieee"), 0.0).to(dtype)
    dueh, factor = scaled(due, dtype)
    duwh, factor2 = scaled(duw, dtype)
    du = tl.dot(dueh, tl.trans(e), input_precision="ieee") * factor
    du += tl.dot(duwh, tl.trans(ww), input_precision="ieee") * factor2
    du = tl.where(causal, -du, 0.0)
    dww -= tl.dot(tl.trans(u), duwh, input_precision="ieee") * factor2
    de = tl.where(strict, -tl.dot(tl.trans(u), dueh, input_precision="ieee") * factor, 0.0)
    deh, factor = scaled(de, dtype)
    dww += tl.dot(deh, kk, input_precision="ieee") * factor
    dkk += tl.dot(tl.trans(deh), ww, input_precision="ieee") * factor
    unit = 0.6931471805599453 / gs
    tl.store(dk + place * K + channel[None, :], (dkk * unit).to(dk.dtype.element_ty), mask=living)
    tl.store(dv + place * V + value[None, :], dvv.to(dv.dtype.element_ty), mask=giving)

    duh, factor = scaled(du, dtype)
    one = tl.where(side[:, None] == side[None, :], 1.0, 0.0)
    left = (one - tl.dot(u, gram, input_precision="ieee")).to(dtype)
    right = one - tl.dot(gram, u, input_precision="ieee")
    along = tl.dot(tl.trans(left), duh, input_precision="ieee") * factor
    tl.store(
        dbeta + token * G + g,
        (tl.sum(along * right, 1) * unit).to(dbeta.dtype.element_ty),
        mask=alive,
    )
    half, factor2 = scaled(tl.dot(tl.trans(u), duh, input_precision="ieee") * factor, dtype)
    dgram = tl.where(strict, -tl.dot(half, tl.trans(u), input_precision="ieee") * factor2, 0.0)
    dgramh, factor = scaled(dgram, dtype)
    dww += tl.dot(dgramh, ww, input_precision="ieee") * factor
    dww += tl.dot(tl.trans(dgramh), ww, input_precision="ieee") * factor
    tl.store(dw + place * K + channel[None, :], (dww * unit).to(dw.dtype.element_ty), mask=living)
