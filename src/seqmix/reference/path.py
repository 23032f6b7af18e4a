"""PaTH attention, one token at a time: the definition that every implementation is held to.

    H_t      = I - beta_t w_t w_t^T                                    |w_t| = 1, 0 <= beta_t <= 2
    logit_ij = scale * k_j^T H_{j+1} H_{j+2} ... H_i q_i  +  sum_{s=j+1..i} log f_s         j <= i
    y_i      = sum_{j<=i} softmax_j(logit_ij) v_j

Past keys are kept aligned to the newest token, k_j <- H_t k_j for j < t, so that a logit is a plain
inner product; H_j is never applied to its own key. The forget gate f belongs to a query head and is
added after the scale. w and beta belong to a key head, which the H / G query heads of its group
share: query head h reads key head h // (H / G).

    q [B T H K]     k, w [B T G K]     v [B T G V]     beta [B T G]     log_forget [B T H], <= 0

Per head O(T^2 K) time and O(T (K + V)) state. Source: arXiv 2505.16381, Sec. 2.2 and Eq. 1. The
softmax scale, which the paper omits, multiplies the match only.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def path_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    w: Float[Tensor, "B T G K"],
    beta: Float[Tensor, "B T G"],
    log_forget: Float[Tensor, "B T H"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B T G K"]]:
    """Attend along the path; return the outputs and the keys aligned to the last token."""
    B, T, H = q.shape[:3]
    G, V = v.shape[2:]
    if log_forget is None:
        log_forget = q.new_zeros(B, T, H)
    keys, decay = k[:, :0], log_forget[:, :0]
    outputs = [v.new_zeros(B, 0, H, V)]
    for t in range(T):
        now = slice(t, t + 1)
        erased = beta[:, now, :, None] * (keys * w[:, now]).sum(-1, keepdim=True)
        keys = torch.cat([keys - erased * w[:, now], k[:, now]], 1)
        decay = torch.cat([decay + log_forget[:, now], log_forget.new_zeros(B, 1, H)], 1)

        match = (q[:, now] * keys.repeat_interleave(H // G, 2)).sum(-1)  # B t+1 H
        weight = torch.softmax(scale * match + decay, 1)
        values = v[:, : t + 1].repeat_interleave(H // G, 2)
        outputs.append((weight[..., None] * values).sum(1, keepdim=True))
    return torch.cat(outputs, 1), keys
