"""The mixers by name: which class, with which options fixed. A new mixer is one row here."""

from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from torch import nn

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

SIZES = ("hidden_size", "num_heads", "num_kv_heads", "head_dim")  # what a model sets for all layers


def mixer_class(name: str) -> type[nn.Module]:
    """The class of a mixer. Raises ValueError naming the known ones."""
    if name not in MIXERS:
        raise ValueError(f"mixers: unknown mixer {name!r}; known are {', '.join(MIXERS)}")
    module, cls, _ = MIXERS[name]
    return getattr(import_module(module), cls)


def mixer_options(name: str) -> dict[str, Any]:
    """The options a user may set on a mixer, with their defaults."""
    fixed = MIXERS[name][2] if name in MIXERS else {}
    parameters = signature(mixer_class(name)).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.kind is Parameter.KEYWORD_ONLY and p.name not in fixed
    }


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an option that the mixer does not have."""
    known = mixer_options(name)
    for option in options:
        if option not in known:
            raise ValueError(f"mixers: {name} has no option {option!r}; it has {', '.join(known)}")


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
