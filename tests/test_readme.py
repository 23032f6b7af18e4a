"""What the documents say is true: their examples run, their files exist, their numbers come out."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from seqmix.bench.tables import update
from seqmix.ops import lattice

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_there_are_examples():
    assert len(EXAMPLES) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:src|tests|docs|recipes|data)/[\w./*-]+)`", text):
        assert list(ROOT.glob(path)), path


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_of_measurements_are_those_of_the_results(page):
    text = page.read_text()
    for suite in {match[1] for match in re.finditer(r"<!-- (\w+): ", text)}:
        file = ROOT / f"benchmarks/results/{suite}.json"
        if file.exists():
            assert update(text, suite, json.loads(file.read_text())) == text


def test_the_errors_of_sweeps_are_as_printed():
    """docs/mixers/lattice.md: errors of outputs after sweeps over chunks, within a factor 3."""
    torch.manual_seed(0)
    B, T, H, S = 1, 256, 4, 64
    q, k, v = (normalize(torch.randn(B, T, H, S).double(), dim=-1) for _ in range(3))
    gamma = torch.randn(B, T, H).double().sigmoid()
    state = normalize(torch.randn(B, H, S, S).double(), dim=-2)
    exact = lattice(q, k, v, gamma, state=state).y
    table = (ROOT / "docs/mixers/lattice.md").read_text().split("| C | 1 sweep")[1]
    for row in re.findall(r"^\| (\d+) \| (.*) \|$", table.split("\n\n")[0], re.M):
        for sweeps, printed in zip((1, 2, 3, 4, 8), row[1].split(" | "), strict=False):
            if not printed.strip() or printed.strip() == "|":
                continue
            options = {"chunk_size": int(row[0]), "sweeps": sweeps}
            error = (lattice(q, k, v, gamma, state=state, **options).y - exact).norm()
            error = float(error / exact.norm())
            if "exact" in printed:
                assert error < 1e-12
            else:
                assert 1 / 3 < error / float(printed) < 3, (options, error, printed)


def test_products_of_reflections_need_float32():
    """docs/numerics.md: the spectral norm of a product of 4096 reflections."""
    torch.manual_seed(0)
    norms = {}
    for dtype in (torch.float32, torch.bfloat16):
        product = torch.eye(64, dtype=dtype)
        for w in normalize(torch.randn(4096, 64), dim=-1).to(dtype):
            product = product - 2 * (product @ w)[:, None] * w
        norms[dtype] = float(torch.linalg.matrix_norm(product.float(), 2))
    assert norms[torch.float32] == pytest.approx(1.0, abs=1e-4)
    assert norms[torch.bfloat16] == pytest.approx(1.13, abs=0.05)
