"""The operations: plain functions on tensors, differentiable, on any device.

from seqmix.ops import lattice, palimpsa, path_attention
"""

from seqmix.ops.attention import AttentionOutput, attention
from seqmix.ops.check import debug_checks
from seqmix.ops.lattice import LatticeOutput, lattice
from seqmix.ops.linear import LinearOutput, gated_linear_attention
from seqmix.ops.palimpsa import PalimpsaOutput, PalimpsaState, palimpsa
from seqmix.ops.path import PathOutput, path_attention

__all__ = [
    "AttentionOutput",
    "LatticeOutput",
    "LinearOutput",
    "PalimpsaOutput",
    "PalimpsaState",
    "PathOutput",
    "attention",
    "debug_checks",
    "gated_linear_attention",
    "lattice",
    "palimpsa",
    "path_attention",
]
