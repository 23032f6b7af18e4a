"""Gated linear attention: the definition.

    S_t = alpha_t S_{t-1} + w_t (x) k_t          alpha_t = exp(log_decay_t), one per head and token
    y_t = scale * S_t q_t

What Palimpsa is without metaplasticity (beta = 0, prior = 1), and Mamba2's SSD (arXiv 2405.21060)
with q = C, k = B, w = dt x. Cost O(T V K) per head, state V K.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def gated_linear_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H"],
    *,
    scale: float,
    state: Float[Tensor, "B H V K"],
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H V K"]]:
    """Read a decaying sum of outer products, token by token; return outputs and the last state."""
    outputs = []
    for t in range(q.shape[1]):
        alpha = log_decay[:, t, :, None, None].exp()
        state = alpha * state + w[:, t, :, :, None] * k[:, t, :, None, :]
        outputs.append(scale * (state * q[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(w), state
