"""Key side of the backward pass: values' gradients, and keys' at the right edge of each level."""

import triton.language as tl

from seqmix.kernels.compiling import kernel
from seqmix.kernels.path.spans import scaled


@kernel
def path_dkv_kernel(
    v, outer, gate, gates, scaling, keys, transitions, spans, queries, row_max, delta,
    dkeys, dv, dgates, table, offsets, first, base,
    tokens, row, lines, N, H, G, every,
    V: tl.constexpr, P: tl.constexpr, PV: tl.constexpr,
    S1, S2, C: tl.constexpr, HEADS,
    GATED: tl.constexpr,
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
    lane = tl.arange(0, C)
    channel = tl.arange(0, P)
    value = tl.arange(0, PV)
    whole = channel[:, None] * P + channel[None, :]
    tall = side[:, None] * P + channel[None, :]
    gs = tl.load(scaling)
    token = begin + position
    alive = position + side < length
    group = H // G
    COPIES: tl.constexpr = 16 if P <= 64 else 1  # of sums, by columns
    ones = tl.full([C, COPIES], 1.0, dtype)
    vv = tl.load(
        v + (token * every + g) * V + side[:, None] * (every * V) + value[None, :],
        mask=alive[:, None] & (value < V)[None, :],
        other=0.0,
    )
    wide = dv + (g * tokens + token) * PV + side[:, None] * PV + value[None, :]
    dvv = tl.zeros([64, PV], tl.float32)
    dk = tl.zeros([64, P], tl.float32)
    doc_line = tl.load(first + document) * 64
    moved = (dkeys + (g * tokens + token) * P).to(tl.pointer_type(dtype))  # level 0 comes last

    for back in range(3):
        level = 2 - back
        size = tl.where(back == 0, S2, tl.where(back == 1, S1, 64))
        siblings = tl.where(back == 0, 1 << 20, tl.where(back == 1, S2 // S1, S1 // 64))
        own = position // size
        parent = own // siblings
        limit = tl.minimum((parent + 1) * siblings, (length + size - 1) // size)
        low = tl.load(first + level * N + document)
        span = tl.load(base + level * N + document)
        span += parent.to(tl.int64) * (siblings.to(tl.int64) * (siblings - 1) // 2)
        for step in range(limit - 1 - own):
            sibling = limit - 1 - step
            left = sibling * size
            count = tl.minimum(size, length - left)
            x = tl.load(
                transitions + ((low + sibling).to(tl.int64) * G + g) * P * P + whole,
                mask=(whole >= 0) & (left + size < length), other=0.0,
            )  # fmt: skip
            # No branches around products: they would serialise all of them.
            if P > 64:  # too few registers to load all first
                dkh, factor = scaled(dk, dtype)
                dk += tl.dot(dkh, tl.trans(x), input_precision="tf32x3") * factor
                tl.debug_barrier()
            i = own % siblings + 1
            j = sibling % siblings
            slot = (span + (j - 1) * (j - 2) // 2 + i - 1) * G + g
            c = tl.load(
                spans + slot * P * P + whole, mask=(whole >= 0) & (sibling - 1 > own), other=0.0
            )
            kh = tl.load(keys + ((level * G + g) * tokens + token) * P + tall)
            if P <= 64:
                dkh, factor = scaled(dk, dtype)
                dk += tl.dot(dkh, tl.trans(x), input_precision="tf32x3") * factor
            kh = tl.dot(kh, c, kh.to(tl.float32), input_precision="tf32x3").to(dtype)
            if P > 64:
                # Through memory: as an operand loaded it lies in shared memory, not in registers.
                tl.store(moved + tall, kh)
                tl.debug_barrier()
                kh = tl.load(moved + tall)
            for head in range(group):
                h = g * group + head
                rp = h * lines + doc_line + tl.multiple_of(left, 64)
                qp = queries + (level.to(tl.int64) * H * lines + rp) * P
                dp = outer + rp * PV
                if GATED:
                    shift = (begin // row * H + h) * row - begin // row * row + begin
                    age = tl.load(gate + shift + left // S2 * S2)
                    age -= tl.load(gate + shift + position // S2 * S2)
                    own_line = h * lines + doc_line + position + side
                    decay = tl.load(gates + own_line)
                    decay -= (age * 1.4426950408889634).to(tl.float32)
                    sums = tl.zeros([64, COPIES], tl.float32)
                for n in range(0, count, C):
                    qq = tl.load(qp + (n + lane)[:, None] * P + channel[None, :])
                    dd = tl.load(dp + (n + lane)[:, None] * PV + value[None, :])
                    top = tl.load(row_max + rp + n + lane)
                    dl = tl.load(delta + rp + n + lane)
                    s = tl.dot(kh, tl.trans(qq), input_precision="tf32x3") - top[None, :]
                    if GATED:
                        s -= decay[:, None]
                    p = tl.exp2(s)
                    dvv = tl.dot(p.to(vtype), dd, dvv, input_precision="tf32x3")
                    ds = tl.dot(vv, tl.trans(dd), input_precision="tf32x3")
                    ds = p * (ds * gs - dl[None, :])
                    if GATED:
                        if COPIES > 1:  # by a product: cheaper than additions and shuffles
                            sums = tl.dot(ds.to(dtype), ones, sums, input_precision="tf32x3")
                        else:
                            sums += tl.sum(ds, 1, keep_dims=True)
                    dk = tl.dot(ds.to(dtype), qq, dk, input_precision="tf32x3")
                if GATED:
                    fall = tl.max(sums, 1)  # all columns are the same
                    tl.store(dgates + own_line, tl.load(dgates + own_line) - fall)
        tl.store(dkeys + ((level * G + g) * tokens + token) * P + tall, dk, mask=alive[:, None])
    tl.store(wide, dvv, mask=alive[:, None])
