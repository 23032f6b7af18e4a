"""A Triton driver without a GPU: kernels are compiled for sm_90 and launches are noted, not made.

For scripts in a process of their own, in which Triton does not interpret.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

LAUNCHED: list[str] = []


class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, metadata):
        return lambda *args: LAUNCHED.append(source.name)

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *args: (object(), None, 32, 0, 1024),
    )


driver.set_active(Driver())
torch.cuda.device = lambda device: nullcontext()
