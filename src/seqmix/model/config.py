"""The configuration of the one Hugging Face model: sizes, and which mixer each block has.

SeqmixConfig(mixers=["path", "path", "attention"], num_hidden_layers=6, hidden_size=256)

A hybrid is a list of mixer names, tiled over the layers and saved expanded.
"""

import math
from dataclasses import fields
from importlib import import_module
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from seqmix.layers.mixers import check_options, mixer_class

# Keys that the library itself may pass or save beside the fields; everything else is a mistake.
LIBRARY_KEYS = {
    "model_type",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "torch_dtype",
    "num_labels",
    "auto_map",
    "attn_implementation",
    "experts_implementation",
    "output_attentions",
    "quantization_config",
    "transformers_weights",
    "per_layer_config",
}


class SeqmixConfig(PreTrainedConfig):
    """Sizes, mixers and tokens of a model.

    mixers: one name a layer, tiled over `num_hidden_layers` ("path", "lattice", ...).
    mixer_options: {"lattice": {"chunk_size": 16}}, named as the operation's arguments are. A key
        may also be the number of a layer, {"3": {...}}; these go before those of its mixer.
    num_kv_heads, head_dim: for mixers that know them; None: num_heads, hidden_size / num_heads.
    intermediate_size: width of the SwiGLU behind each mixer; None: 8/3 hidden_size rounded up to a
        multiple of 64; 0: none. `palimpsa_m` never has one, as published: it is a whole block.
    initializer_range: standard deviation of embeddings and linear maps at the start.
    """

    model_type = "seqmix"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads"}

    mixers: list[str] | tuple[str, ...] = ("path_fox",)
    mixer_options: dict[str, dict[str, Any]] | None = None
    vocab_size: int = 32_000
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        _refuse_unknown(kwargs)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads"):
            _positive(name, getattr(self, name))
        for name in ("num_kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name), "None or a positive integer")
        for name in ("norm_eps", "initializer_range"):
            _not_negative(name, getattr(self, name))
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // (3 * 64)) * 64
        elif self.intermediate_size != 0:
            _positive("intermediate_size", self.intermediate_size, "None, 0 or a positive integer")
        self.mixers = _tile(self.mixers, self.num_hidden_layers)
        if not isinstance(self.mixer_options, dict | None):
            raise ValueError(
                f"SeqmixConfig: mixer_options must be a dict or None, got {self.mixer_options!r}"
            )
        self.mixer_options = {str(key): x for key, x in (self.mixer_options or {}).items()}
        self._check_mixer_options()
        super().__post_init__(**kwargs)
        import_module("seqmix.model.modeling")  # now the Auto classes know the models

    def layer_options(self, layer: int) -> dict[str, Any]:
        """The options of one layer's mixer."""
        assert self.mixer_options is not None
        of_mixer = self.mixer_options.get(self.mixers[layer], {})
        return of_mixer | self.mixer_options.get(str(layer), {})

    def _check_mixer_options(self) -> None:
        assert self.mixer_options is not None
        for key, options in self.mixer_options.items():
            if not isinstance(options, dict):
                raise ValueError(
                    f"SeqmixConfig: mixer_options of {key!r} must be a dict, got {options!r}"
                )
            if not key.isdecimal():
                check_options(key, options)
            elif int(key) < self.num_hidden_layers:
                check_options(self.mixers[int(key)], options)
            else:
                raise ValueError(
                    f"SeqmixConfig: mixer_options names layer {key}, "
                    f"but there are {self.num_hidden_layers} layers, counted from 0"
                )


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    unknown = sorted(kwargs.keys() - LIBRARY_KEYS)
    if unknown:
        known = [f.name for f in fields(SeqmixConfig)]
        own = known[known.index("mixers") :]
        raise ValueError(f"SeqmixConfig: unknown key {unknown[0]!r}; allowed are {', '.join(own)}")


def _positive(name: str, value: object, wanted: str = "a positive integer") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"SeqmixConfig: {name} must be {wanted}, got {value!r}")


def _not_negative(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"SeqmixConfig: {name} must be a number >= 0, got {value!r}")


def _tile(mixers: list[str] | tuple[str, ...] | str, layers: int) -> list[str]:
    if not isinstance(mixers, list | tuple | str):
        raise ValueError(f"SeqmixConfig: mixers must be a list of names, got {mixers!r}")
    names = [mixers] if isinstance(mixers, str) else list(mixers)
    if not names:
        raise ValueError("SeqmixConfig: mixers must name at least one mixer")
    for name in names:
        mixer_class(name)
    return [names[i % len(names)] for i in range(layers)]


AutoConfig.register("seqmix", SeqmixConfig, exist_ok=True)
