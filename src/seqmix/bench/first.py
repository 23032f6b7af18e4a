"""How long the first calls take in a fresh process: all that they load and compile.

Prints one JSON line; `first_calls` runs this in a process of its own, with an empty cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import torch


def first_calls() -> list[dict]:
    """Return seconds of the first calls of PaTH, in order, one row a shape."""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-m", "seqmix.bench.first"],
            env=os.environ | {"TRITON_CACHE_DIR": folder},
            capture_output=True,
            text=True,
        )
    if run.returncode:
        return [{"note": run.stderr.strip().splitlines()[-1][:120]}]
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    from seqmix.bench.path import inputs
    from seqmix.ops import path_attention

    rows = []
    for shape in ((2, 2048, 32, 32, 64), (2, 3000, 32, 32, 64), (2, 2048, 16, 16, 128)):
        x = [t.requires_grad_() for t in inputs(*shape)[:5]]
        torch.cuda.synchronize()
        started = time.perf_counter()
        y = path_attention(*x).y
        torch.cuda.synchronize()
        forward = time.perf_counter()
        torch.autograd.grad(y, x, torch.ones_like(y))
        torch.cuda.synchronize()
        seconds = {"forward_s": forward - started, "backward_s": time.perf_counter() - forward}
        rows.append(dict(zip("BTHGd", shape, strict=True)) | seconds)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
