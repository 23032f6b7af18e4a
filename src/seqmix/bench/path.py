"""PaTH attention on a GPU against the best SDPA, and against FLA's kernels where installed.

    seqmix bench path --peers --out benchmarks/results

Training shapes, the paper's speed figure (batch 32, 32 heads of 64, T as far as memory goes), and
one decoded token over caches. FLA tunes for half a minute at every new shape, so its candidates
stand at a few shapes only.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqmix.bench.first import first_calls
from seqmix.bench.suite import Case, Workload
from seqmix.bench.tables import (
    First,
    Goal,
    Goals,
    Source,
    Table,
    launched,
    memory,
    microseconds,
    time,
)
from seqmix.bench.timing import GpuTimer, time_interleaved
from seqmix.bench.tune import Problem, tune_tiles
from seqmix.chunked.path_blocks import BLOCK
from seqmix.chunked.path_cache import Folded, Pending
from seqmix.ops import path_attention, path_cache

SHAPES = (  # B, T, H, G, d
    (8, 2048, 32, 32, 64),
    (8, 2048, 32, 8, 64),
    (4, 4096, 32, 32, 64),
    (2, 8192, 32, 32, 64),
    (1, 16384, 32, 32, 64),
    (2, 4096, 16, 16, 128),
    (1, 16384, 16, 16, 128),
)
LONG = (
    (1, 32768, 32, 32, 64),
    (1, 32768, 16, 16, 128),
    (1, 131072, 8, 8, 64),
    (1, 131072, 4, 4, 128),
    (2, 4096, 8, 8, 256),
)
PAPER = tuple((32, 1024 * 2**i, 32, 32, 64) for i in range(6))
CACHES = tuple(  # N, T, H, G, d: rows, tokens in the cache
    (N, T, 32, G, d) for N, G, d in ((8, 32, 64), (1, 8, 128)) for T in (8192, 32768, 65536)
)
PENDING = 32  # tokens behind the last fold of a cache, on average
BACKENDS = {
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
}
READ = BACKENDS | {"sdpa efficient": SDPBackend.EFFICIENT_ATTENTION}
WITH_PEERS = (
    (8, 2048, 32, 32, 64),
    (2, 8192, 32, 32, 64),
    (2, 4096, 16, 16, 128),
    (1, 16384, 16, 16, 128),
)
OURS = ("path", "path_fox", "fold")


def workloads(peers: bool, device: str = "cuda") -> list[Workload]:
    """All of them, the most telling first."""
    if peers and find_spec("fla") is None:
        raise ImportError("the peers are not installed: pip install 'seqmix[peers]'")
    train = partial(_training, peers=peers, device=device)
    found = [train("shapes", shape) for shape in SHAPES]
    found += [_decoding(shape, peers, device) for shape in CACHES]
    found += [train("paper", shape) for shape in PAPER[:4]]
    found += [train("shapes", shape) for shape in LONG]
    return found + [train("paper", shape) for shape in PAPER[4:]]


def _training(group: str, shape: tuple[int, ...], peers: bool, device: str) -> Workload:
    B, T, H, G, d = shape
    grouped = min(H // G, 2)
    return Workload(
        group=group,
        shape=dict(zip("BTHGd", shape, strict=True)),
        make=lambda: training(inputs(*shape, device=device), peers and shape in WITH_PEERS),
        checked=f"heads of {d}{', grouped' if grouped > 1 else ''}",
        check=lambda: check(2, 2 // grouped, d, device),
        ours=OURS,
    )


def inputs(
    B: int, T: int, H: int, G: int, d: int, dtype: torch.dtype = torch.bfloat16, device="cuda"
) -> list[Tensor]:
    """q, k, v, w, beta and log_forget, random; a trained gate forgets a few percent a token."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    w = F.normalize(normal(B, T, G, d), dim=-1).to(dtype)
    vectors = [normal(B, T, H, d).to(dtype), *(normal(B, T, G, d).to(dtype) for _ in range(2)), w]
    return [*vectors, 2 * torch.sigmoid(normal(B, T, G)), F.logsigmoid(normal(B, T, H) + 3)]


