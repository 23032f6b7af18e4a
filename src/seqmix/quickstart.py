"""The main job on real input: PaTH-FoX and a RoPE Transformer of equal size, on one book.

    seqmix quickstart

Trains both on the same tokens of Moby-Dick, side by side, reports held-out bits per byte, draws
their losses and leaves two model folders.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from seqmix.data import held_out_documents
from seqmix.evaluate.perplexity import perplexity
from seqmix.recipe import Recipe, load_recipe
from seqmix.report import console, progress, provenance, write_json
from seqmix.run import load_model, plot_losses, read_log

RECIPES = ("quickstart-path_fox", "quickstart-transformer")
PROMPT = "CHAPTER 136. The Return.\n\n"


def quickstart(out: str | Path, overrides: list[str], overwrite: bool = False) -> dict[str, Any]:
    """Train both recipes below `out` and compare them; return the results."""
    out, rows = Path(out), []
    recipes = [load_recipe(name, overrides) for name in RECIPES]
    if not overwrite and any((out / recipe.name).exists() for recipe in recipes):
        raise FileExistsError(f"{out} holds an earlier quickstart; --overwrite deletes it")
    _train(recipes, out, [*overrides, *(["--overwrite"] if overwrite else [])])
    documents = held_out_documents(recipes[0].data)
    for recipe in recipes:
        folder = out / recipe.name
        model, tokenizer = load_model(str(folder))
        scores = perplexity(model, tokenizer, documents, window=recipe.sequence_length)
        row = {"name": recipe.name, "parameters": model.num_parameters(), "steps": recipe.steps}
        row["tokens"] = read_log(folder)[-1]["tokens"]
        rows.append(row | {key: scores[key] for key in ("loss", "bits_per_byte", "bytes")})
    plot_losses({recipe.name: out / recipe.name for recipe in recipes}, out / "loss.png")
    results = {"rows": rows, **provenance()}
    write_json(out / "results.json", results)
    return results


def table(results: dict[str, Any]) -> Table:
    """Lay the results out for a reader."""
    table = Table(title=f"held-out text, {results['rows'][0]['bytes']:,} bytes")
    for column in ("model", "parameters", "tokens", "loss", "bits per byte"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in results["rows"]:
        counts = f"{row['parameters']:,}", f"{row['tokens']:,}"
        table.add_row(row["name"], *counts, f"{row['loss']:.3f}", f"{row['bits_per_byte']:.3f}")
    return table


def _train(recipes: list[Recipe], out: Path, options: list[str]) -> None:
    """Train each recipe in a process of its own: small models gain little from more threads."""
    threads = max(1, (os.cpu_count() or 1) // len(recipes))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"training {' and '.join(r.name for r in recipes)} ({threads} threads each)")
    runs = []
    try:
        for recipe in recipes:
            command = [sys.executable, "-m", "seqmix.cli", "train", recipe.name]
            command += ["--out", str(out / recipe.name), *options]
            with (out / f"{recipe.name}.log").open("w") as log:
                runs.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        _watch(recipes, out, runs)
    finally:
        for run in runs:
            run.terminate()
            run.wait()
    for recipe, run in zip(recipes, runs, strict=True):
        if run.returncode not in (0, -signal.SIGTERM):  # which is how we end it if the other failed
            lines = (out / f"{recipe.name}.log").read_text().splitlines()
            raise ValueError(f"{recipe.name} failed: {lines[-1] if lines else run.returncode}")


def _watch(recipes: list[Recipe], out: Path, runs: list[subprocess.Popen]) -> None:
    """Show how far each run is, until all have ended or one has failed."""
    with progress("loss") as bar:
        tasks = [bar.add_task(recipe.name, total=recipe.steps, loss="") for recipe in recipes]
        while any(run.poll() is None for run in runs) and not any(run.returncode for run in runs):
            time.sleep(0.5)
            for recipe, task in zip(recipes, tasks, strict=True):
                losses = [row for row in read_log(out / recipe.name) if "loss" in row]
                if losses:
                    shown = f"loss {losses[-1]['loss']:.3f}"
                    bar.update(task, completed=losses[-1]["step"], loss=shown)
