"""PaTH attention on a GPU against the best SDPA, and against FLA's kernels where installed.

    python -m seqmix.bench.path_gpu --out benchmarks/results

Checks outputs and every gradient against the definition in float64 first. Then, per shape, times
forward and forward with backward: one candidate after the other, round after round, medians of CUDA
events, the L2 cache flushed before each call; and peak memory beyond the inputs. Prints a table,
writes the rows as JSON and prints them as the last line.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqmix.ops import path_attention
from seqmix.report import provenance, write_json

SHAPES = (  # B, T, H, G, d
    (8, 2048, 32, 32, 64),
    (8, 2048, 32, 8, 64),
    (2, 8192, 32, 32, 64),
    (1, 16384, 32, 32, 64),
    (2, 4096, 16, 16, 128),
    (1, 16384, 16, 16, 128),
)
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
Candidate = tuple[Callable[..., Tensor], list[Tensor]]


def inputs(B: int, T: int, H: int, G: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, w, beta and log_forget, random; a trained gate forgets a few percent a token."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    w = F.normalize(normal(B, T, G, d), dim=-1)
    vectors = [x.to(dtype) for x in (normal(B, T, H, d), normal(B, T, G, d), normal(B, T, G, d), w)]
    return [*vectors, 2 * torch.sigmoid(normal(B, T, G)), F.logsigmoid(normal(B, T, H) + 3)]


def candidates(x: list[Tensor], peers: bool) -> dict[str, Candidate]:
    """Every candidate by name: a function and its differentiable arguments."""

    def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y.transpose(1, 2)

        return attend

    H = x[0].shape[2]
    full = [x[0], *(t.repeat_interleave(H // t.shape[2], 2) for t in x[1:3])]  # SDPA's best case
    found: dict[str, Candidate] = {f"sdpa {name}": (sdpa(b), full) for name, b in SDPA.items()}
    found["path"] = (lambda *a: path_attention(*a).y, x[:5])
    found["path_fox"] = (lambda *a: path_attention(*a).y, x)
    if peers:
        from fla.ops.path_attn.parallel import parallel_path_attn

        found["fla path"] = (lambda *a: parallel_path_attn(*a)[0], x[:5])
    return found


def measure(found: dict[str, Candidate], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of forward and of forward with backward, and MiB beyond the inputs."""
    calls, rows = {}, {name: {} for name in found}
    for name, (function, tensors) in found.items():
        leaves = [t.detach().requires_grad_() for t in tensors]
        dy = torch.randn_like(function(*tensors))

        def both(function=function, leaves=leaves, dy=dy) -> None:
            torch.autograd.grad(function(*leaves), leaves, dy)

        def forward(function=function, tensors=tensors) -> None:
            with torch.no_grad():
                function(*tensors)

        calls[name] = {"forward": forward, "both": both}
        both()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        rows[name]["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for kind in ("forward", "both"):
        for name, ms in _interleaved({n: c[kind] for n, c in calls.items()}, rounds).items():
            rows[name][kind] = ms
    return rows


def _interleaved(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-3, rounds):
        for name, call in calls.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if number >= 0:
                times[name].append(start.elapsed_time(end))
    return {name: median(found) for name, found in times.items()}


def check(d: int, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of y and every gradient against the definition in float64."""
    from seqmix.reference import path

    x = [t.requires_grad_() for t in inputs(1, 1400, 2, 1, d, dtype)]
    exact = [t.detach().double().requires_grad_() for t in x]
    dy = torch.randn(x[0].shape, device="cuda", dtype=dtype)
    y, wanted = path_attention(*x).y, path.path_attention(*exact, scale=d**-0.5)[0]
    got = [y, *torch.autograd.grad(y, x, dy)]
    wanted = [wanted, *torch.autograd.grad(wanted, exact, dy.double())]
    names = ("y", "q", "k", "v", "w", "beta", "log_forget")
    return {
        n: ((a.double() - b).norm() / b.norm()).item()
        for n, a, b in zip(names, got, wanted, strict=True)
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of path_gpu.json")
    parser.add_argument("--peers", action="store_true", help="time FLA's PaTH too")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    errors = {f"d {d} {t}": check(d, getattr(torch, t)) for d in (64, 128) for t in ("bfloat16",)}
    for name, row in errors.items():
        print(f"error against float64, {name}:", *(f"{k} {e:.1e}" for k, e in row.items()))
    rows = []
    print(f"{'B, T, H, G, d':26} {'':12} forward   ratio   both      ratio   MiB    ratio")
    for shape in SHAPES:
        peers = options.peers and shape[2] == shape[3]
        timed = measure(candidates(inputs(*shape, torch.bfloat16), peers), options.rounds)
        best = {k: min(timed[f"sdpa {n}"][k] for n in SDPA) for k in ("forward", "both", "mib")}
        for name, row in timed.items():
            cells = (f"{row[k]:8.3f} {row[k] / best[k]:7.2f}" for k in ("forward", "both", "mib"))
            print(f"{shape!s:26} {name:12}", *cells, flush=True)
            rows.append({"shape": shape, "name": name, **row})
    result = {"errors": errors, "rows": rows, **provenance()}
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "path_gpu.json", result)
    print(json.dumps(result, default=str))


if __name__ == "__main__":
    main()
