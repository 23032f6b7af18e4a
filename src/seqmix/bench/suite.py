"""Runs a suite: workloads, and at each of them several candidates beside each other.

A row is one candidate in one pass of one workload: GPU time (the host being ahead), launched time
(from an idle GPU, so that the host counts), and the peak of memory beyond the inputs. What runs out
of memory or cannot be done is a row that says so. What ours computes at such a shape is compared
with float64 first, in the same process. On a processor there is only the launched time.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from seqmix.bench.timing import Call, GpuTimer, peak_memory, time_interleaved
from seqmix.report import provenance

Case = tuple[Callable[..., Tensor], list[Tensor]]  # a function and its differentiable arguments
Row = dict[str, Any]
WRONG = 0.02  # a relative error that no rounding of 16-bit inputs explains


@dataclass(frozen=True)
class Workload:
    """A shape and what competes at it.

    make: the candidates by name; it makes their inputs, too.
    check: relative errors against float64, by name, of what `checked` names; made once a suite.
    ours: the candidates that the check is about; not timed if it fails.
    base: ratios are to the best of the candidates whose names begin so.
    """

    group: str
    shape: dict[str, int]
    make: Callable[[], dict[str, Case]]
    checked: str
    check: Callable[[], dict[str, float]]
    ours: tuple[str, ...]
    base: str = "sdpa"
    passes: tuple[str, ...] = ("forward", "both")


@dataclass
class Suite:
    """Measures workloads until `seconds` have passed; the rest is reported as not measured."""

    seconds: float = 400.0
    each: float = 4.0  # seconds at most for the rounds of one pass of one workload
    rounds: int = 15
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def run(self, workloads: list[Workload]) -> None:
        """Measure in order, printing as it goes."""
        started = time.perf_counter()
        timer = GpuTimer() if torch.cuda.is_available() else None
        print(HEAD, flush=True)
        for work in workloads:
            if time.perf_counter() - started > self.seconds:
                self._add(work, work.passes[-1], "all", {"note": "not measured: time is up"})
                continue
            wrong = self._check(work)
            try:
                made = work.make()
            except Exception as error:  # no memory for the inputs, say
                self._add(work, work.passes[-1], "all", {"note": _reason(error)})
                made = {}
            for name in work.passes:
                self._pass(work, name, made, wrong, timer)
            del made
            _collect()

    def _check(self, work: Workload) -> str:
        """Compare with float64 unless that is done; return why not to time ours, or nothing."""
        if work.checked not in self.errors:
            try:
                found = self.errors[work.checked] = work.check()
            except Exception as error:  # what cannot be checked is not timed either
                return _reason(error)
            cells = (f"{name} {error:.1e}" for name, error in found.items())
            print(f"error against float64, {work.checked}:", *cells, flush=True)
        found = self.errors[work.checked]
        wrong = [f"{name} is off by {e:.1e}" for name, e in found.items() if not e < WRONG]
        return f"wrong: {', '.join(wrong)}" if wrong else ""

    def _pass(
        self, work: Workload, name: str, made: dict[str, Case], wrong: str, timer: GpuTimer | None
    ) -> None:
        calls: dict[str, Call] = {}
        found: dict[str, Row] = {}
        for candidate, case in made.items():
            if wrong and candidate in work.ours:
                found[candidate] = {"note": wrong}
                continue
            try:
                call = PASSES[name](*case)
                call()  # compiles, and tunes where a peer does
                peak = peak_memory(call)
                found[candidate] = {"mib": None if peak is None else peak / 2**20}
                calls[candidate] = call
            except Exception as error:  # a benchmark reports whatever it meets
                found[candidate] = {"note": _reason(error)}
            if "note" in found[candidate]:
                call = None
                _collect()
        for key, once in _columns(timer).items():
            options: dict = {"rounds": self.rounds, "warmup": 0, "seconds": self.each / 2}
            times = time_interleaved(calls, once=once, **options) if calls else {}
            for candidate, seconds in times.items():
                found[candidate][key] = 1e3 * seconds
        base = [row for n, row in found.items() if n.startswith(work.base) and "note" not in row]
        for candidate, row in found.items():
            for key in ("gpu_ms", "launched_ms", "mib"):
                best = min((r[key] for r in base if r.get(key)), default=None)
                if best and row.get(key) is not None:
                    row[f"{key.removesuffix('_ms')}_ratio"] = row[key] / best
            self._add(work, name, candidate, row)

    def _add(self, work: Workload, name: str, candidate: str, row: Row) -> None:
        row = {"group": work.group, **work.shape, "pass": name, "name": candidate, **row}
        self.rows.append(row)
        print(line(work.shape, row), flush=True)


SUITES = {"path": "seqmix.bench.path"}  # modules with what `measure` asks for


def measure(name: str, *, peers: bool, seconds: float, tune: bool = False) -> dict[str, Any]:
    """Run a suite by name, or refresh its table of tiles; return what came out."""
    module = import_module(SUITES[name])
    if not torch.cuda.is_available():
        raise ValueError(
            f"{name} at many shapes needs a GPU; with sizes, as in --length 1024, it "
            "is timed anywhere"
        )
    if tune:
        return {"suite": name, "tiles": module.tune(), **provenance()}
    suite = Suite(seconds)
    suite.run(module.workloads(peers))
    found = {"errors": suite.errors, "rows": suite.rows, "first_calls": module.first_calls()}
    return {"suite": name, **found, **provenance()}


def _forward(function: Callable[..., Tensor], tensors: list[Tensor]) -> Call:
    def call() -> object:
        with torch.no_grad():
            return function(*tensors)

    return call


def _both(function: Callable[..., Tensor], tensors: list[Tensor]) -> Call:
    leaves = [x.detach().requires_grad_() for x in tensors]
    with torch.no_grad():
        y = function(*tensors)
    dy = _gradient(y.shape, y.dtype, y.device)
    return lambda: torch.autograd.grad(function(*leaves), leaves, dy)


@lru_cache(1)  # one for all candidates
def _gradient(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


PASSES = {"forward": _forward, "both": _both, "decode": _forward}


def _columns(timer: GpuTimer | None) -> dict[str, Callable[[Call], float] | None]:
    if timer is None:
        return {"launched_ms": None}
    return {"launched_ms": timer.launched, "gpu_ms": timer.queued}


def _reason(error: Exception) -> str:
    """Why there is no measurement, in one short line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= 120 else line[:117] + "..."


def _collect() -> None:
    _gradient.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


CELLS = ("gpu_ms", "gpu_ratio", "launched_ms", "launched_ratio", "mib", "mib_ratio")
HEAD = f"{'shape':28} {'pass':8} {'candidate':14} " + " ".join(f"{name:>14}" for name in CELLS)


def line(shape: dict[str, int], row: Row) -> str:
    """One row as a person reads it."""
    sizes = ", ".join(map(str, shape.values()))
    cells = ["-" if row.get(name) is None else f"{row[name]:.4g}" for name in CELLS]
    text = row.get("note") or " ".join(f"{cell:>14}" for cell in cells)
    return f"{sizes:28} {row['pass']:8} {row['name']:14} {text}"
