"""One Hugging Face model for all mixers and hybrids.

from seqmix.model import SeqmixConfig, SeqmixForCausalLM

Names load their module when asked for: transformers asks for the configuration at a moment when it
could not yet load the model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqmix.model.cache import CACHE_NAME, SeqmixCache
    from seqmix.model.config import SeqmixConfig
    from seqmix.model.modeling import SeqmixForCausalLM, SeqmixModel

__all__ = ["CACHE_NAME", "SeqmixCache", "SeqmixConfig", "SeqmixForCausalLM", "SeqmixModel"]

_HOMES = {"CACHE_NAME": "cache", "SeqmixCache": "cache", "SeqmixConfig": "config"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'seqmix.model' has no attribute {name!r}")
    return getattr(import_module(f"seqmix.model.{_HOMES.get(name, 'modeling')}"), name)
