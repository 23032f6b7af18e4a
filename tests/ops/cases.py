"""Random arguments of every operation, and the operations by name."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from seqmix import ops

Case = tuple[Callable, dict]


def path(B=2, T=9, H=4, G=2, K=5, V=3, dtype=torch.float64, gate=True) -> Case:
    arguments = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, G, K),
        "v": torch.randn(B, T, G, V),
        "w": normalize(torch.randn(B, T, G, K), dim=-1),
        "beta": 2 * torch.rand(B, T, G),
    }
    if gate:
        arguments["log_forget"] = logsigmoid(torch.randn(B, T, H) + 2)
    return ops.path_attention, typed(arguments, dtype)


def attention(B=2, T=9, H=4, G=2, K=5, V=3, dtype=torch.float64) -> Case:
    function, arguments = path(B, T, H, G, K, V, dtype)
    return ops.attention, {k: x for k, x in arguments.items() if k not in ("w", "beta")}


def linear(B=2, T=9, H=3, K=5, V=4, N=None, dtype=torch.float64) -> Case:
    return ops.gated_linear_attention, typed(
        {
            "q": torch.randn(B, T, H, K),
            "k": torch.randn(B, T, H, K),
            "w": torch.randn(B, T, H, V),
            "log_decay": -torch.rand(B, T, H),
            "state": torch.randn(N or B, H, V, K),
        },
        dtype,
    )


def palimpsa(B=2, T=9, H=3, K=5, V=4, M=4, N=None, dtype=torch.float64) -> Case:
    _, arguments = linear(B, T, H, K, V, N, dtype)
    content = arguments.pop("state")
    arguments |= typed({"beta": torch.rand(B, T, H, M), "prior": torch.rand(H) + 0.5}, dtype)
    arguments["state"] = (content, typed({"x": torch.rand(N or B, H, M, K)}, dtype)["x"])
    return ops.palimpsa, arguments


def lattice(B=2, T=9, H=3, S=5, V=4, N=None, dtype=torch.float64, **rule) -> Case:
    arguments = {
        "q": normalize(torch.randn(B, T, H, S), dim=-1),
        "k": normalize(torch.randn(B, T, H, S), dim=-1),
        "v": torch.randn(B, T, H, V),
        "gamma": torch.rand(B, T, H),
        "mu": 1 - 0.1 * torch.rand(B, T, H),
        "state": normalize(torch.randn(N or B, H, V, S), dim=-2),
    }
    return ops.lattice, typed(arguments, dtype) | rule


CASES = {
    "path_attention": path,
    "attention": attention,
    "gated_linear_attention": linear,
    "palimpsa": palimpsa,
    "lattice": lattice,
}
STATEFUL = ("gated_linear_attention", "palimpsa", "lattice")


def typed(arguments: dict, dtype: torch.dtype) -> dict:
    return {name: x.to(dtype) for name, x in arguments.items()}


def flat(arguments: dict) -> list[Tensor]:
    """Every tensor among the arguments."""
    tensors = []
    for x in arguments.values():
        tensors += x if isinstance(x, tuple) else [x] if isinstance(x, Tensor) else []
    return tensors


def differentiable(arguments: dict) -> dict:
    """The same arguments as leaves that ask for a gradient."""
    leaf = lambda x: x.detach().clone().requires_grad_()  # noqa: E731
    return {
        name: tuple(map(leaf, x))
        if isinstance(x, tuple)
        else leaf(x)
        if isinstance(x, Tensor)
        else x
        for name, x in arguments.items()
    }


def outputs(result: tuple) -> list[Tensor]:
    """Every tensor an operation returned."""
    found = []
    for x in result:
        found += list(x) if isinstance(x, tuple) else [x] if isinstance(x, Tensor) else []
    return found


def gradients(result: tuple, arguments: dict, *, unused: bool = False) -> list[Tensor]:
    """Gradients of every argument for random cotangents of every output; `unused` are zero."""
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (y * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)).sum()
        for y in outputs(result)
    )
    return list(torch.autograd.grad(loss, flat(arguments), materialize_grads=unused))


def asking(name: str) -> dict:
    """The flag that asks for everything an operation can return."""
    if name in STATEFUL:
        return {"return_state": True}
    return {"return_keys": True} if name == "path_attention" else {}
