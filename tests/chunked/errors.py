"""The error budget of an implementation: twice (the definition's own error + one rounding)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def definition(
    function: Callable, inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Outputs of a differentiable function, then the gradient of every input, by autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, cotangents)]


def error(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact|; what is exactly zero must be zero."""
    size = exact.double().norm().item()
    return (x.double() - exact.double()).norm().item() / (size or torch.finfo().tiny)


def check_budget(
    names: str, got: Sequence[Tensor], own: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """Compare results with the float64 definition, as far as the definition's own dtype allows."""
    rounding = torch.finfo(own[0].dtype).eps / 2
    for name, x, of_definition, truth in zip(names.split(), got, own, exact, strict=True):
        assert x.shape == truth.shape, name
        assert x.isfinite().all(), name
        budget = 2 * (error(of_definition, truth) + rounding)
        assert error(x, truth) <= budget, f"{name}: {error(x, truth):.1e} > {budget:.1e}"


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return result
