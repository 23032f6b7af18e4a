"""Our operations against scaled dot-product attention: forward, and forward with backward.

seqmix bench path_fox palimpsa --length 2048

Random inputs as a layer would give them: unit keys and writes, gates near their values at the start
of training. The last line on stdout is JSON.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqmix.bench.timing import peak_memory, time_interleaved
from seqmix.ops import attention, gated_linear_attention, lattice, palimpsa, path_attention
from seqmix.report import progress, provenance


@dataclass(frozen=True)
class Shape:
    """Sizes of a measurement; `size` is K and V (and S of Lattice)."""

    batch: int = 2
    length: int = 1024
    heads: int = 4
    size: int = 32
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("batch", "length", "heads", "size"):
            if getattr(self, name) < 1:
                raise ValueError(f"bench: {name} must be at least 1, got {getattr(self, name)}")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"bench: device must be cpu or cuda, got {self.device!r}")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise ValueError("bench: there is no GPU here for device 'cuda'; take cpu")


# Makes inputs and returns them with the function of them that is timed.
Case = Callable[["Inputs", str | None], tuple[list[Tensor], Callable[..., Tensor]]]


class Inputs:
    """Random tensors of one shape."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.random = torch.Generator(shape.device).manual_seed(0)

    def tokens(self, size: int | None = None, *, unit: bool = False) -> Tensor:
        """Return [B, T, H, size] in the measured dtype."""
        s = self.shape
        x = self._normal(s.batch, s.length, s.heads, size or s.size)
        x = F.normalize(x, dim=-1) if unit else x
        return x.to(getattr(torch, s.dtype))

    def gate(self, low: float, high: float) -> Tensor:
        """Return [B, T, H] in float32, uniform."""
        s = self.shape
        shape = s.batch, s.length, s.heads
        return low + (high - low) * torch.rand(shape, generator=self.random, device=s.device)

    def slots(self) -> Tensor:
        """Return [B, H, V, S] in float32 with unit columns."""
        s = self.shape
        return F.normalize(self._normal(s.batch, s.heads, s.size, s.size), dim=-2)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.shape.device)


def _sdpa(x: Inputs, _: str | None) -> tuple[list[Tensor], Callable[..., Tensor]]:
    tensors = [x.tokens().transpose(1, 2).contiguous() for _ in range(3)]
    return tensors, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention(x: Inputs, impl: str | None, forget: bool) -> tuple[list[Tensor], Callable]:
    gates = [x.gate(-0.1, 0.0)] if forget else []
    tensors = [x.tokens(), x.tokens(), x.tokens(), *gates]
    return tensors, lambda *a: attention(*a, impl=impl).y


def _path(x: Inputs, impl: str | None, forget: bool) -> tuple[list[Tensor], Callable]:
    gates = [x.gate(0.0, 2.0)] + ([x.gate(-0.1, 0.0)] if forget else [])
    tensors = [x.tokens(), x.tokens(), x.tokens(), x.tokens(unit=True), *gates]
    return tensors, lambda *a: path_attention(*a, impl=impl).y


def _palimpsa(x: Inputs, impl: str | None, groups: int | None) -> tuple[list[Tensor], Callable]:
    beta = x.tokens(groups).float().abs()
    prior = torch.ones(x.shape.heads, device=x.shape.device)
    q, k = x.tokens(unit=True), x.tokens(unit=True)
    tensors = [q, k, x.tokens(), beta, x.gate(-0.1, 0.0), prior]
    return tensors, lambda *a: palimpsa(*a, impl=impl).y


def _linear(x: Inputs, impl: str | None) -> tuple[list[Tensor], Callable]:
    tensors = [x.tokens(unit=True), x.tokens(unit=True), x.tokens(), x.gate(-0.1, 0.0)]
    return tensors, lambda *a: gated_linear_attention(*a, impl=impl).y


def _lattice(x: Inputs, impl: str | None, chunk_size: int) -> tuple[list[Tensor], Callable]:
    gates = x.gate(0.0, 1.0), x.gate(0.98, 1.0)
    tensors = [x.tokens(unit=True), x.tokens(unit=True), x.tokens(), *gates, x.slots()]

    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor, state: Tensor) -> Tensor:
        return lattice(q, k, v, gamma, mu, state=state, chunk_size=chunk_size, impl=impl).y

    return tensors, run


BASELINE = "sdpa"
CASES: dict[str, Case] = {
    "attention": lambda x, impl: _attention(x, impl, forget=False),
    "fox": lambda x, impl: _attention(x, impl, forget=True),
    "path": lambda x, impl: _path(x, impl, forget=False),
    "path_fox": lambda x, impl: _path(x, impl, forget=True),
    "palimpsa": lambda x, impl: _palimpsa(x, impl, groups=None),
    "palimpsa_shared": lambda x, impl: _palimpsa(x, impl, groups=1),
    "linear": _linear,
    "lattice": lambda x, impl: _lattice(x, impl, chunk_size=1),
    "lattice_c16": lambda x, impl: _lattice(x, impl, chunk_size=16),
}


def measure(
    names: list[str] | None = None, shape: Shape | None = None, impl: str | None = None
) -> dict[str, Any]:
    """Time the named operations (default: all) beside the baseline; milliseconds and ratios."""
    shape, names = shape or Shape(), names or list(CASES)
    for name in names:
        if name not in CASES:
            raise ValueError(f"bench: unknown operation {name!r}; known are {', '.join(CASES)}")
    made = {BASELINE: _sdpa(Inputs(shape), None)}
    made |= {name: CASES[name](Inputs(shape), impl) for name in names}
    forward = {name: _forward(*case) for name, case in made.items()}
    both = {name: _forward_backward(*case) for name, case in made.items()}
    with progress() as bar:
        task = bar.add_task("bench", total=2 * 23)
        step = lambda: bar.advance(task)  # noqa: E731
        forward_times = time_interleaved(forward, after_round=step)
        both_times = time_interleaved(both, after_round=step)
    rows = [
        {
            "operation": name,
            "forward_ms": 1e3 * forward_times[name],
            "forward_backward_ms": 1e3 * both_times[name],
            "ratio": both_times[name] / both_times[BASELINE],
            "peak_bytes": peak_memory(both[name]) if shape.device != "cpu" else None,
        }
        for name in made
    ]
    threads = torch.get_num_threads()
    return {"shape": asdict(shape), "impl": impl, "threads": threads, "rows": rows, **provenance()}


def _forward(tensors: list[Tensor], run: Callable[..., Tensor]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return run(*tensors)

    return call


def _forward_backward(tensors: list[Tensor], run: Callable[..., Tensor]) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    dy = torch.ones_like(run(*tensors))
    return lambda: torch.autograd.grad(run(*leaves), leaves, dy)
