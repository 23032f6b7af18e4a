"""Which implementation runs: `impl=` of every operation.

    "reference"   the definition, slow, any device and dtype, differentiated by autograd
    "torch"       chunked PyTorch, any device
    "triton"      GPU kernels
    None          "triton" on a GPU where this operation has kernels and inputs are not float64,
                  "torch" elsewhere

Nothing falls back silently: what an implementation cannot do raises NotImplementedError naming
one that can.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor

IMPLEMENTATIONS = ("reference", "torch", "triton")


def choose(operation: str, impl: str | None, first: Tensor) -> str:
    """The implementation to run for `impl`, given the first tensor of the call."""
    if impl is None:
        ready = first.device.type == "cuda" and first.dtype != torch.float64
        return "triton" if ready and has_kernels(operation) else "torch"
    if impl not in IMPLEMENTATIONS:
        choices = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"{operation}: impl must be one of {choices} or None, got {impl!r}")
    if impl == "triton" and not has_kernels(operation):
        raise NotImplementedError(
            f"{operation}: impl='triton' has no kernels for this operation yet; use impl='torch'"
        )
    if impl == "triton" and first.device.type == "cpu" and not _interpreted():
        raise NotImplementedError(
            f"{operation}: impl='triton' needs a GPU or Triton's interpreter; use impl='torch'"
        )
    return impl


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch


def has_kernels(operation: str) -> bool:
    """Whether this installation has Triton and kernels of the operation."""
    return operation in KERNELS and TRITON


TRITON = find_spec("triton") is not None  # asked here, where torch.compile does not look
KERNELS = frozenset({"path_attention"})  # operations with a room in seqmix/kernels


def compute_dtype(first: Tensor) -> torch.dtype:
    """The dtype of gates and states: float64 where the first argument is, float32 otherwise."""
    return torch.float64 if first.dtype == torch.float64 else torch.float32


def on_device(first: Tensor) -> AbstractContextManager:
    """Make the tensor's GPU the current one: kernels are launched there."""
    return torch.cuda.device(first.device) if first.device.type == "cuda" else nullcontext()


def exactly(first: Tensor) -> torch.autocast:
    """No autocast inside an operation: implementations choose their own precision."""
    return torch.autocast(first.device.type, enabled=False)
