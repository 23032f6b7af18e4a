"""seqmix: sequence mixers whose memory depends on content.

seqmix.ops     functions on tensors            seqmix.layers   the same as nn.Modules
seqmix.model   one Hugging Face model for all mixers, known to AutoConfig, AutoModel and
               AutoModelForCausalLM as soon as `seqmix` is imported

Importing this package loads nothing, not even torch: whoever needs one operation should not wait
for transformers. So AutoConfig learns of the configuration when both are there: at once if it is
loaded already, and otherwise right behind it, by an import hook on its module. The first
configuration made then registers the models, before any Auto class can ask for them.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqmix.ops.check import debug_checks

__all__ = ["debug_checks"]

AUTO_CONFIG, OURS = "transformers.models.auto.configuration_auto", "seqmix.model.config"


class _AfterAutoConfig(MetaPathFinder):
    """Imports our configuration, which registers itself, right after the module of AutoConfig."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == AUTO_CONFIG else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                import_module(OURS)

            spec.loader.exec_module = run_and_register
        return spec


if AUTO_CONFIG in sys.modules:
    import_module(OURS)
else:
    sys.meta_path.insert(0, _AfterAutoConfig())


def __getattr__(name: str) -> Any:
    if name == "debug_checks":
        return import_module("seqmix.ops.check").debug_checks
    raise AttributeError(f"module 'seqmix' has no attribute {name!r}")
