"""Palimpsa (arXiv 2602.09075v4): the definition, and the full Gaussian that it approximates.

Per head; alpha_t = exp(log_decay_t), and w = beta (.) v is what is written.

    M_t    = alpha_t M_{t-1}    + w_t (x) k_t            content, in natural parameters  [V, K]
    Ibar_t = alpha_t Ibar_{t-1} + beta_t (x) k_t^2       excess precision                [V, K]
    mu_t   = M_t / (I_prior + Ibar_t)                    posterior mean, elementwise
    y_t    = scale * mu_t q_t
    var_t  = scale^2 * (1 / (I_prior + Ibar_t)) q_t^2    variance of the readout

This is Eq. 5 with M = I mu and Ibar = I - I_prior. `beta` and `excess` may hold fewer than V rows:
M groups of value channels (M divides V), where channel i belongs to group i // (V / M).
Cost O(T V K) per head, state 2 V K.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def palimpsa(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H M"],
    log_decay: Float[Tensor, "B T H"],
    prior: Float[Tensor, " H"],
    *,
    scale: float,
    content: Float[Tensor, "B H V K"],
    excess: Float[Tensor, "B H M K"],
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H V K"], Float[Tensor, "B H M K"]]:
    """Read the posterior mean, token by token; return outputs, last content, last excess."""
    group = w.shape[-1] // beta.shape[-1]
    outputs = []
    for t in range(q.shape[1]):
        alpha = log_decay[:, t, :, None, None].exp()
        content = alpha * content + w[:, t, :, :, None] * k[:, t, :, None, :]
        excess = alpha * excess + beta[:, t, :, :, None] * k[:, t, :, None, :] ** 2
        precision = prior[:, None, None] + excess
        mean = content / precision.repeat_interleave(group, dim=-2)
        outputs.append(scale * (mean * q[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(w), content, excess


def readout_variance(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H M"],
    log_decay: Float[Tensor, "B T H"],
    prior: Float[Tensor, " H"],
    *,
    scale: float,
    excess: Float[Tensor, "B H M K"],
) -> Float[Tensor, "B T H M"]:
    """Return the posterior variance of every readout, per group of value channels."""
    variances = []
    for t in range(q.shape[1]):
        alpha = log_decay[:, t, :, None, None].exp()
        excess = alpha * excess + beta[:, t, :, :, None] * k[:, t, :, None, :] ** 2
        precision = prior[:, None, None] + excess
        variances.append(scale**2 * (q[:, t, :, None, :] ** 2 / precision).sum(-1))
    return torch.stack(variances, dim=1) if variances else torch.zeros_like(beta)


def full_gaussian(
    k: Float[Tensor, "... K"],
    v: Float[Tensor, "..."],
    beta: Float[Tensor, "..."],
    alpha: Float[Tensor, "..."],
    prior: Float[Tensor, "..."],
    mean: Float[Tensor, "... K"],
    precision: Float[Tensor, "... K K"],
) -> tuple[Float[Tensor, "... K"], Float[Tensor, "... K K"]]:
    """Update one value channel by one token with the whole precision matrix P: Eq. 3's minimum.

    P_t = alpha P_{t-1} + (1 - alpha) I_prior 1 + beta k k^T
    mean_t = P_t^-1 (alpha P_{t-1} mean_{t-1} + beta v k)
    """
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    decayed = alpha[..., None, None] * precision
    updated = (
        decayed
        + ((1 - alpha) * prior)[..., None, None] * identity
        + beta[..., None, None] * k[..., :, None] * k[..., None, :]
    )
    evidence = (decayed @ mean[..., None])[..., 0] + (beta * v)[..., None] * k
    return torch.linalg.solve(updated, evidence), updated
