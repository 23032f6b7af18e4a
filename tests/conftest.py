"""Shape annotations are checked at every call, in tests only (operations check themselves).

Without a GPU, Triton kernels run in Triton's interpreter, which must be known before anything
imports Triton.
"""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from jaxtyping import install_import_hook

hook = install_import_hook(["seqmix.reference", "seqmix.chunked"], "beartype.beartype")

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test starts from the same seed, and leaves no compiled code behind."""
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
