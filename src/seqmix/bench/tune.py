"""Refreshes the tiles of a class of GPU: per head size and kernel the fastest that is right.

    seqmix bench path --tune --out tiles.json

Goes through the kernels, and of each through the options of its tile, the others as they are. A
candidate is compared with float64 before it is timed in turn with the best so far, and must gain
more than the noise. Takes minutes, most of them to compile.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from seqmix.bench.timing import Call

GAIN = 0.99  # of the time so far
WRONG = 0.02  # a relative error that no rounding of 16-bit inputs explains
OPTIONS: dict[str, tuple] = {
    "block": (64, 128),
    "keys": (32, 64, 128),
    "warps": (4, 8),
    "stages": (1, 2, 3),
    "registers": (None, 128, 168, 224),
    "heads": (4, 8, 16),
}


@dataclass(frozen=True)
class Problem:
    """What tiles are judged by.

    use: makes the kernels take tiles, by name; several where a kernel is launched so often.
    error: the largest relative error against float64. timed: seconds of calls, taken in turn.
    """

    use: Callable[[dict[str, Any]], None]
    error: Callable[[], float]
    run: Call
    timed: Callable[[dict[str, Call]], dict[str, float]]


def tune_tiles(start: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """Return the best tiles by kernel; they are in use then."""
    best = dict(start)
    for kernel, value in start.items():
        for part in range(len(value)) if isinstance(value, tuple) else (None,):
            for option, choices in OPTIONS.items():
                for choice in choices:
                    tiles = _changed(best, kernel, part, {option: choice})
                    if tiles != best:
                        ratio = _ratio(best, tiles, problem)
                        best = tiles if ratio < GAIN else best
                        name = kernel if part is None else f"{kernel} {part}"
                        print(f"  {name:10} {option}={choice!s:6} {ratio:.3f}", flush=True)
    problem.use(best)
    return best


def _changed(
    tiles: dict[str, Any], kernel: str, part: int | None, change: dict[str, Any]
) -> dict[str, Any]:
    if part is None:
        return tiles | {kernel: replace(tiles[kernel], **change)}
    parts = list(tiles[kernel])
    parts[part] = replace(parts[part], **change)
    return tiles | {kernel: tuple(parts)}


def _ratio(best: dict[str, Any], tiles: dict[str, Any], problem: Problem) -> float:
    """The time with `tiles` as a fraction of that with `best`; infinite if they are wrong."""

    def run(tiles: dict[str, Any]) -> Call:
        def call() -> object:
            problem.use(tiles)
            return problem.run()

        return call

    calls = {"best": run(best), "tiles": run(tiles)}
    try:
        problem.use(tiles)
        if not problem.error() < WRONG:
            return float("inf")
        for call in calls.values():
            call()
    except Exception:  # does not fit into the GPU, or does not compile
        return float("inf")
    times = problem.timed(calls)
    return times["tiles"] / times["best"]
