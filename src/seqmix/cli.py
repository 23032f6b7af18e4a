"""The command `seqmix`, also `python -m seqmix.cli`.

    seqmix quickstart                 train two small models on the bundled book and compare them
    seqmix train RECIPE --key value   pretrain or continue
    seqmix evaluate MODEL             held-out perplexity and bits per byte
    seqmix generate MODEL --prompt    stream text
    seqmix bench [OP ...]             speed of the operations on this machine
    seqmix doctor                     versions, devices, which implementations run here

A mistake is one line on stderr and exit code 2. Each command loads what it needs when it runs, so
that help is quick.
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

MISTAKES = (ValueError, OSError, ImportError, NotImplementedError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not arguments.takes_overrides:
        parser.error(f"unknown argument {rest[0]!r}")
    try:
        arguments.run(arguments, rest)
    except KeyboardInterrupt:
        print(f"seqmix {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except MISTAKES as error:
        if arguments.traceback:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        message = message.removeprefix(f"{arguments.command}: ")
        print(f"seqmix {arguments.command}: {message}", file=sys.stderr)
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> _Parser:
    parser = _Parser(prog="seqmix", description="Sequence mixers whose memory depends on content.")
    parser.add_argument("--traceback", action="store_true", help="show where a mistake was met")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _training_commands(commands)
    _using_commands(commands)
    return parser


def _training_commands(commands: Any) -> None:
    sub = _command(
        commands, _quickstart, "train two small models on the bundled book and compare them", True
    )
    sub.add_argument(
        "--out", default="runs/quickstart", help="folder for both models and the results"
    )
    sub.add_argument("--overwrite", action="store_true", help="delete an earlier quickstart there")

    sub = _command(
        commands, _train, "pretrain or continue, from a recipe; every key is also an option", True
    )
    sub.add_argument("recipe", help="a YAML file, or the name of a bundled recipe")
    sub.add_argument("--out", help="model folder to write (default: runs/NAME)")
    sub.add_argument(
        "--resume", action="store_true", help="continue from the last whole checkpoint"
    )
    sub.add_argument(
        "--overwrite", action="store_true", help="delete an earlier run in that folder"
    )
    sub.add_argument("--keys", action=_Keys, help="list the keys of a recipe and exit")
    sub.epilog = "--key value sets a key of the recipe: --steps 200 --model.hidden_size 128"


def _using_commands(commands: Any) -> None:
    sub = _command(commands, _evaluate, "evaluate a model on text")
    sub.add_argument("model", help="model folder, or ORG/NAME on the hub")
    sub.add_argument("--tasks", nargs="+", default=["perplexity"], help="what to evaluate")
    sub.add_argument("--files", nargs="+", help="files to read (default: what its recipe held out)")
    sub.add_argument("--window", type=int, default=1024, help="input tokens at once")
    sub.add_argument("--stride", type=int, help="tokens between windows (default: --window)")
    sub.add_argument("--batch-size", type=int, default=8, help="windows at once")
    sub.add_argument("--out", help="JSON file to write (default: MODEL/evaluation.json)")

    sub = _command(commands, _generate, "stream text from a model")
    sub.add_argument("model", help="model folder, or ORG/NAME on the hub")
    sub.add_argument("--prompt", default="", help="text to continue")
    sub.add_argument("--max-new-tokens", type=int, default=200)
    sub.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    sub.add_argument("--top-p", type=float, default=0.95, help="probability mass to sample from")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--out", help="JSON file to write")

    _bench_command(commands)

    sub = _command(commands, _doctor, "versions, devices, and which implementations run here")
    sub.add_argument("--out", help="JSON file to write")


def _bench_command(commands: Any) -> None:
    sub = _command(commands, _bench, "time operations against scaled dot-product attention")
    sub.add_argument("operations", nargs="*", metavar="OP", help="which (default: all)")
    sizes = sub.add_argument_group("one shape: a table of all OPs at it")
    for name, default in (("batch", 2), ("length", 1024), ("heads", 4), ("size", 32)):
        sizes.add_argument(f"--{name}", type=int, help=f"default: {default}")
    sizes.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    sizes.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    sizes.add_argument("--threads", type=int, help="processor threads (default: all cores)")
    sizes.add_argument("--impl", choices=["reference", "torch", "triton"])
    suite = sub.add_argument_group("none of these: `bench path` measures many shapes on a GPU")
    suite.add_argument("--peers", action="store_true", help="with FLA's kernels: seqmix[peers]")
    suite.add_argument("--seconds", type=float, default=400.0, help="stop after about so long")
    suite.add_argument("--tune", action="store_true", help="refresh this GPU's table of tiles")
    suite.add_argument("--commit", help="commit of this source, where git cannot tell")
    sub.add_argument("--out", help="JSON file to write; of many shapes, with a figure beside it")


def _command(
    commands: Any, run: Any, summary: str, takes_overrides: bool = False
) -> argparse.ArgumentParser:
    name = run.__name__.strip("_")
    sub = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.set_defaults(run=run, takes_overrides=takes_overrides)
    return sub


class _Keys(argparse.Action):
    """Prints the keys of a recipe."""

    def __init__(self, **options: Any):
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from seqmix.recipe import describe

        for key, default, meaning in describe():
            line = f"  --{key} {default!r}".replace("'", "")
            print(textwrap.fill(f"{line:<44} {meaning}", 100, subsequent_indent=" " * 45))
        parser.exit()


def _quickstart(arguments: argparse.Namespace, overrides: list[str]) -> None:
    _quiet()
    from rich.console import Console

    from seqmix.quickstart import PROMPT, RECIPES, quickstart, table

    out = Path(arguments.out)
    results = quickstart(out, overrides, arguments.overwrite)
    Console().print(table(results))
    print(f"\nA sample of {RECIPES[0]}:\n")
    _stream(str(out / RECIPES[0]), PROMPT, max_new_tokens=120)
    print(f"\nmodels, loss.png and results.json are in {out}")


def _train(arguments: argparse.Namespace, overrides: list[str]) -> None:
    _quiet()
    from seqmix.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, overrides)
    from seqmix.run import leave, processes
    from seqmix.train import train

    out = arguments.out or f"runs/{recipe.name}"
    results = train(recipe, out, resume=arguments.resume, overwrite=arguments.overwrite)
    if processes().is_main_process:
        loss = results["held_out_loss"]
        held_out = "" if loss is None else f", held-out loss {loss:.4f}"
        print(f"{recipe.name}: {recipe.steps} steps, {results['tokens']:,} tokens{held_out}: {out}")
    leave()


def _evaluate(arguments: argparse.Namespace, _: list[str]) -> None:
    for task in arguments.tasks:
        if task != "perplexity":
            raise ValueError(f"unknown task {task!r}; known are perplexity")
    _quiet()
    from seqmix.data import DataOptions, held_out_documents, read_documents
    from seqmix.evaluate.perplexity import perplexity
    from seqmix.recipe import load_recipe
    from seqmix.report import provenance, write_json
    from seqmix.run import RECIPE, leave, load_model, processes
    from seqmix.tokenizer import locate

    locate(arguments.model)
    recipe = Path(arguments.model) / RECIPE
    if not arguments.files and not recipe.is_file():
        raise ValueError(f"{arguments.model} has no {RECIPE}: name the text with --files FILE ...")
    model, tokenizer = load_model(arguments.model)
    if arguments.files:
        documents = list(read_documents(DataOptions(files=arguments.files)))
    else:
        documents = held_out_documents(load_recipe(recipe).data)
    options = {name: getattr(arguments, name) for name in ("window", "stride", "batch_size")}
    scores = perplexity(model, tokenizer, documents, **options)
    if processes().is_main_process:
        _print_table([{"perplexity": name, "value": value} for name, value in scores.items()])
        facts = {"model": arguments.model, "files": arguments.files or "held out by its recipe"}
        facts |= {"processes": processes().num_processes, "perplexity": scores}
        folder = Path(arguments.model)
        if out := arguments.out or (folder / "evaluation.json" if folder.is_dir() else None):
            write_json(out, {**facts, **provenance()})
    leave()


def _generate(arguments: argparse.Namespace, _: list[str]) -> None:
    _quiet()
    names = ("max_new_tokens", "temperature", "top_p", "seed")
    options = {name: getattr(arguments, name) for name in names}
    if not 0 <= arguments.temperature < math.inf:
        raise ValueError(f"temperature must be at least 0, got {arguments.temperature:g}")
    if not 0 < arguments.top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {arguments.top_p:g}")
    text = _stream(arguments.model, arguments.prompt, **options)
    _write(arguments.out, {"prompt": arguments.prompt, "text": text, **options})


def _bench(arguments: argparse.Namespace, _: list[str]) -> None:
    names = ("batch", "length", "heads", "size", "dtype", "device", "threads", "impl")
    given = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    from seqmix.bench.suite import SUITES, measure
    from seqmix.bench.tables import figure

    if not given and len(arguments.operations) == 1 and arguments.operations[0] in SUITES:
        options = {name: getattr(arguments, name) for name in ("peers", "seconds", "tune")}
        results = measure(*arguments.operations, **options)
        results["commit"] = arguments.commit or results["commit"]
        if arguments.out and not arguments.tune:
            figure(results, Path(arguments.out).with_suffix(".svg"))
    else:
        results = _bench_table(arguments.operations, given)
    _write(arguments.out, results)
    print(json.dumps(results))


def _bench_table(operations: list[str], given: dict[str, Any]) -> dict[str, Any]:
    import torch

    from seqmix.bench.ops import Shape, measure

    threads, impl = given.pop("threads", None), given.pop("impl", None)
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
    given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    results = measure(operations, Shape(**given), impl)
    _print_table(results["rows"])
    return results


def _doctor(arguments: argparse.Namespace, _: list[str]) -> None:
    from seqmix.doctor import examine

    found = examine()
    for name, value in {"commit": found["commit"], **found["versions"], **found["machine"]}.items():
        print(f"{name:14} {value if value not in (None, []) else '-'}")
    rows, reasons = [], []
    for name, runs in found["implementations"].items():
        row = {impl: "runs" if what == "runs" else "no" for impl, what in runs.items()}
        rows.append({"operation": name, "by default": found["default"][name], **row})
        reasons += [f"{name}, {impl}: {what}" for impl, what in runs.items() if what != "runs"]
    _print_table(rows)
    print(*reasons, sep="\n")
    for name, sizes in found["served"].items():
        print(f"\n{name}, triton on a GPU: head sizes; elsewhere torch runs")
        _print_table(sizes)
    _write(arguments.out, found)


def _stream(
    model: str, prompt: str, *, seed: int = 0, temperature: float = 0.8, **options: Any
) -> str:
    """Print a continuation of `prompt` as it comes, and return it."""
    import torch
    from transformers import TextStreamer

    from seqmix.run import load_model

    network, tokenizer = load_model(model)
    inputs = tokenizer(prompt, return_tensors="pt").to(network.device)
    if not inputs.input_ids.numel():
        raise ValueError(
            "this tokenizer has no BOS, so an empty --prompt gives nothing to start from"
        )
    torch.manual_seed(seed)
    sampling = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_p": options.pop("top_p", 0.95)}
    options.pop("top_p", None)
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)  # type: ignore[arg-type]
    ids = network.generate(**inputs, streamer=streamer, **sampling, **options)
    return tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    first, *others = (name.replace("_", " ") for name in rows[0])
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _write(path: str | None, value: dict[str, Any]) -> None:
    from seqmix.report import write_json

    if path:
        write_json(path, value)


def _quiet() -> None:
    """Leave the screen to our own progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
