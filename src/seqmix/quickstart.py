"""The main job on real input: PaTH-FoX and a RoPE Transformer of equal size, on one book.

    seqmix quickstart

Trains both on the same tokens of Moby-Dick, reports held-out bits per byte, draws their losses and
leaves two model folders.
"""

from pathlib import Path
from typing import Any

from rich.table import Table

from seqmix.data import held_out_documents
from seqmix.evaluate.perplexity import perplexity
from seqmix.recipe import load_recipe
from seqmix.report import provenance, write_json
from seqmix.run import load_model, plot_losses
from seqmix.train import train

RECIPES = ("quickstart-path_fox", "quickstart-transformer")
PROMPT = "CHAPTER 136. The Return.\n\n"


def quickstart(out: str | Path, overrides: list[str], overwrite: bool = False) -> dict[str, Any]:
    """Train both recipes below `out` and compare them; return the results."""
    out, rows = Path(out), []
    recipes = [load_recipe(name, overrides) for name in RECIPES]
    if not overwrite and any((out / recipe.name).exists() for recipe in recipes):
        raise FileExistsError(f"{out} holds an earlier quickstart; --overwrite deletes it")
    documents = held_out_documents(recipes[0].data)
    for recipe in recipes:
        results = train(recipe, out / recipe.name, overwrite=overwrite)
        model, tokenizer = load_model(str(out / recipe.name))
        scores = perplexity(model, tokenizer, documents, window=recipe.sequence_length)
        rows.append({key: results[key] for key in ("name", "parameters", "tokens", "seconds")})
        rows[-1] |= {key: scores[key] for key in ("loss", "bits_per_byte", "bytes")}
    plot_losses({recipe.name: out / recipe.name for recipe in recipes}, out / "loss.png")
    results = {"rows": rows, **provenance()}
    write_json(out / "results.json", results)
    return results


def table(results: dict[str, Any]) -> Table:
    """Lay the results out for a reader."""
    table = Table(title=f"held-out text, {results['rows'][0]['bytes']:,} bytes")
    for column in ("model", "parameters", "tokens", "seconds", "loss", "bits per byte"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in results["rows"]:
        counts = f"{row['parameters']:,}", f"{row['tokens']:,}", f"{row['seconds']:.0f}"
        table.add_row(row["name"], *counts, f"{row['loss']:.3f}", f"{row['bits_per_byte']:.3f}")
    return table
