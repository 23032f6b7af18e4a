"""Random calls of PaTH attention, and the definition's answer in float64 with every gradient."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from seqmix.reference.path import path_attention

NAMES = ("q", "k", "v", "w", "beta", "log_forget")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def arguments(B, T, H, G, K, V, dtype=torch.float32, *, gate=True, beta=None) -> list[Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE)

    strength = 2 * torch.sigmoid(normal(B, T, G)) if beta is None else normal(B, T, G) * 0 + beta
    forget = logsigmoid(normal(B, T, H) + 3) if gate else None
    vectors = normal(B, T, H, K), normal(B, T, G, K), normal(B, T, G, V)
    unit = normalize(normal(B, T, G, K), dim=-1)
    return [*(x.to(dtype) for x in (*vectors, unit)), strength, forget]


def definition(
    tokens: list[Tensor | None], dy: Tensor, scale: float, offsets: list[int] | None = None
) -> tuple[Tensor, list[Tensor | None]]:
    """y and the gradients of sum dy y, in float64."""
    leaves = [None if x is None else x.double().requires_grad_() for x in tokens]
    T = dy.shape[1]
    y = torch.zeros(dy.shape, dtype=torch.float64, device=dy.device)
    for a, b in zip(offsets[:-1], offsets[1:], strict=True) if offsets else [(0, T)]:
        if a < b:
            part = [None if x is None else x[:, a:b] for x in leaves]
            y[:, a:b] = path_attention(*part, scale=scale)[0]
    used = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad((y * dy.double()).sum(), used))
    return y.detach(), [None if x is None else next(found) for x in leaves]


def error(got: Tensor, wanted: Tensor, floor: float = 1e-12) -> float:
    """Relative error; `floor` is the norm below which the wanted tensor counts as zero."""
    return ((got.double() - wanted).norm() / wanted.norm().clamp(min=floor)).item()
