"""What is installed, which devices there are, and which implementations run on this machine."""

from typing import Any

import torch

from seqmix.bench.ops import CASES, Inputs, Shape
from seqmix.ops.choice import IMPLEMENTATIONS, choose
from seqmix.ops.path import served
from seqmix.report import provenance

# The cases of the benchmark that differ in the code they run, and the operation each stands for.
OPERATIONS = {
    "path": "path_attention",
    "palimpsa": "palimpsa",
    "lattice": "lattice",
    "linear": "gated_linear_attention",
    "fox": "attention",
}


def examine() -> dict[str, Any]:
    """Run every implementation of every operation on a few tokens, forward and backward."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(batch=1, length=20, heads=2, size=16, device=device)
    runs = {
        operation: {impl: _try(case, shape, impl) for impl in IMPLEMENTATIONS}
        for case, operation in OPERATIONS.items()
    }
    first = torch.zeros(1, device=device)
    default = {operation: choose(operation, None, first) for operation in runs}
    found = {"device": device, "default": default, "implementations": runs}
    return {**provenance(), **found, "served": {"path_attention": served()}}


def _try(case: str, shape: Shape, impl: str) -> str:
    """Return "runs", or why not in one line."""
    try:
        tensors, run = CASES[case](Inputs(shape), impl)
        leaves = [x.requires_grad_() for x in tensors]
        y = run(*leaves)
        torch.autograd.grad(y.sum(), leaves)
        return "runs" if y.isfinite().all() else "gives values that are no numbers"
    except Exception as error:  # a doctor reports whatever it meets
        return " ".join(str(error).split()) or type(error).__name__
