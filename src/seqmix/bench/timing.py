"""How we time: every candidate in turn, round after round, and the median of the rounds.

A machine that slows down for a while then slows all candidates, and a ratio between two of them
stays fair. The first rounds warm up caches, allocators and compilers and are not counted.
"""

import time
from collections.abc import Callable
from statistics import median

import torch


def time_interleaved(
    candidates: dict[str, Callable[[], object]],
    *,
    rounds: int = 20,
    warmup: int = 3,
    seconds: float = 20.0,
    after_round: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Return the median seconds of one call of each candidate.

    Stops early, after at least three rounds, once `seconds` have passed.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names, started = list(candidates), time.perf_counter()
    for number in range(-warmup, rounds):
        if number >= 3 and time.perf_counter() - started > seconds:
            break
        shift = number % len(names)  # nobody always follows the same neighbour
        for name in names[shift:] + names[:shift]:
            elapsed = _time_once(candidates[name])
            if number >= 0:
                times[name].append(elapsed)
        if after_round:
            after_round()
    return {name: median(values) for name, values in times.items()}


def peak_memory(candidate: Callable[[], object]) -> int | None:
    """Return the bytes that one call allocates on the GPU at its peak; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    candidate()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _time_once(candidate: Callable[[], object]) -> float:
    _synchronize()
    started = time.perf_counter()
    candidate()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
