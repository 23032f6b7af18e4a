"""The house: imports run downwards, files stay short, and imports stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "seqmix"
MODULES = sorted(SOURCE.rglob("*.py"))

# A room may import from rooms of a lower storey and from itself.
STOREYS = [
    {"reference", "chunked", "kernels", "tasks", "report"},
    {"ops", "tokenizer"},
    {"layers", "data"},
    {"model", "recipe"},
    {"run"},
    {"train"},
    {"convert", "evaluate", "lab", "inspect", "bench"},
    {"quickstart", "doctor"},
    {"cli"},
]
ALONE = {"reference", "chunked", "kernels", "tasks"}  # these import nothing of ours


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def storey(name: str) -> int:
    found = [level for level, rooms in enumerate(STOREYS) if name in rooms]
    assert found, f"{name} belongs to no storey: add it to STOREYS"
    return found[0]


def imports(path: Path) -> set[str]:
    """The rooms of ours that a file imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("seqmix.")}
    return {name for name in rooms if (SOURCE / name).exists() or (SOURCE / f"{name}.py").exists()}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_downwards(path):
    if path.parent == SOURCE and path.name == "__init__.py":
        return
    here = room(path)
    for other in imports(path) - {here}:
        assert here not in ALONE, f"{here} must import nothing of ours, imports {other}"
        assert storey(other) < storey(here), f"{here} must not import {other}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    longest = 150 if room(path) == "kernels" else 60
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= longest, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_module_says_what_it_is(path):
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_a_mixer_has_the_same_name_in_every_storey():
    for name in ("path", "palimpsa", "lattice"):
        for storey in ("reference", "chunked", "ops", "layers"):
            assert (SOURCE / storey / f"{name}.py").exists(), f"{storey}/{name}.py"
        assert (SOURCE.parents[1] / "docs" / "mixers" / f"{name}.md").exists()


def seconds(code: str) -> float:
    """The fastest of three fresh processes, by the clock inside them."""
    clock = "time.perf_counter()"
    script = f"import time, torch\nstart = {clock}\n{code}\nprint({clock} - start)"
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    return min(float(run.stdout.split()[-1]) for run in runs)


@pytest.mark.parametrize("name", ["ops", "layers"])
def test_operations_and_layers_import_without_the_rest(name):
    code = (
        f"import sys, seqmix.{name}\n"
        "heavy = {'transformers', 'triton', 'datasets', 'matplotlib', 'accelerate', 'tyro'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    bare = subprocess.run(
        [sys.executable, "-c", "import sys, torch; print('triton' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    allowed = {"triton"} if bare.stdout.strip() == "True" else set()
    assert set(ast.literal_eval(run.stdout)) <= allowed
    assert seconds(f"import seqmix.{name}") < 1.0


def test_the_package_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from seqmix.layers import build_mixer\n"
        "for name in ('path_fox', 'palimpsa_m', 'lattice', 'fox'):\n"
        "    y, state = build_mixer(name, hidden_size=32, num_heads=2)(torch.randn(1, 5, 32))\n"
        "    y.sum().backward()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
