"""Recipe in, trained model folder out, through the Hugging Face Trainer on Accelerate.

    seqmix train recipes/tiny-path_fox.yaml --steps 200
    accelerate launch --num_processes 8 -m seqmix.cli train recipes/path-760m.yaml

Step n reads rows [n * batch_size, (n+1) * batch_size) of the data whatever the number of processes,
workers and accumulated micro-batches; the loss is the mean over the targets of the whole batch. So
a run continues from a checkpoint bit for bit on a CPU, and two processes compute what one does.

    OUT/    config.json model.safetensors tokenizer.json ...    what from_pretrained reads
            recipe.yaml results.json log.jsonl loss.png checkpoint-N/
"""

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.progress import Progress
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import (
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from seqmix.data import PackedRows, pack, prepare
from seqmix.model import SeqmixConfig, SeqmixForCausalLM
from seqmix.recipe import Recipe
from seqmix.report import progress, provenance, write_json
from seqmix.run import (
    LOG,
    Bar,
    Checkpoints,
    Log,
    check_folder,
    latest_checkpoint,
    load_model,
    open_folder,
    plot_losses,
)


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Train `recipe` into the model folder `out` and return the results.

    A folder that exists is refused, unless `resume` (continue from its last whole checkpoint, or
    from the start without one) or `overwrite` (delete that run first).
    """
    out = Path(out)
    arguments = _arguments(recipe, out)
    is_main = arguments.process_index == 0
    if is_main:
        check_folder(recipe, out, resume, overwrite)
    bar = progress("loss", shown=is_main)
    trainer = _trainer(recipe, out, arguments, bar)
    if is_main:  # only now, when all that a recipe can get wrong has been tried
        open_folder(recipe, out, overwrite)
    PartialState().wait_for_everyone()
    checkpoint = latest_checkpoint(out)
    started = time.perf_counter()
    with bar:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = time.perf_counter() - started

    last = [row for row in trainer.state.log_history if row["step"] == recipe.steps]
    losses = [row["eval_loss"] for row in last if "eval_loss" in row]
    held_out_loss = losses[-1] if losses else trainer.evaluate().get("eval_loss")
    _save_model(trainer, out)
    results = {
        "name": recipe.name,
        "parameters": trainer.model.num_parameters(),
        "steps": recipe.steps,
        "tokens": recipe.steps * recipe.batch_size * recipe.sequence_length,
        "seconds": round(seconds, 1),
        "processes": arguments.world_size,
        "held_out_loss": held_out_loss,
        "recipe": asdict(recipe),
        **provenance(),
    }
    if is_main:
        plot_losses({recipe.name: out}, out / "loss.png")
        write_json(out / "results.json", results)
    return results


def build_model(recipe: Recipe, tokenizer: Any) -> Any:
    """Make the recipe's model anew, or load the one it continues from."""
    if recipe.initial_model:
        model, _ = load_model(recipe.initial_model)
    else:
        special = {
            f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id")
            for kind in ("bos", "eos", "pad")
        }
        config = SeqmixConfig(**{"vocab_size": len(tokenizer), **special, **recipe.model})
        model = SeqmixForCausalLM(config)
    if model.config.vocab_size < len(tokenizer):
        raise ValueError(
            f"train: the tokenizer has {len(tokenizer)} pieces, the model {model.config.vocab_size}"
        )
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of optimiser step `step` (from 0): `final_learning_rate` at the last."""
    peak, final, done = recipe.learning_rate, recipe.final_learning_rate, step + 1
    if done <= recipe.warmup_steps:
        initial = recipe.initial_learning_rate
        return initial + (peak - initial) * done / recipe.warmup_steps
    if recipe.schedule == "cosine":
        share = (done - recipe.warmup_steps) / max(recipe.steps - recipe.warmup_steps, 1)
        return final + (peak - final) * (1 + math.cos(math.pi * min(share, 1))) / 2
    left = recipe.steps - done
    if recipe.schedule == "wsd" and left < recipe.decay_steps:
        return final + (peak - final) * max(left, 0) / recipe.decay_steps
    return peak


def decayed_parameters(model: torch.nn.Module) -> list[str]:
    """Name what weight decay acts on: not norms, biases, nor what a layer's `no_decay` lists."""
    excluded = set()
    for prefix, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        suffixes = tuple(f".{name}" for name in getattr(module, "no_decay", ()))
        for name, _ in module.named_parameters(recurse=bool(suffixes)):
            if is_norm or name.endswith("bias") or f".{name}".endswith(suffixes):
                excluded.add(f"{prefix}.{name}" if prefix else name)
    return [name for name, _ in model.named_parameters() if name not in excluded]


class RecipeTrainer(Trainer):
    """The Trainer, with the recipe's schedule, decay groups and data order."""

    model: Any
    optimizer: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(self, recipe: Recipe, **arguments: Any):
        self.recipe = recipe
        super().__init__(**arguments)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Name what AdamW decays."""
        return decayed_parameters(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Follow the recipe's `learning_rate`."""
        if self.lr_scheduler is None:
            peak = self.recipe.learning_rate
            self.lr_scheduler = LambdaLR(
                optimizer or self.optimizer, lambda step: learning_rate(self.recipe, step) / peak
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)  # PackedRows has shuffled

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return the mean loss a token over the held-out rows."""
        rows, size = self.eval_dataset, self.args.per_device_train_batch_size
        batches = [range(i, min(i + size, len(rows))) for i in range(0, len(rows), size)]
        if not batches:
            return {}
        rank, world = self.args.process_index, self.args.world_size
        total = torch.zeros(2, dtype=torch.float64)  # loss, targets
        self.model.eval()
        for first in range(
            0, len(batches), world
        ):  # every process runs as often: FSDP waits for all
            index = min(first + rank, len(batches) - 1)
            inputs = self._prepare_inputs(pack([rows[i] for i in batches[index]]))
            loss = self.model(**inputs).loss.double().cpu()
            if index == first + rank:
                targets = (inputs["labels"][:, 1:] != -100).sum().cpu()
                total += torch.stack([loss * targets, targets.double()])
        self.model.train()
        sums: Any = self.accelerator.reduce(total.to(self.args.device)) if world > 1 else total
        metrics = {"eval_loss": (sums[0] / sums[1]).item()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def _trainer(
    recipe: Recipe, out: Path, arguments: TrainingArguments, bar: Progress
) -> RecipeTrainer:
    if recipe.initial_model and not recipe.data.tokenizer:
        recipe.data.tokenizer = recipe.initial_model
    length, rows = recipe.sequence_length, recipe.steps * recipe.batch_size
    data = prepare(recipe.data, needed_tokens=rows * length)
    held_out = PackedRows(data.held_out, length)
    held_out.length = min(held_out.rows, recipe.evaluate_rows)
    set_seed(recipe.seed)
    try:
        trainer = RecipeTrainer(
            recipe,
            model=build_model(recipe, data.tokenizer),
            args=arguments,
            train_dataset=PackedRows(data.train, length, recipe.seed, rows),
            eval_dataset=held_out,
            data_collator=pack,
            processing_class=data.tokenizer,
            callbacks=[Checkpoints(recipe), Log(recipe, out / LOG), Bar(recipe, bar)],
        )
    except RuntimeError as error:  # a logger of `report_to` that is not installed
        raise ValueError(f"train: {error}") from error
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(recipe: Recipe, out: Path) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        max_grad_norm=recipe.max_grad_norm,
        bf16=recipe.precision == "bf16" or (recipe.precision == "auto" and on_gpu),
        use_cpu=not on_gpu,
        seed=recipe.seed,
        torch_compile=recipe.compile,
        dataloader_num_workers=recipe.num_workers,
        remove_unused_columns=False,
        label_names=["labels"],
        ddp_find_unused_parameters=False,
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if recipe.evaluate_every else "no",
        eval_steps=recipe.evaluate_every or None,
        save_strategy="steps" if recipe.save_every else "no",
        save_steps=recipe.save_every or 1,
        report_to=recipe.report_to or "none",
        run_name=recipe.name,
        disable_tqdm=True,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs need a launcher: no DataParallel
    world = arguments.world_size
    micro = recipe.micro_batch_size or max(recipe.batch_size // world, 1)
    if recipe.batch_size % (micro * world):
        raise ValueError(
            f"train: batch_size {recipe.batch_size} must be a multiple of micro_batch_size {micro} "
            f"times {world} processes"
        )
    arguments.per_device_train_batch_size = micro
    arguments.gradient_accumulation_steps = recipe.batch_size // (micro * world)
    return arguments


def _save_model(trainer: Trainer, out: Path) -> None:
    """Write the model beside, then move file by file: a killed run leaves no half file in `out`."""
    partial = out / "model.partial"
    trainer.save_model(str(partial))
    PartialState().wait_for_everyone()
    if trainer.args.process_index == 0:
        (partial / "training_args.bin").unlink(
            missing_ok=True
        )  # a pickle; recipe.yaml says the same
        for file in partial.iterdir():
            file.replace(out / file.name)
        partial.rmdir()
