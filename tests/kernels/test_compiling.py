"""Kernels are compiled once for all lengths, and side by side. Without a GPU: see fake_gpu.py."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def compiled(folder: Path, script: str):
    """What a script with a GPU that compiles only prints last, as JSON."""
    file = folder / "script.py"  # Triton reads the source of kernels
    file.write_text("import tests.kernels.fake_gpu as gpu\n" + textwrap.dedent(script))
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_no_length_compiles_anew(tmp_path):
    """Nor another batch or number of documents."""
    found = compiled(
        tmp_path,
        """
        import json, torch
        from seqmix.kernels.compiling import Kernel
        from seqmix.kernels.path.aligned import aligned_keys
        from seqmix.kernels.path.backward import backward
        from seqmix.kernels.path.forward import forward

        made = set()
        Kernel._do_compile = lambda self, key, *rest: made.add((self.__name__, key))

        def call(B, T, H, offsets=None):
            q, k, v, w = (torch.rand(B, T, H, 64, dtype=torch.bfloat16) for _ in range(4))
            beta, gate = torch.rand(B, T, H), -torch.rand(B, T, H)
            offsets = offsets if offsets is None else torch.tensor(offsets)
            tokens = (q, k, v, w, beta, gate)
            y, lse = forward(*tokens, 0.125, offsets)
            backward(q, *tokens, y, lse, 0.125, offsets)
            aligned_keys(k, w, beta, offsets)

        call(2, 2048, 8)
        first = len(made)
        for T in (1, 2, 64, 100, 128, 2047, 4096, 4100, 9000):
            for B in (1, 2, 16):
                call(B, T, 8)
        call(1, 70_000, 8)
        call(1, 300, 8, [0, 3, 3, 300])
        call(1, 1024, 8, [0, 1000])
        print(json.dumps([first, len(made), sorted({name for name, _ in made})]))
        """,
    )
    assert found[0] == found[1], f"variants of a kernel for some lengths only: {found}"
    assert len(found[2]) >= 10


def test_missing_kernels_are_compiled_before_any_is_launched(tmp_path):
    launched, missing = compiled(
        tmp_path,
        """
        import json, torch
        import triton.language as tl
        from seqmix.kernels.compiling import Kernel, compiles_together, kernel

        @kernel
        def one(x, N):
            tl.store(x, N)

        @kernel
        def two(x, N):
            tl.store(x, N + 1)

        missing, launched = [], []
        compile = Kernel._do_compile

        def noted(self, *rest):
            missing.append(self.__name__)
            return compile(self, *rest)

        Kernel._do_compile = noted

        @compiles_together
        def call(N):
            x = torch.empty(1)
            one[(1,)](x, N)
            two[(1,)](x, N)
            launched.append(list(gpu.LAUNCHED))

        call(5)
        call(16)
        print(json.dumps([launched, missing]))
        """,
    )
    assert launched == [[], ["one", "two"], ["one", "two"] * 2]
    assert missing == ["one", "two"]
