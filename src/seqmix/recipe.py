"""A training run as data: one dataclass, read from YAML, every field also a command-line option.

    name: tiny                        seqmix train recipes/tiny.yaml --steps 200
    model: {mixers: [path_fox]}           --model.hidden_size 128 --data.files a.txt b.txt
    data: {files: [books/*.txt]}
    steps: 1000

A key that does not exist, or a value of the wrong kind, is a ValueError that names it.
"""

import difflib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml

from seqmix.data import DataOptions, bundled

LEAST = {  # the smallest value of a number
    "sequence_length": 1,
    "batch_size": 1,
    "micro_batch_size": 1,
    "steps": 1,
    "log_every": 1,
    "keep_checkpoints": 1,
    "seed": 0,
    "initial_learning_rate": 0,
    "final_learning_rate": 0,
    "warmup_steps": 0,
    "decay_steps": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "num_workers": 0,
    "evaluate_every": 0,
    "evaluate_rows": 0,
    "save_every": 0,
}


@dataclass
class Recipe:
    """All that decides a trained model, but for the code."""

    name: Annotated[str, "of the run; the default output folder is runs/NAME"] = "run"
    model: Annotated[
        dict[str, Any],
        "arguments of SeqmixConfig; vocab_size and special tokens follow the tokenizer",
    ] = field(default_factory=dict)
    initial_model: Annotated[str | None, "folder or name of a model to continue from"] = None
    data: DataOptions = field(default_factory=DataOptions)

    sequence_length: Annotated[int, "tokens a row"] = 1024
    batch_size: Annotated[int, "rows an optimiser step, over all processes"] = 8
    micro_batch_size: Annotated[int | None, "rows a forward pass on one device; none: all"] = None
    steps: Annotated[int, "optimiser steps"] = 1000
    seed: int = 0

    learning_rate: Annotated[float, "at the peak"] = 1e-3
    initial_learning_rate: Annotated[float, "where the warm-up starts"] = 0.0
    final_learning_rate: Annotated[float, "at the last step"] = 3e-5
    schedule: Annotated[
        Literal["cosine", "wsd", "constant"], "after the warm-up; wsd: stable, then linear decay"
    ] = "cosine"
    warmup_steps: int = 100
    decay_steps: Annotated[int, "of the wsd schedule"] = 0
    weight_decay: Annotated[float, "of matrices; never of norms, biases and gates"] = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0

    precision: Annotated[
        Literal["auto", "fp32", "bf16"], "bf16 is autocast over fp32 weights; auto: bf16 on a GPU"
    ] = "auto"
    gradient_checkpointing: bool = False
    compile: Annotated[bool, "torch.compile the model"] = False
    num_workers: Annotated[int, "data loader processes"] = 0

    log_every: int = 10
    evaluate_every: Annotated[int, "steps between held-out losses; 0: only at the end"] = 0
    evaluate_rows: Annotated[int, "held-out rows read each time"] = 64
    save_every: Annotated[int, "steps between checkpoints; 0: none"] = 0
    keep_checkpoints: int = 2
    report_to: Annotated[list[str], "also log to tensorboard, wandb or trackio"] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"recipe: {name} must be at least {least}, got {value}")
        if not self.learning_rate > 0:
            raise ValueError(f"recipe: learning_rate must be positive, got {self.learning_rate}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"recipe: {name} must be in [0, 1), got {getattr(self, name)}")
        if self.warmup_steps + self.decay_steps > self.steps:
            total = f"{self.warmup_steps} + {self.decay_steps}"
            raise ValueError(
                f"recipe: warmup_steps + decay_steps ({total}) exceed steps, {self.steps}"
            )


def load_recipe(source: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe file, or a bundled recipe by its name, and apply `--key value` overrides."""
    path = Path(source)
    if not path.is_file() and path.suffix == "":
        path = bundled(f"recipes/{source}.yaml")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe: {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"recipe: {path} must hold keys and values, got {type(values).__name__}")
    for key, value in _options(overrides or []):
        _put(values, key, value)
    return build(Recipe, values)


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe that `load_recipe` reads back."""
    path.write_text(yaml.safe_dump(asdict(recipe), sort_keys=False))


def build(cls: type, values: dict[str, Any], prefix: str = "") -> Any:
    """Make the dataclass `cls` from nested dictionaries; every key and kind of value is checked."""
    kinds = get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {prefix + near[0]!r}?" if near else ""
            raise ValueError(f"recipe: unknown key {prefix + key!r}{hint}")
    return cls(**{key: _coerce(value, kinds[key], prefix + key) for key, value in values.items()})


def describe(cls: type = Recipe, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (key, default, meaning) of every field, for a help text."""
    hints = get_type_hints(cls, include_extras=True)
    default = cls()
    for f in fields(cls):
        value, hint = getattr(default, f.name), hints[f.name]
        if is_dataclass(value):
            yield from describe(type(value), f"{prefix}{f.name}.")
            continue
        meaning = hint.__metadata__[0] if get_origin(hint) is Annotated else ""
        kind = get_args(hint)[0] if meaning else hint
        if get_origin(kind) is Literal:
            meaning = " | ".join(get_args(kind)) + (f": {meaning}" if meaning else "")
        yield prefix + f.name, "none" if value in (None, [], {}) else str(value), meaning


def _options(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of `--key value`, `--key=value`, `--key a b` (list), `--key` (true)."""
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("--"):
            raise ValueError(f"recipe: expected --key value, got {word!r}")
        key, equals, text = word[2:].partition("=")
        position += 1
        texts = [text] if equals else []
        while not equals and position < len(words) and not words[position].startswith("--"):
            texts.append(words[position])
            position += 1
        try:
            values = [yaml.safe_load(text) for text in texts]
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"recipe: the value of --{key} is not YAML: {reason}") from error
        yield key, True if not values else values[0] if len(values) == 1 else values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ValueError(f"recipe: {parent!r} in {key!r} has no keys of its own")
    values[last] = value


def _coerce(value: Any, kind: Any, key: str) -> Any:
    origin, options = get_origin(kind), get_args(kind)
    if origin is UnionType:
        if value is None:
            return None
        return _coerce(value, next(k for k in options if k is not NoneType), key)
    if is_dataclass(kind) and isinstance(value, dict):
        return build(kind, value, f"{key}.")  # type: ignore[arg-type]
    if origin is Literal and value in options:
        return value
    if origin is list:
        return [
            _coerce(v, options[0], key) for v in (value if isinstance(value, list) else [value])
        ]
    if origin is dict and isinstance(value, dict):
        return {name: _number(item) for name, item in value.items()}
    number = _number(value)
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if is_number and math.isfinite(number) and (kind is float or kind is int and number % 1 == 0):
        return kind(number)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, (str, int, float)):
        return str(value)
    wanted = " | ".join(map(str, options)) if origin is Literal else getattr(kind, "__name__", kind)
    raise ValueError(f"recipe: {key} must be {wanted}, got {value!r}")


def _number(value: Any) -> Any:
    """Read "1e-3" as the number it means: YAML wants "1.0e-3"."""
    if isinstance(value, dict):
        return {name: _number(item) for name, item in value.items()}
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