def training(x: list[Tensor], peers: bool) -> dict[str, Case]:
    """Every candidate by name."""
    H, G = x[0].shape[2], x[1].shape[2]
    full = [x[0], *(t.repeat_interleave(H // G, 2) if G < H else t for t in x[1:3])]
    found: dict[str, Case] = {name: (partial(_sdpa, b), full) for name, b in BACKENDS.items()}
    found["path"] = (_attend, x[:5])
    found["path_fox"] = (_attend, x)
    return found | (_peers(x) if peers else {})


def _attend(*x: Tensor) -> Tensor:
    """Ours; on a GPU always the kernels, so that a size they do not serve says so."""
    return path_attention(*x, impl="triton" if x[0].is_cuda else None).y


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2)


def _peers(x: list[Tensor]) -> dict[str, Case]:
    from fla.ops.attn import parallel_attn
    from fla.ops.forgetting_attn import parallel_forgetting_attn
    from fla.ops.path_attn import parallel_path_attn

    q, k, v, w, beta, gate = x
    path = [q, k, v, w.float(), beta]  # which it wants in float32
    return {
        "fla attention": (parallel_attn, [q, k, v]),
        "fla fox": (parallel_forgetting_attn, [q, k, v, gate]),
        "fla path": (lambda *a: parallel_path_attn(*a)[0], path),
        "fla path_fox": (lambda *a: parallel_path_attn(*a)[0], [*path, gate]),
    }


def check(H: int, G: int, d: int, device: str, T: int = 1100) -> dict[str, float]:
    """Relative errors of y and every gradient, without and with the gate; the larger of both.

    Of y alone where our kernels have no backward.
    """
    from seqmix.reference import path

    found: dict[str, float] = {}
    names = ("y", "dq", "dk", "dv", "dw", "dbeta", "dlog_forget")
    for gated in (False, True):
        x = [t.requires_grad_() for t in inputs(1, T, H, G, d, device=device)[: 5 + gated]]
        exact = [t.detach().double().requires_grad_() for t in x]
        dy = torch.randn(1, T, H, d, device=device, dtype=x[0].dtype)
        wanted = path.path_attention(*exact, scale=d**-0.5)[0]
        try:
            y = _attend(*x)
        except NotImplementedError:
            with torch.no_grad():
                y = _attend(*x)
        got = [y, *(torch.autograd.grad(y, x, dy) if y.requires_grad else [])]
        results = [wanted, *torch.autograd.grad(wanted, exact, dy.double())]
        for name, a, b in zip(names, got, results, strict=False):
            error = ((a.double() - b).norm() / b.norm()).item()
            found[name] = max(error, found.get(name, 0.0))
    return found


# ------------------------------------------------------------------------------------- decoding


def _decoding(shape: tuple[int, ...], peers: bool, device: str) -> Workload:
    _, _, H, G, d = shape
    return Workload(
        group="decode",
        shape=dict(zip("NTHGd", shape, strict=True)),
        make=lambda: decoding(*shape, peers=peers, device=device),
        checked=f"decoding, heads of {d}{', grouped' if G < H else ''}",
        check=lambda: check_decoding(H // G, d, device),
        ours=OURS,
        passes=("decode",),
    )


def decoding(
    N: int, T: int, H: int, G: int, d: int, *, peers: bool, device: str = "cuda"
) -> dict[str, Case]:
    """One token of every row over a cache; SDPA and FLA read one of the same length."""
    x = inputs(N, PENDING, H, G, d, device=device)
    cache = [torch.randn(N, T, G, d, device=device, dtype=x[0].dtype) for _ in range(2)]
    heads = [x[0][:, -1:].contiguous(), *cache]
    read = READ if G == H else BACKENDS  # the third wants as many key heads as query heads
    found: dict[str, Case] = {name: (partial(_sdpa_cache, b), heads) for name, b in read.items()}
    length = torch.full((N,), T, device=device)
    decay = -torch.rand(N, T, H, device=device)
    found["path"] = (stepper(x[:5], None, length, *cache), heads)
    found["path_fox"] = (stepper(x, decay, length, *cache), heads)
    found["fold"] = (folder(N, H, G, d, device), heads)
    return found | (_peers_cache(x, cache) if peers else {})


def stepper(
    x: list[Tensor], decay: Tensor | None, length: Tensor, keys: Tensor, values: Tensor
) -> Callable[..., Tensor]:
    """Decodes the last token of x, the others pending, as the layer does: appends and reads."""
    q, k, v, w, beta, *gate = x
    conv = torch.cat([k[:, :2], k], 1)  # a convolution of width 3 keeps two more
    rows = [k.float(), v, w.float(), conv, beta, gate[0] if gate else None]
    old = [t if t is None else t[:, :-1].contiguous() for t in rows]
    new = [t if t is None else t[:, -1:].contiguous() for t in rows]
    count = torch.full_like(length, old[0].shape[1])
    pending = Pending(*old[:3], *old[4:])
    scale = q.shape[-1] ** -0.5
    folded = Folded(keys, values, decay, length)
    _, solution = path_cache.extend(q[:, -2:-1], count - 1, pending, folded, scale=scale)

    def step(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        folded = Folded(keys, values, decay, length)
        return path_cache.step(q, new, count, old, solution, folded, scale=scale)[0]

    return step


def folder(N: int, H: int, G: int, d: int, device: str) -> Callable[..., Tensor]:
    """Carries the keys of a cache over a block of tokens: once in as many steps."""
    _, k, _, w, beta, _ = inputs(N, BLOCK, H, G, d, device=device)
    k, w = k.float(), w.float()
    return lambda q, keys, values: path_cache.fold(keys, k, w, beta)[0]


def _sdpa_cache(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2)


def _peers_cache(x: list[Tensor], cache: list[Tensor]) -> dict[str, Case]:
    """FLA reads aligned keys and rewrites all of them at every token; its copies are left out."""
    from fla.ops.attn.decoding import attn_decoding_one_step

    q, _, _, w, beta, _ = (t[:, -1:] for t in x)
    N, length = cache[0].shape[:2]
    offsets = torch.arange(N + 1, device=q.device, dtype=torch.int32) * length

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1)[None] for t in (q, k, v))
        return attn_decoding_one_step(q, k, v, cu_seqlens=offsets)

    @torch.compile(dynamic=True)
    def carry(k: Tensor) -> Tensor:
        wide, along = k.float(), w.float()
        erased = beta[..., None] * (wide * along).sum(-1, keepdim=True)
        return (wide - erased * along).to(k.dtype)

    heads = [q.contiguous(), *cache]
    return {
        "fla attention": (read, heads),
        "fla path": (lambda q, k, v: read(q, carry(k), v), heads),
    }


def check_decoding(
    R: int, d: int, device: str, T: int = 300, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """The relative error of one decoded token against all tokens read at once in float64."""
    from seqmix.reference import path

    found: dict[str, float] = {}
    for gated in (False, True):
        x = inputs(2, T, 2 * R, 2, d, dtype, device)[: 5 + gated]
        exact = [t.double() for t in x]
        wanted = path.path_attention(*exact, scale=d**-0.5)[0][:, -1:]
        old = [t[:, : T - PENDING].contiguous() for t in x]
        new = [t[:, T - PENDING :].contiguous() for t in x]
        keys = path_attention(*old, return_keys=True).keys
        decay = old[5].flip(1).cumsum(1).flip(1) - old[5] if gated else None
        length = torch.full((2,), T - PENDING, device=device)
        got = stepper(new, decay, length, keys, old[2])(new[0][:, -1:].contiguous(), keys, old[2])
        error = ((got.double() - wanted).norm() / wanted.norm()).item()
        found["y"] = max(error, found.get("y", 0.0))
    return found


# ---------------------------------------------------------------------------------------- tiles


def tune(sizes: tuple[int, ...] = (64, 128)) -> dict[str, Any]:
    """Return the table of tiles with this class of GPU tuned at two head sizes."""
    from seqmix.kernels.path import tiles

    device, dtype = torch.device("cuda"), torch.bfloat16
    timer = GpuTimer()
    for d in sizes:
        print(f"{tiles.gpu_class(device)}, heads of {d}", flush=True)
        x = [t.requires_grad_() for t in inputs(2, 4096, 16, 16, d)]
        dy = torch.randn_like(x[0])
        problem = Problem(
            use=partial(tiles.use, d, device),
            error=lambda d=d: max(check(2, 1, d, "cuda").values()),
            run=lambda x=x, dy=dy: torch.autograd.grad(_attend(*x), x, dy),
            timed=partial(time_interleaved, rounds=9, warmup=1, once=timer.queued),
        )
        tune_tiles(tiles.all_tiles(d, dtype, device), problem)
    return tiles.TABLE


# ------------------------------------------------------------------------------------ documents

COLUMNS = {
    "best SDPA": "sdpa",
    "PaTH": "path",
    "PaTH-FoX": "path_fox",
    "FLA PaTH": "fla path",
    "FLA PaTH-FoX": "fla path_fox",
    "FLA FoX": "fla fox",
    "FLA attention": "fla attention",
}
SHORT = {name: COLUMNS[name] for name in ("best SDPA", "PaTH", "PaTH-FoX", "FLA PaTH")}


def _goals() -> Iterator[Goal]:
    def at(step: str, **where: object) -> dict[str, object]:
        return {"group": "shapes", "pass": step, "name": "path"} | where

    for step, name, most in (
        ("forward", "forward", (2.0, 1.5, 1.35, 2.0, 1.6)),
        ("both", "forward + backward", (2.0, 1.7, 1.6, 2.2, 2.0)),
    ):
        points = ((2048, 64), (8192, 64), (16384, 64), (4096, 128), (16384, 128))
        for (T, d), limit in zip(points, most, strict=True):
            where = at(step, T=T, d=d, H=2048 // d, G=2048 // d)
            yield Goal(f"{name}, heads of {d}, T = {T:,}", limit, where)
        yield Goal(f"{name}, heads of 64, 4 a key head, T = 2,048", 1.7, at(step, T=2048, G=8))
    for step, name in (("forward", "forward"), ("both", "forward + backward")):
        where = at(step, name="path_fox")
        yield Goal(f"PaTH-FoX over PaTH, {name}, at worst", 1.1, where, over="path")
    yield Goal("memory of forward + backward, at worst", 2.0, at("both"), "mib")
    where = {"group": "decode", "pass": "decode", "name": "path"}
    yield Goal("one decoded token, at worst", 1.1, where)


__all__ = ["TABLES", "first_calls", "tune", "workloads"]
TABLES = {
    "first": First(),
    "source": Source(),
    "goals": Goals(tuple(_goals())),
    "forward": Table("shapes", "forward", COLUMNS, time),
    "both": Table("shapes", "both", COLUMNS, time),
    "launched forward": Table("shapes", "forward", SHORT, launched),
    "launched both": Table("shapes", "both", SHORT, launched),
    "memory": Table("shapes", "both", SHORT, memory),
    "decode": Table("decode", "decode", SHORT | {"PaTH fold": "fold"}, microseconds),
    "paper": Table("paper", "both", COLUMNS, time),
    "summary": Table("shapes", "both", SHORT, time),
}
