"""Causal softmax attention with an optional forget gate: the definition.

    logit_ij = scale * k_j^T q_i  +  sum_{s=j+1..i} log f_s                              j <= i
    y_i      = sum_{j<=i} softmax_j(logit_ij) v_j

Without a gate this is attention without positions (NoPE); rotary positions are applied to q and k
beforehand. With a learned gate it is FoX (arXiv 2503.02130, Eq. 5); with a constant gate
log f = -slope it is ALiBi (arXiv 2108.12409). The gate belongs to a query head and is added after
the scale. Query head h reads key head h // (H / G).

    q [B T H K]     k [B T G K]     v [B T G V]     log_forget [B T H], <= 0

Per head O(T^2 K) time and O(T (K + V)) state.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    log_forget: Float[Tensor, "B T H"] | None = None,
    *,
    scale: float,
) -> Float[Tensor, "B T H V"]:
    """Attend to the past, older tokens attenuated by the gates since."""
    B, T, H = q.shape[:3]
    group = H // k.shape[2]
    if log_forget is None:
        log_forget = q.new_zeros(B, T, H)
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    decay = log_forget[:, :0]
    outputs = [v[:, :0]]
    for t in range(T):
        decay = decay + log_forget[:, t : t + 1]
        decay = torch.cat([decay, log_forget.new_zeros(B, 1, H)], 1)
        match = (q[:, t : t + 1] * k[:, : t + 1]).sum(-1)  # B t+1 H
        weight = torch.softmax(scale * match + decay, 1)
        outputs.append((weight[..., None] * v[:, : t + 1]).sum(1, keepdim=True))
    return torch.cat(outputs, 1)
