"""The benchmark of decoding runs kernels: see tests/kernels/conftest.py."""

from tests.kernels import conftest  # noqa: F401
