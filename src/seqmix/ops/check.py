"""Argument checks of every operation: one place, one error format.

    palimpsa: beta must have shape [B=2, T=16, H=4, V=32], got [2, 16, 4]

A letter's size is set by the first argument that carries it, in the order of the signature.
Shapes, dtypes and devices are always checked. Values are checked where that needs no device read
(tensors in CPU memory, outside torch.compile), and everywhere under `debug_checks()`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

import torch
from torch import Tensor

_DEBUG: ContextVar[bool] = ContextVar("seqmix_debug_checks", default=False)


@contextmanager
def debug_checks() -> Iterator[None]:
    """Check the values of every argument inside this block; each check reads the device."""
    token = _DEBUG.set(True)
    try:
        yield
    finally:
        _DEBUG.reset(token)


class Arguments:
    """The arguments of one call: binds letters to sizes and raises ValueError in the one format."""

    def __init__(self, operation: str, first: Tensor | None = None) -> None:
        self.operation = operation
        self.device = getattr(first, "device", None)
        self.sizes: dict[str, int] = {}

    def fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self.operation}: {message}")

    def tensor(self, name: str, value: Tensor, letters: str) -> None:
        """Check that `value` is a floating-point tensor of the shape that `letters` spell."""
        self._type(name, value)
        if not value.is_floating_point():
            self.fail(f"{name} must be floating point, got {_dtype(value)}")
        self.shape(name, value, letters)

    def shape(self, name: str, value: Tensor, letters: str) -> None:
        wanted = letters.split()
        known = [self.sizes.get(letter) for letter in wanted]
        fits = value.ndim == len(wanted) and all(
            size is None or size == got for size, got in zip(known, value.shape, strict=True)
        )
        if not fits:
            spelled = (
                letter if size is None else f"{letter}={size}"
                for letter, size in zip(wanted, known, strict=True)
            )
            self.fail(f"{name} must have shape [{', '.join(spelled)}], got {list(value.shape)}")
        self.sizes.update(zip(wanted, value.shape, strict=True))
        for letter in wanted:
            if letter not in "BTN" and self.sizes[letter] == 0:
                self.fail(f"{name} must have {letter} of at least 1, got {list(value.shape)}")

    def divides(self, part: str, whole: str, reason: str) -> None:
        if self.sizes[part] == 0 or self.sizes[whole] % self.sizes[part]:
            self.fail(f"{reason}, got {whole}={self.sizes[whole]} and {part}={self.sizes[part]}")

    def one_of(self, name: str, value: object, choices: tuple) -> None:
        if value not in choices:
            self.fail(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")

    def positive(self, name: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail(f"{name} must be a positive integer, got {value!r}")

    def scale(self, value: float | None, size: int) -> float:
        """The scale of the logits: `size ** -0.5` unless given."""
        if value is None:
            return float(max(size, 1)) ** -0.5
        if torch.compiler.is_compiling():
            return value  # the compiler may hold it as a symbol
        if not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(f"scale must be a finite number or None, got {value!r}")
        return float(value)

    def documents(self, cu_seqlens: Tensor | None) -> None:
        """Check the offsets of packed documents; bind N, the number of states (B without)."""
        if cu_seqlens is None:
            self.sizes["N"] = self.sizes["B"]
            return
        self._type("cu_seqlens", cu_seqlens)
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            self.fail(f"cu_seqlens must be int32 or int64, got {_dtype(cu_seqlens)}")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
            self.fail(f"cu_seqlens must have shape [N+1], got {list(cu_seqlens.shape)}")
        if self.sizes["B"] != 1:
            self.fail(f"with cu_seqlens the batch must be packed into B=1, got B={self.sizes['B']}")
        self.sizes["N"] = cu_seqlens.shape[0] - 1
        if self.reads_values(cu_seqlens):
            offsets = cu_seqlens.tolist()
            if offsets[0] != 0 or offsets[-1] > self.sizes["T"] or offsets != sorted(offsets):
                self.fail(
                    f"cu_seqlens must rise from 0 to at most T={self.sizes['T']} "
                    f"without decreasing, got {offsets if len(offsets) < 20 else 'other offsets'}"
                )

    def values(
        self, name: str, value: Tensor | None, low: float = -math.inf, high: float = math.inf
    ) -> None:
        """Check `low <= value <= high` where values may be read."""
        if value is None or value.numel() == 0 or not self.reads_values(value):
            return
        smallest, largest = (float(x) for x in value.detach().aminmax())
        if smallest < low:
            self.fail(f"{name} must be at least {low:g}, got {smallest:g}")
        if largest > high:
            self.fail(f"{name} must be at most {high:g}, got {largest:g}")

    def unit(self, name: str, value: Tensor, dim: int, *, or_zero: bool = False) -> None:
        """Check unit length along `dim`, only under `debug_checks()`: 2% off is an error."""
        if not (self.reads_values(value) and _DEBUG.get()):
            return
        norms = torch.linalg.vector_norm(value.detach().double(), dim=dim)
        wrong = ((norms - 1).abs() > 0.02) & ~((norms == 0) & or_zero)
        if bool(wrong.any()):
            ending = " or zero" if or_zero else ""
            self.fail(
                f"{name} must have unit length{ending}, got length {float(norms[wrong][0]):g}"
            )

    def reads_values(self, value: Tensor) -> bool:
        if torch.compiler.is_compiling() or type(value) not in (Tensor, torch.nn.Parameter):
            return False
        return value.device.type == "cpu" or (_DEBUG.get() and value.device.type != "meta")

    def _type(self, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            self.fail(f"{name} must be a tensor, got {type(value).__name__}")
        if value.device != self.device:
            self.fail(f"{name} must be on {self.device} like the others, got {value.device}")


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
