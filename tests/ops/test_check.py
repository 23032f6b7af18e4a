"""One clear ValueError for every mistake, in one format."""

import re

import pytest
import torch

import seqmix.ops as ops
from tests.ops.cases import CASES, lattice, palimpsa, path


def refuses(message: str):
    return pytest.raises(ValueError, match=re.escape(message))


def test_a_wrong_shape_names_argument_letters_and_sizes():
    function, arguments = palimpsa(B=2, T=16, H=4, V=32, M=32)
    arguments["beta"] = torch.rand(2, 16, 4)
    with refuses("palimpsa: beta must have shape [B=2, T=16, H=4, V=32], got [2, 16, 4]"):
        function(**arguments)


def test_the_first_argument_binds_its_letters():
    function, arguments = path()
    arguments["q"] = arguments["q"][0]
    with refuses("path_attention: q must have shape [B, T, H, K], got [9, 4, 5]"):
        function(**arguments)


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_every_operation_is_checked(name):
    function, arguments = CASES[name]()
    for key, x in arguments.items():
        parts = x if isinstance(x, tuple) else (x,)
        wrong = tuple(part[..., None] for part in parts)
        with pytest.raises(ValueError, match=rf"^{name}: {key}.* must have shape \[.*, got \["):
            function(**arguments | {key: wrong if isinstance(x, tuple) else wrong[0]})
        whole = tuple(part.long() for part in parts)
        with pytest.raises(
            ValueError, match=rf"^{name}: {key}.* must be floating point, got int64"
        ):
            function(**arguments | {key: whole if isinstance(x, tuple) else whole[0]})
        elsewhere = tuple(part.to("meta") for part in parts)
        if key != "q":
            with pytest.raises(ValueError, match=rf"^{name}: {key}.* must be on cpu .*, got meta"):
                function(**arguments | {key: elsewhere if isinstance(x, tuple) else elsewhere[0]})


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (path, {"beta": -1.0}, "path_attention: beta must be at least 0, got -1"),
        (path, {"beta": 2.5}, "path_attention: beta must be at most 2, got 2.5"),
        (path, {"log_forget": 0.5}, "path_attention: log_forget must be at most 0, got 0.5"),
        (palimpsa, {"beta": -0.5}, "palimpsa: beta must be at least 0, got -0.5"),
        (palimpsa, {"log_decay": 0.1}, "palimpsa: log_decay must be at most 0, got 0.1"),
        (palimpsa, {"prior": 0.0}, "palimpsa: prior must be positive, got 0"),
    ],
)
def test_values_outside_their_range_are_refused(case, change, message):
    function, arguments = case()
    arguments |= {key: torch.full_like(arguments[key], value) for key, value in change.items()}
    with refuses(message):
        function(**arguments)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (path, {"scale": float("nan")}, "path_attention: scale must be a finite number or None"),
        (path, {"impl": "cuda"}, "path_attention: impl must be one of 'reference', 'torch'"),
        (palimpsa, {"prior": -1.0}, "palimpsa: prior must be positive, got -1.0"),
        (palimpsa, {"state": torch.ones(1)}, "palimpsa: state must be a pair (content, excess)"),
        (lattice, {"objective": "mse"}, "lattice: objective must be one of 'dec', 'dot', 'enc'"),
        (lattice, {"form": "x"}, "lattice: form must be one of 'gated', 'frozen', got 'x'"),
        (lattice, {"norm": "x"}, "lattice: norm must be one of 'token', 'chunk', got 'x'"),
        (lattice, {"chunk_size": 0}, "lattice: chunk_size must be a positive integer, got 0"),
        (lattice, {"sweeps": 1.5}, "lattice: sweeps must be a positive integer, got 1.5"),
        (lattice, {"sweeps": 2, "form": "frozen"}, "lattice: sweeps > 1 needs form 'gated'"),
        (lattice, {"sweeps": 2, "norm": "chunk"}, "lattice: sweeps > 1 needs form 'gated'"),
        (lattice, {"q": None}, "lattice: q must be a tensor, got NoneType"),
        (lattice, {"q": torch.ones(2, 3, 2, 0)}, "lattice: q must have S of at least 1, got [2, 3"),
    ],
)
def test_options_outside_their_range_are_refused(case, change, message):
    function, arguments = case()
    with refuses(message):
        function(**arguments | change)


def test_query_heads_must_be_a_multiple_of_key_heads():
    function, arguments = path(H=3, G=2)
    with refuses("the heads of q must be a multiple of the heads of k, got H=3 and G=2"):
        function(**arguments)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 5, 3], "cu_seqlens must rise from 0 to at most T=9 without decreasing"),
        ([1, 5], "cu_seqlens must rise from 0"),
        ([0, 10], "cu_seqlens must rise from 0 to at most T=9"),
        ([[0, 9]], "cu_seqlens must have shape [N+1], got [1, 2]"),
        ([0.0, 9.0], "cu_seqlens must be int32 or int64, got float32"),
    ],
)
def test_wrong_offsets_are_refused(name, offsets, message):
    documents = len(offsets) - 1
    function, arguments = CASES[name](B=1)
    if name in ("gated_linear_attention", "palimpsa", "lattice") and documents > 1:
        function, arguments = CASES[name](B=1, N=documents)
    with refuses(f"{name}: {message}"):
        function(**arguments, cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize("name", CASES)
def test_packed_documents_need_a_batch_of_one(name):
    function, arguments = CASES[name](B=2)
    with refuses(f"{name}: with cu_seqlens the batch must be packed into B=1, got B=2"):
        function(**arguments, cu_seqlens=torch.tensor([0, 4, 9]))


def test_unit_length_is_checked_only_under_debug_checks():
    function, arguments = path()
    arguments["w"] = 3 * arguments["w"]
    function(**arguments, impl="reference")
    with ops.debug_checks(), refuses("path_attention: w must have unit length or zero, got"):
        function(**arguments, impl="reference")
    arguments["w"] = 0 * arguments["w"]
    with ops.debug_checks():
        function(**arguments, impl="reference")


def test_debug_checks_ends_with_its_block():
    function, arguments = lattice()
    arguments["state"] = 2 * arguments["state"]
    with ops.debug_checks(), refuses("lattice: state must have unit length, got length 2"):
        function(**arguments, impl="reference")
    function(**arguments, impl="reference")


@pytest.mark.parametrize("name", CASES)
def test_triton_without_kernels_names_the_way_out(name):
    from seqmix.ops.choice import has_kernels

    function, arguments = CASES[name]()
    if has_kernels(name):
        pytest.skip("has kernels")
    with pytest.raises(NotImplementedError, match=f"{name}: .*use impl='torch'"):
        function(**arguments, impl="triton")
