"""Key side of the backward pass: values' gradients, and keys' at the right edge of each level."""

import triton
import triton.language as tl

from seqmix.kernels.path.spans import scaled


@triton.jit
def path_dkv_kernel(
    v, outer, gate, gates, scaling, keys, transitions, spans, queries, row_max, delta,
    dkeys, dv, dgates, table, offsets, first, base,
    tokens, row, lines, N, H, G,
    V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr,
    S1: tl.constexpr, S2: tl.constexpr, HEADS: tl.constexpr,
    TURNED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks * G). One program: 64 keys of one key head, all queries outside their block.

    dkeys [3, G, tokens, P] (module queries.py: units) and dv [G, tokens, PV], float32. From the
    far end, walks left over the siblings behind the keys' own segment of each level: cross,
    dk <- dk F^T, then read, dk += ds^T q, with the keys at the sibling's left edge by one span.
    dkeys of a level: all that reads them at its right edge. dgates [H, lines] falls by the
    column sums of ds, if gated.
    """
    grid = tl.num_programs(0) // G * HEADS
    entry = tl.program_id(0) % grid // HEADS
    g = (tl.program_id(0) // grid * HEADS + tl.program_id(0) % HEADS).to(tl.int64)
    document = tl.load(table + 2 * entry)
    if document < 0:
        return
    position = tl.load(table + 2 * entry + 1) * 64
    begin = tl.load(offsets + document)
    length = (tl.load(offsets + document + 1) - begin).to(tl.int32)
    dtype: tl.constexpr = keys.dtype.element_ty
    vtype: tl.constexpr = v.dtype.element_ty
    side = tl.arange(0, 64)
    channel = tl.arange(0, P)
    value = tl.arange(0, PV)
    whole = channel[:, None] * P + channel[None, :]
    gs = tl.load(scaling)
    token = begin + position + side
    alive = position + side < length
    group = H // G
    vv = tl.load(
        v + (token * G + g)[:, None] * V + value[None, :],
        mask=alive[:, None] & (value < V)[None, :],
        other=0.0,
    )
    dvv = tl.zeros([64, PV], tl.float32)

    dk = tl.zeros([64, P], tl.float32)
    walked = 0
    for back in range(3):
        level = tl.where(back == 0, 2, tl.where(back == 1, 1, 0))
        size = tl.where(back == 0, S2, tl.where(back == 1, S1, 64))
        siblings = tl.where(back == 0, 1 << 20, tl.where(back == 1, S2 // S1, S1 // 64))
        own = position // size
        parent = own // siblings
        limit = tl.minimum((parent + 1) * siblings, (length + size - 1) // size)
        low = first + level * N + document
        span = tl.load(base + level * N + document)
        span += parent.to(tl.int64) * (siblings.to(tl.int64) * (siblings + 1) // 2)
        for step in range(limit - 1 - own):
            sibling = limit - 1 - step
            cross = walked > 0
            behind = sibling - 1 > own
            # All loads of the step before their first use.
            place = ((level * G + g) * tokens + token)[:, None] * P + channel[None, :]
            kh = tl.load(keys + place)
            slot = (tl.load(low) + sibling).to(tl.int64) * G + g
            x = tl.load(transitions + slot * P * P + whole, mask=(whole >= 0) & cross, other=0.0)
            i = own % siblings + 1
            j = sibling % siblings
            slot = (span + j * (j - 1) // 2 + i) * G + g
            c = tl.load(spans + slot * P * P + whole, mask=(whole >= 0) & behind, other=0.0)
            # No branches around products: they would serialise all of them.
            dkh, factor = scaled(dk, dtype)
            dk += tl.dot(dkh, tl.trans(x), input_precision="tf32x3") * factor
            kh = tl.dot(kh, c, kh.to(tl.float32), input_precision="tf32x3").to(dtype)
            walked += 1
            left = sibling * size
            for head in range(group):
                h = g * group + head
                start = tl.load(first + document) * 64 + left
                rp = h * lines + tl.multiple_of(start, 64)
                qp = queries + (level.to(tl.int64) * H * lines + rp) * P
                dp = outer + rp * PV
                if GATED:
                    shift = (begin // row * H + h) * row - begin // row * row + begin
                    age = tl.load(gate + shift + left // S2 * S2)
                    age -= tl.load(gate + shift + position // S2 * S2)
                    own_line = h * lines + tl.load(first + document) * 64 + position + side
                    decay = tl.load(gates + own_line)
                    decay -= (age * 1.4426950408889634).to(tl.float32)
                    sums = tl.zeros([64], tl.float32)
                for n in range(0, tl.minimum(size, length - left), 64):
                    lane = n + side
                    qq = tl.load(qp + lane[:, None] * P + channel[None, :])
                    dd = tl.load(dp + lane[:, None] * PV + value[None, :])
                    top = tl.load(row_max + rp + lane)
                    dl = tl.load(delta + rp + lane)
                    if TURNED:  # queries along rows: fewer registers, two passes through memory
                        s = tl.dot(qq, tl.trans(kh), input_precision="tf32x3") - top[:, None]
                        if GATED:
                            s -= decay[None, :]
                        p = tl.exp2(s)
                        dvv = tl.dot(tl.trans(p.to(vtype)), dd, dvv, input_precision="tf32x3")
                        ds = tl.dot(dd, tl.trans(vv), input_precision="tf32x3")
                        ds = p * (ds * gs - dl[:, None])
                        if GATED:
                            sums += tl.sum(ds, 0)
                        dk = tl.dot(tl.trans(ds.to(dtype)), qq, dk, input_precision="tf32x3")
                    else:
                        s = tl.dot(kh, tl.trans(qq), input_precision="tf32x3") - top[None, :]
                        if GATED:
                            s -= decay[:, None]
                        p = tl.exp2(s)
                        dvv = tl.dot(p.to(vtype), dd, dvv, input_precision="tf32x3")
                        ds = tl.dot(vv, tl.trans(dd), input_precision="tf32x3")
                        ds = p * (ds * gs - dl[None, :])
                        if GATED:
                            sums += tl.sum(ds, 1)
                        dk = tl.dot(ds.to(dtype), qq, dk, input_precision="tf32x3")
                if GATED:
                    tl.store(dgates + own_line, tl.load(dgates + own_line) - sums)
        tl.store(
            dkeys + ((level * G + g) * tokens + token)[:, None] * P + channel[None, :],
            dk,
            mask=alive[:, None],
        )
    tl.store(dv + (g * tokens + token)[:, None] * PV + value[None, :], dvv, mask=alive[:, None])
