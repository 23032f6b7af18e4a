"""How kernels are compiled: once for all lengths, and all that a call needs side by side.

Triton compiles a kernel anew when an integer argument becomes 1, or a multiple of 16, or neither.
`kernel` leaves that out for sizes that change from call to call. And Triton compiles when it
launches, one kernel after the other: a function under `compiles_together` runs through once while
nothing is launched behind what is not compiled yet, compiles that in threads, and runs again.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

# Sizes of a call. Not here: what is always a multiple of 64, where addresses gain from saying so.
VARYING = (
    "tokens", "row", "rows", "N", "H", "G", "R", "T", "F", "pending", "piece", "slots",
    "size", "siblings", "level", "child", "parent", "recent", "scratch",
    "blocks", "run", "every", "before", "HEADS",
)  # fmt: skip
THREADS = 16  # more do not help: the largest kernel takes as long as the rest

P = ParamSpec("P")
R = TypeVar("R")
_missing: ContextVar[dict[tuple, Callable[[], None]] | None] = ContextVar("missing", default=None)


class Kernel(JITFunction):
    """A Triton kernel which may be compiled later than it is first called."""

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # Behind a kernel that did not run, inputs are not there: compile, do not launch.
        return super().run(*args, grid=grid, warmup=warmup or bool(_missing.get()), **options)

    def _do_compile(self, key: str, signature: dict, device: int, *rest: Any) -> Any:
        missing, compile = _missing.get(), super()._do_compile
        if missing is None:
            return compile(key, signature, device, *rest)

        def work() -> None:
            with torch.cuda.device(device):
                compile(key, signature, device, *rest).run  # noqa: B018  makes its launcher, too

        missing[self, key] = work
        return None


def kernel(function: Callable) -> Any:
    """Declare a kernel, for any length; what `triton.jit` makes where Triton interprets."""
    if triton.knobs.runtime.interpret:
        return triton.jit(function)
    given = [name for name, kind in function.__annotations__.items() if kind is tl.constexpr]
    return Kernel(function, do_not_specialize=sorted({*VARYING} - {*given}))


def compiles_together(function: Callable[P, R]) -> Callable[P, R]:
    """Compile the kernels of `function` in threads on its first call of a kind.

    That call runs it twice, so it must leave its arguments alone.
    """

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        missing: dict[tuple, Callable[[], None]] = {}
        token = _missing.set(missing)
        try:
            result = function(*args, **options)
        finally:
            _missing.reset(token)
        if not missing:
            return result
        del result
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            for done in [pool.submit(work) for work in missing.values()]:
                done.result()
        return function(*args, **options)

    return call
