"""seqmix: sequence mixers whose memory depends on content.

seqmix.ops     functions on tensors            seqmix.layers   the same as nn.Modules
seqmix.model   one Hugging Face model for all mixers, known to AutoConfig, AutoModel and
               AutoModelForCausalLM as soon as `seqmix` is imported

Importing this package loads nothing, not even torch: whoever needs one operation should not wait
for transformers. So the model is registered when both sides are there: at once if transformers'
Auto classes are loaded, and otherwise right behind them, by an import hook on their two modules.
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

# The Auto classes of transformers, and which of our modules registers itself with them.
REGISTERS = {
    "transformers.models.auto.configuration_auto": "seqmix.model.config",
    "transformers.models.auto.modeling_auto": "seqmix.model.modeling",
}


class _AfterAutoClasses(MetaPathFinder):
    """Imports the module of ours that belongs to an Auto module right after that one has run."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in REGISTERS else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                import_module(REGISTERS[fullname])

            spec.loader.exec_module = run_and_register
        return spec


sys.meta_path.insert(0, _AfterAutoClasses())
for auto, ours in REGISTERS.items():
    if auto in sys.modules:
        import_module(ours)


def __getattr__(name: str) -> Any:
    if name == "debug_checks":
        return import_module("seqmix.ops.check").debug_checks
    raise AttributeError(f"module 'seqmix' has no attribute {name!r}")
