"""How we time: every candidate in turn, round after round, and the median of the rounds.

A machine that slows down for a while then slows all candidates, and a ratio between two of them
stays fair. The first rounds warm up caches, allocators and compilers and are not counted.
"""

import time
from collections.abc import Callable
from statistics import median
from weakref import WeakKeyDictionary

import torch

Call = Callable[[], object]


def time_interleaved(
    candidates: dict[str, Call],
    *,
    rounds: int = 20,
    warmup: int = 3,
    seconds: float = 20.0,
    after_round: Callable[[], None] | None = None,
    once: Callable[[Call], float] | None = None,
) -> dict[str, float]:
    """Return the median seconds of one call of each candidate, as `once` takes them.

    Stops early, after at least three rounds, once `seconds` have passed.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names, started, once = list(candidates), time.perf_counter(), once or _time_once
    for number in range(-warmup, rounds):
        if number >= 3 and time.perf_counter() - started > seconds:
            break
        shift = number % len(names)  # nobody always follows the same neighbour
        for name in names[shift:] + names[:shift]:
            elapsed = once(candidates[name])
            if number >= 0:
                times[name].append(elapsed)
        if after_round:
            after_round()
    return {name: median(values) for name, values in times.items()}


def peak_memory(candidate: Call) -> int | None:
    """Return the bytes that one call allocates on the GPU at its peak; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    candidate()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class GpuTimer:
    """Times single calls by CUDA events, the L2 cache flushed before each."""

    CYCLES = 2e9  # a second; of a slower GPU a little more than one

    def __init__(self) -> None:
        self.flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
        self.host: WeakKeyDictionary[Call, float] = WeakKeyDictionary()  # seconds to launch

    def launched(self, call: Call) -> float:
        """Return seconds from an idle GPU on: what the host needs to launch counts."""
        self.flush.zero_()
        torch.cuda.synchronize()
        return self._events(call)

    def queued(self, call: Call) -> float:
        """Return seconds on the GPU alone, which is kept busy until all is launched."""
        self.flush.zero_()
        torch.cuda._sleep(int(self.CYCLES * min(0.1, 2 * self.host.get(call, 0.0))))
        return self._events(call)

    def _events(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun = time.perf_counter()
        start.record()
        call()
        end.record()
        self.host[call] = min(time.perf_counter() - begun, self.host.get(call, 1.0))
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def _time_once(candidate: Call) -> float:
    _synchronize()
    started = time.perf_counter()
    candidate()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
