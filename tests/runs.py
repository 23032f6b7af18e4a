"""A small text, a small recipe and a small model, for the tests of training and of the commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from seqmix.data import DataOptions
from seqmix.recipe import Recipe
from seqmix.run import read_log

LAUNCH = (
    "accelerate.commands.launch --multi_gpu --num_machines 1 --main_process_port 0 "
    "--mixed_precision no --dynamo_backend no --num_processes"
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TEXT = "the whale swam north and the men of the ship rowed after it until the sea was dark"
WORDS = TEXT.split()


def documents(number: int = 24, words: int = 60) -> list[str]:
    """Documents whose words repeat with a different stride each, so that no two are equal."""
    return [
        " ".join(WORDS[(3 * n + i * (n + 1)) % len(WORDS)] for i in range(words)) + f" {n}.\n"
        for n in range(number)
    ]


def write_text(folder: Path) -> Path:
    """Write the documents as JSON lines, unless they are there."""
    path = folder / "text.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    return path


def recipe(folder: Path, mixer: str = "path_fox", **changes: Any) -> Recipe:
    """A recipe of seconds, on text in `folder`."""
    data = DataOptions(files=[str(write_text(folder))], vocab_size=300, cache=str(folder / "cache"))
    model = {"mixers": [mixer], "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
    sizes = {"sequence_length": 32, "batch_size": 4, "steps": 20, "warmup_steps": 2, "log_every": 1}
    return Recipe(**{"name": "tiny", "model": model, "data": data, **sizes, **changes})


def losses(out: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step, logged once and in order."""
    rows = [row for row in read_log(out) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows}


def command(processes: int, *words: object) -> None:
    """Run a command of ours in new processes, which talk over a port of their own."""
    launch = [sys.executable, "-m"]
    if processes > 1:
        launch += [*LAUNCH.split(), str(processes), "-m"]
    launch += ["seqmix.cli", *map(str, words)]
    run = subprocess.run(launch, env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
