"""Tile sizes and launch options per GPU class and head size: the committed result of tuning.

`block`: query rows of a program; `keys`: keys of a tile; `sizes`: tokens of the three segment
levels; `heads`: heads whose tiles are interleaved in the grid, longest first;
`early`: in the forward kernel, transitions are loaded ahead.
tiles.json is what `seqmix bench path --tune` found on a class of GPU (class -> padded head size ->
kernel -> options); it comes first. Unknown GPUs take the safe default: small tiles, no cap.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch

TABLE: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("tiles.json").read_text()
)

LONGEST_TABLE = 32  # segments of the largest size in a document: bounds tables quadratic in it


@dataclass(frozen=True)
class Tile:
    """Options of one kernel launch."""

    block: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    heads: int = 8
    early: bool = False

    @property
    def launch(self) -> dict[str, int]:
        """What Triton's launcher wants to know."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | ({} if self.registers is None else {"maxnreg": self.registers})


def gpu_class(device: torch.device) -> str:
    """The key of a GPU in TABLE: its architecture."""
    if device.type != "cuda":
        return device.type
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def from_table(kernel: str | None = None) -> Callable[[Callable], Callable]:
    """Let TABLE come before what a function chooses: a tile of `kernel`, or a tile a field.

    Not for float32, whose operands are twice as large.
    """

    def decorate(choose: Callable) -> Callable:
        @wraps(choose)
        def chosen(padded: int, dtype: torch.dtype, device: torch.device) -> Any:
            tiles = choose(padded, dtype, device)
            table = TABLE.get(gpu_class(device), {}).get(str(max(64, padded)), {})
            if dtype == torch.float32 or not table:
                return tiles
            if kernel is not None:
                return _tile(table[kernel]) if kernel in table else tiles
            names = [f.name for f in fields(tiles) if f.name in table]
            return replace(tiles, **{name: _tile(table[name]) for name in names})

        return chosen

    return decorate


def _tile(row: Any) -> Any:
    """A tile, or several where a kernel is launched more than once, from what TABLE holds."""
    return Tile(**row) if isinstance(row, dict) else tuple(map(_tile, row))


HOPPER_FORWARD = {
    64: Tile(64, 64, 4, 3, 168, 16),
    128: Tile(128, 64, 8, 3, None, 4, early=True),
    256: Tile(64, 32, 8, 2, None, 4),
}


@from_table("forward")
def forward_tile(padded: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile of the forward kernel for heads padded to `padded` channels."""
    if dtype == torch.float32:
        return Tile(64, 32, 4 if padded <= 64 else 8, 1)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        return HOPPER_FORWARD[max(64, padded)]
    return replace(Tile(), keys=32 if padded > 128 else 64, warps=4 if padded <= 64 else 8)


@dataclass(frozen=True)
class Backward:
    """The kernels of the backward pass; dq: all levels at once, or levels 2 and 1, then 0.

    In the dkv kernel `keys` counts queries.
    """

    queries: Tile
    dq: tuple[Tile, ...]
    dkv: Tile
    move: Tile
    pairs: Tile
    solve: Tile


@from_table()
def backward_tiles(padded: int, dtype: torch.dtype, device: torch.device) -> Backward:
    """The tiles of the backward kernels for heads padded to `padded` channels."""
    warps = 4 if padded <= 64 else 8
    few = Tile(warps=warps, stages=1)
    if dtype == torch.float32:
        return Backward(few, (replace(few, keys=32),), few, few, few, few)
    if padded <= 64:
        dq, dkv = Tile(stages=3, heads=16), Tile(stages=3)
        solve = replace(few, registers=168)
        return Backward(replace(few, registers=128), (dq,), dkv, few, solve, few)
    if padded > 128:
        one = replace(few, keys=32)
        return Backward(few, (one,), one, few, few, few)
    dq = Tile(128, 64, 8, 3, heads=8), Tile(64, 32, 4, 1, heads=16)
    dkv = Tile(64, 32, 4, 3, heads=2)
    return Backward(Tile(warps=4, stages=1), dq, dkv, few, few, few)


@from_table("prepare")
def prepare_tile(padded: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile of the kernel that solves blocks."""
    return Tile(stages=1, registers=168 if padded <= 64 and dtype != torch.float32 else None)


def decode_tile(rows: int, padded: int, dtype: torch.dtype) -> Tile:
    """The tile of the kernel that reads folded keys for `rows` queries."""
    if dtype == torch.float32 or padded > 128:
        return Tile(keys=32)
    return Tile(keys=64, warps=2, stages=3) if rows == 16 else Tile(keys=64)


def all_tiles(padded: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The tiles in use by kernel: what `use` takes."""
    wanted = padded, dtype, device
    single = {"prepare": prepare_tile(*wanted), "forward": forward_tile(*wanted)}
    return single | vars(backward_tiles(*wanted))


def use(padded: int, device: torch.device, tiles: dict[str, Any]) -> None:
    """Take these tiles from now on."""

    def row(tile: Any) -> Any:
        return asdict(tile) if isinstance(tile, Tile) else list(map(row, tile))

    table = TABLE.setdefault(gpu_class(device), {})
    table[str(max(64, padded))] = {kernel: row(tile) for kernel, tile in tiles.items()}


def sizes(longest: int) -> tuple[int, int, int]:
    """Tokens of the three segment levels for documents of at most `longest` tokens."""
    top = 1024 if longest <= 4096 else 2048
    while top * LONGEST_TABLE < longest:
        top *= 2
    middle = 256
    while middle * LONGEST_TABLE < top:
        middle *= 2
    return 64, middle, top
