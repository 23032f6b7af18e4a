"""The mixers by name: which class, with which options fixed. A new mixer is one row here."""

import math
from importlib import import_module
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, get_args

from torch import nn

from seqmix.ops.choice import IMPLEMENTATIONS

MIXERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: (module, class, options that make it this mixer)
    "path": ("seqmix.layers.path", "PathAttention", {"forget_gate": False}),
    "path_fox": ("seqmix.layers.path", "PathAttention", {"forget_gate": True}),
    "palimpsa_d": ("seqmix.layers.palimpsa", "PalimpsaD", {}),
    "palimpsa_m": ("seqmix.layers.palimpsa", "PalimpsaM", {}),
    "lattice": ("seqmix.layers.lattice", "Lattice", {}),
    "attention": ("seqmix.layers.attention", "Attention", {"forget_gate": False}),
    "fox": ("seqmix.layers.attention", "Attention", {"forget_gate": True, "position": "nope"}),
}

KINDS: dict[Any, str] = {
    int: "a positive integer",
    float: "a finite number",
    bool: "true or false",
    str: "a name",
    tuple[float, float]: "two finite numbers",
    NoneType: "None",
}
SIZES = ("hidden_size", "num_heads", "num_kv_heads", "head_dim")  # what a model sets for all layers


def mixer_class(name: str) -> type[nn.Module]:
    """The class of a mixer. Raises ValueError naming the known ones."""
    if name not in MIXERS:
        raise ValueError(f"mixers: unknown mixer {name!r}; known are {', '.join(MIXERS)}")
    module, cls, _ = MIXERS[name]
    return getattr(import_module(module), cls)


def mixer_options(name: str) -> dict[str, Any]:
    """The options a user may set on a mixer, with their defaults."""
    return {p.name: p.default for p in _parameters(name)}


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an option that the mixer does not have, or a value of a wrong kind."""
    known = {p.name: p.annotation for p in _parameters(name)}
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"mixers: {name} has no option {option!r}; it has {', '.join(known)}")
        if option == "impl" and value not in (None, *IMPLEMENTATIONS):
            choices = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"mixers: impl of {name} must be one of {choices}, got {value!r}")
        kind = known[option]
        kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        if not any(_is_a(kind, value) for kind in kinds):
            wanted = " or ".join(KINDS[kind] for kind in kinds)
            raise ValueError(f"mixers: {option} of {name} must be {wanted}, got {value!r}")


def _parameters(name: str) -> list[Parameter]:
    """The keyword arguments of a mixer's class that its name leaves open."""
    parameters = signature(mixer_class(name)).parameters.values()
    fixed = MIXERS[name][2]
    return [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY and p.name not in fixed]


def _is_a(kind: Any, value: Any) -> bool:
    """Whether an option annotated as `kind` may have this value; a count is never below 1."""
    if kind == tuple[float, float]:
        return isinstance(value, tuple | list) and [_is_a(float, x) for x in value] == [True, True]
    if kind not in (int, float):
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if kind is float else isinstance(value, int) and value > 0


def build_mixer(
    name: str,
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    **options: Any,
) -> nn.Module:
    """A mixer of the given sizes. Sizes that its class does not know are left out."""
    check_options(name, options)
    cls, fixed = mixer_class(name), MIXERS[name][2]
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    known = mixer_options(name)
    sizes = {k: v for k, v in sizes.items() if k in known and k not in options and v is not None}
    return cls(hidden_size, num_heads, **sizes, **options, **fixed)
