"""What a run shows, and leaves in its folder: checkpoints, whole or absent, a log, a figure.

OUT/    recipe.yaml log.jsonl
        checkpoint-N/whole.json      names every file of the checkpoint with its size, written last
"""

import json
import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from rich.progress import Progress
from transformers import AutoModelForCausalLM, TrainerCallback

from seqmix.model import SeqmixConfig  # now the Auto classes know it
from seqmix.recipe import Recipe, save_recipe
from seqmix.report import console, provenance, write_json
from seqmix.tokenizer import load_tokenizer, locate

RECIPE, LOG, WHOLE = "recipe.yaml", "log.jsonl", "whole.json"
# What may change between a run and its continuation: nothing that the loss depends on.
FREE = ("steps", "micro_batch_size", "num_workers", "log_every", "evaluate_every", "evaluate_rows")
FREE += ("save_every", "keep_checkpoints", "report_to")


def check_folder(recipe: Recipe, out: Path, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that is in use, unless told what to do with the run in it."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / RECIPE).is_file():
        raise FileExistsError(f"{out} exists and is no run of ours; choose another folder")
    if resume:
        before, now = _earlier(out / RECIPE), asdict(recipe)
        changed = [key for key in now if key not in FREE and before.get(key) != now[key]]
        if changed:
            raise ValueError(f"cannot resume {out}: it had another {', '.join(changed)}")
    elif not overwrite:
        raise FileExistsError(f"{out} holds a run; --resume continues it, --overwrite deletes it")


def _earlier(path: Path) -> dict[str, Any]:
    """Read the recipe of the run in a folder."""
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot resume: {path} is damaged") from error
    if not isinstance(values, dict):
        raise ValueError(f"cannot resume: {path} is damaged")
    return values


def open_folder(recipe: Recipe, out: Path, overwrite: bool) -> None:
    """Make the folder of a run, with its recipe and without half-written checkpoints."""
    if overwrite and out.exists():
        shutil.rmtree(out)
    for folder in out.glob("checkpoint-[0-9]*"):
        if not _is_whole(folder):
            console.print(f"{folder} is half written, deleted")
            shutil.rmtree(folder)
    out.mkdir(parents=True, exist_ok=True)
    save_recipe(recipe, out / RECIPE)


def load_model(name: str, **options: Any) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a folder, or by name from the hub.

    Raises FileNotFoundError or ValueError, also where weights and configuration do not fit: the
    library would start a missing weight at random and drop one it does not know.
    """
    where = locate(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **where, **options, output_loading_info=True
        )
    except Exception as error:  # damaged files raise whatever their reader raises
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot read the model {name}: {reason}") from error
    model, found = loaded
    _check_weights(name, model, found)
    return model.to(processes().device).eval(), load_tokenizer(name)


def _check_weights(name: str, model: Any, found: dict[str, Any]) -> None:
    wrong = [f"lacks {key}" for key in sorted(found["missing_keys"])]
    if isinstance(model.config, SeqmixConfig):
        wrong += [f"has no place for {key}" for key in sorted(found["unexpected_keys"])]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(
            f"cannot read the model {name}: its weights do not fit its config.json, "
            f"it {wrong[0]}{more}"
        )


def processes() -> PartialState:
    """Join the processes that a launcher started, over gloo where there is no GPU."""
    return PartialState(cpu=not torch.cuda.is_available())


def leave() -> None:
    """End all processes together: one that ends early would abort what others still send."""
    if (state := processes()).num_processes > 1:
        state.wait_for_everyone()
        state.destroy_process_group()


def latest_checkpoint(out: Path) -> Path | None:
    """Return the last checkpoint whose every file is as long as when its marker was written."""
    return max(filter(_is_whole, out.glob("checkpoint-[0-9]*")), key=_step, default=None)


def read_log(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log; a line that a killed run left half written is none."""
    lines = (out / LOG).read_text().splitlines() if (out / LOG).exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def plot_losses(runs: dict[str, Path], path: Path) -> None:
    """Draw training and held-out loss of each run (name -> model folder) over tokens."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).subplots()
    for number, (name, out) in enumerate(runs.items()):
        log = read_log(out)
        for key, what, marker in (("loss", "training", ""), ("held_out_loss", "held out", "o")):
            points = [(row["tokens"], row[key]) for row in log if key in row]
            if points:
                style = {"color": f"C{number}", "alpha": 1 if marker else 0.4, "marker": marker}
                axes.plot(*zip(*points, strict=True), label=f"{name}, {what}", **style)  # type: ignore[arg-type]
    axes.set(xlabel="tokens", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


class Checkpoints(TrainerCallback):
    """Marks each finished checkpoint as whole, and only then deletes old ones."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the marker: every file with its size, and where the checkpoint comes from."""
        PartialState().wait_for_everyone()
        if not state.is_world_process_zero:
            return
        out = Path(args.output_dir)
        folder = out / f"checkpoint-{state.global_step}"
        sizes = {
            str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()
        }
        write_json(folder / WHOLE, {"files": sizes, "recipe": asdict(self.recipe), **provenance()})
        for old in sorted(out.glob("checkpoint-[0-9]*"), key=_step)[
            : -self.recipe.keep_checkpoints
        ]:
            (old / WHOLE).unlink(missing_ok=True)
            shutil.rmtree(old)


class Log(TrainerCallback):
    """Appends a JSON line to `log.jsonl` for each logged step, and stops a run that diverged."""

    def __init__(self, recipe: Recipe, path: Path):
        self.path, self.tokens_a_step = path, recipe.batch_size * recipe.sequence_length
        self.since = (0.0, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drop what a killed run logged after the checkpoint that this one starts from."""
        self.since = time.perf_counter(), state.global_step
        if state.is_world_process_zero:
            kept = [row for row in read_log(self.path.parent) if row["step"] <= state.global_step]
            self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any
    ) -> None:
        """Write the row; raise ValueError at a loss that is no number."""
        step, logs = state.global_step, logs or {}
        row: dict[str, Any] = {"step": step, "tokens": step * self.tokens_a_step}
        if "loss" in logs:
            seconds = time.perf_counter() - self.since[0]
            row |= {
                name: logs[name] for name in ("loss", "learning_rate", "grad_norm") if name in logs
            }
            row["tokens_per_second"] = round((step - self.since[1]) * self.tokens_a_step / seconds)
            self.since = time.perf_counter(), step
        elif "eval_loss" in logs:
            row["held_out_loss"] = logs["eval_loss"]
        else:
            return
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if not math.isfinite(row["loss"] if "loss" in row else row["held_out_loss"]):
            raise ValueError(f"train: the loss is no number at step {step}; see {self.path}")


class Bar(TrainerCallback):
    """A progress bar on a terminal; elsewhere one line a logged step."""

    def __init__(self, recipe: Recipe, bar: Progress):
        self.name, self.bar = recipe.name, bar

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the bar, at the step that the run starts from."""
        if state.is_world_process_zero:
            self.task = self.bar.add_task(
                self.name, total=state.max_steps, completed=state.global_step, loss=""
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the bar."""
        if state.is_world_process_zero:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any
    ) -> None:
        """Show the loss."""
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        loss = f"loss {logs['loss']:.3f}"  # type: ignore[index]
        self.bar.update(self.task, loss=loss)
        if self.bar.disable:
            console.print(f"{self.name}: step {state.global_step}/{state.max_steps}, {loss}")


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / WHOLE).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False
