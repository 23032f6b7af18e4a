"""Tuning of tiles with made-up times: the fastest tile that is right is taken, and used."""

import json
from contextlib import contextmanager

import pytest
import torch

from seqmix.bench.path import inputs
from seqmix.bench.tune import Problem, tune_tiles
from seqmix.kernels.path import tiles
from seqmix.kernels.path.forward import forward
from seqmix.kernels.path.tiles import Tile
from seqmix.reference import path

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(tiles, "TABLE", {})


def tune(start, seconds, error=lambda tiles: 0.0):
    """Tune with times that depend on the tiles in use."""
    used = {}

    def use(tiles):
        used.clear()
        used.update(tiles)

    def timed(calls):
        found = {}
        for name, call in calls.items():
            call()
            found[name] = seconds(used)
        return found

    return tune_tiles(start, Problem(use, lambda: error(used), lambda: None, timed)), used


def test_the_fastest_tile_is_taken_kernel_by_kernel(capsys):
    def seconds(used):
        a, b = used["a"], used["b"]
        return 10 - 4 * (a.warps == 8) - 2 * (a.stages == 3) - (b.keys == 32)

    best, used = tune({"a": Tile(), "b": Tile()}, seconds)
    assert best == used == {"a": Tile(warps=8, stages=3), "b": Tile(keys=32)}
    assert "warps=8" in capsys.readouterr().out


def test_every_launch_of_a_kernel_has_its_own_tile():
    def seconds(used):
        return 4 - (used["a"][0].warps == 8) - (used["a"][1].stages == 3)

    best, _ = tune({"a": (Tile(), Tile())}, seconds)
    assert best == {"a": (Tile(warps=8), Tile(stages=3))}


def test_a_gain_within_the_noise_changes_nothing():
    best, _ = tune({"a": Tile()}, lambda used: 1.0 - 0.001 * used["a"].warps)
    assert best == {"a": Tile()}


def test_a_wrong_tile_is_never_taken():
    def seconds(used):
        return 1.0 / used["a"].warps

    def error(used):
        return 0.5 if used["a"].warps == 8 else 0.0

    assert tune({"a": Tile()}, seconds, error)[0] == {"a": Tile()}
    assert tune({"a": Tile()}, seconds, lambda used: float("nan"))[0] == {"a": Tile()}


def test_a_tile_that_does_not_compile_is_passed_over():
    def error(used):
        if used["a"].stages == 3:
            raise RuntimeError("out of resource: shared memory")
        return 0.0

    best, _ = tune({"a": Tile()}, lambda used: 1.0 - 0.1 * used["a"].stages, error)
    assert best == {"a": Tile()}


@contextmanager
def launches(monkeypatch):
    """The tiles with which the forward kernel is launched."""
    from seqmix.kernels.path import forward as module

    seen, launch = [], module.launch
    monkeypatch.setattr(module, "launch", lambda *a: seen.append(a[-1]) or launch(*a))
    yield seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_kernels_take_the_tiles_that_were_found(monkeypatch):
    """Times are made up; the kernels and the comparison with float64 are real.

    128 keys a tile, the fastest by these times, read beyond segments of 64 tokens.
    """
    tokens = inputs(1, 130, 1, 1, 16, torch.float16, "cpu")
    wanted = path.path_attention(*(x.double() for x in tokens), scale=0.25)[0]

    def run():
        return forward(*tokens, 0.25, None)[0]

    def timed(calls):
        seconds = {}
        for name, call in calls.items():
            call()
            seconds[name] = 1.0 / tiles.forward_tile(16, torch.float16, CPU).keys
        return seconds

    problem = Problem(
        use=lambda found: tiles.use(16, CPU, found),
        error=lambda: float((run().double() - wanted).norm() / wanted.norm()),
        run=run,
        timed=timed,
    )
    start = {"forward": tiles.forward_tile(16, torch.float16, CPU)}
    assert start["forward"].keys == 64
    best = tune_tiles(start, problem)
    assert best["forward"].keys == 64 and tiles.TABLE["cpu"]["64"]["forward"]["keys"] == 64
    tiles.use(16, CPU, {"forward": Tile(keys=32)})
    with launches(monkeypatch) as seen:
        run()
    assert seen == [Tile(keys=32)]


def test_the_table_comes_first_but_not_for_float32():
    before = tiles.all_tiles(128, torch.bfloat16, CPU)
    changed = before | {"dkv": Tile(stages=1), "dq": (Tile(), Tile(keys=32))}
    tiles.use(128, CPU, changed)
    assert tiles.all_tiles(128, torch.bfloat16, CPU) == changed
    json.dumps(tiles.TABLE)
    assert tiles.backward_tiles(128, torch.float32, CPU).dkv != Tile(stages=1)
    assert tiles.backward_tiles(64, torch.bfloat16, CPU).dkv != Tile(stages=1)
