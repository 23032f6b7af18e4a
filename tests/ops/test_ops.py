"""Every operation: implementations agree, documents are apart, and PyTorch's machinery works."""

import pytest
import torch

from tests.ops.cases import (
    CASES,
    STATEFUL,
    asking,
    differentiable,
    flat,
    gradients,
    outputs,
)

RULES = {
    "lattice": {"chunk_size": 4},
}


def make(name: str, **sizes):
    function, arguments = CASES[name](**sizes)
    return function, arguments | RULES.get(name, {})


def close(got: list, wanted: list, tolerance: float = 1e-9) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_torch_equals_the_reference_with_every_gradient(name):
    function, arguments = make(name, T=21)
    results = []
    for impl in ("reference", "torch"):
        leaves = differentiable(arguments)
        result = function(**leaves, **asking(name), impl=impl)
        results.append(outputs(result) + gradients(result, leaves))
    close(results[1], results[0])


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_packed_documents_equal_separate_calls_with_every_gradient(name, impl):
    offsets = [0, 0, 7, 7, 8, 20]
    sizes = {"N": len(offsets) - 1} if name in STATEFUL else {}
    function, arguments = make(name, B=1, T=23, **sizes)
    packed = differentiable(arguments)
    whole = function(
        **packed, **asking(name), cu_seqlens=torch.tensor(offsets, dtype=torch.int32), impl=impl
    )
    apart = differentiable(arguments)
    parts = [
        function(**_document(apart, n, a, b), **asking(name), impl=impl)
        for n, (a, b) in enumerate(zip(offsets[:-1], offsets[1:], strict=True))
    ]
    together = _join(name, parts, tail=3)
    close(outputs(whole), together)
    close(gradients(whole, packed), gradients(tuple(together), apart))
    assert not outputs(whole)[0][:, 20:].any()


def _document(arguments: dict, n: int, a: int, b: int) -> dict:
    """The arguments of one packed document."""
    cut = {}
    for key, x in arguments.items():
        if key == "state":
            cut[key] = tuple(s[n : n + 1] for s in x) if isinstance(x, tuple) else x[n : n + 1]
        else:
            cut[key] = x[:, a:b] if isinstance(x, torch.Tensor) and x.ndim > 2 else x
    return cut


def _join(name: str, parts: list, tail: int) -> list:
    """What the separate calls returned, as the packed call returns it."""
    lists = [outputs(part) for part in parts]
    tokens = 2 if name == "path_attention" else 1
    joined = []
    for i, columns in enumerate(zip(*lists, strict=True)):
        if i < tokens:
            columns = (*columns, columns[0].new_zeros(1, tail, *columns[0].shape[2:]))
            joined.append(torch.cat(columns, 1))
        else:
            joined.append(torch.cat(columns, 0))
    return joined


@pytest.mark.parametrize("name", CASES)
def test_a_document_does_not_feel_its_neighbours_bitwise(name):
    sizes = {"N": 2} if name in STATEFUL else {}
    function, arguments = make(name, B=1, T=12, **sizes)
    cu_seqlens = torch.tensor([0, 5, 12])
    before = function(**arguments, cu_seqlens=cu_seqlens, impl="torch").y
    arguments["k"] = arguments["k"].clone()
    arguments["k"][:, 4] += 1
    after = function(**arguments, cu_seqlens=cu_seqlens, impl="torch").y
    assert torch.equal(before[:, 5:], after[:, 5:])
    assert not torch.equal(before[:, :5], after[:, :5])


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}])
@pytest.mark.parametrize("name", CASES)
def test_nothing_in_gives_nothing_out(name, sizes, impl):
    function, arguments = make(name, **sizes)
    leaves = differentiable(arguments)
    result = function(**leaves, **asking(name), impl=impl)
    assert result.y.shape == leaves.get("w", leaves["q"]).shape[:2] + result.y.shape[2:]
    if name in STATEFUL:
        given = leaves["state"] if isinstance(leaves["state"], tuple) else (leaves["state"],)
        for state, before in zip(outputs(result)[1:], given, strict=True):
            assert torch.equal(state, before)
    found = gradients(result, leaves, unused=True)
    for gradient, leaf in zip(found, flat(leaves), strict=True):
        assert gradient.shape == leaf.shape


@pytest.mark.parametrize("name", CASES)
def test_strided_and_expanded_arguments_work(name):
    function, arguments = make(name)
    spread = {
        key: x.transpose(0, 1).contiguous().transpose(0, 1)
        if isinstance(x, torch.Tensor) and x.ndim > 1
        else x
        for key, x in arguments.items()
    }
    close(outputs(function(**spread, impl="torch")), outputs(function(**arguments, impl="torch")))
    arguments["k"] = arguments["k"][:, :1].expand_as(arguments["k"]).clone()
    expanded = arguments | {"k": arguments["k"][:, :1].expand_as(arguments["k"])}
    wanted, got = differentiable(arguments), differentiable(expanded)
    got["k"] = expanded["k"].detach().requires_grad_()
    a, b = (function(**x, impl="torch") for x in (wanted, got))
    close(gradients(b, got), gradients(a, wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_outputs_come_in_the_dtype_of_q_and_states_in_float32(name, dtype):
    function, arguments = make(name, dtype=dtype)
    leaves = differentiable(arguments)
    result = function(**leaves, **asking(name), impl="torch")
    assert result.y.dtype == dtype
    if name in STATEFUL:
        assert all(x.dtype == torch.float32 for x in outputs(result)[1:])
    if name == "path_attention":
        assert result.keys.dtype == dtype
    for gradient, leaf in zip(gradients(result, leaves), flat(leaves), strict=True):
        assert gradient.dtype == leaf.dtype
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_dtypes_may_be_mixed_and_autocast_changes_nothing_inside(name):
    function, arguments = make(name, dtype=torch.float32)
    plain = function(**arguments, impl="torch").y
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = function(**arguments, impl="torch").y
        reference = function(**arguments, impl="reference").y
    if name != "attention":
        assert torch.equal(plain, cast)
        torch.testing.assert_close(reference, plain, rtol=1e-4, atol=1e-4)
    mixed = arguments | {"q": arguments["q"].bfloat16(), "k": arguments["k"].half()}
    assert function(**mixed, impl="torch").y.dtype == torch.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_the_registrations_hold(name):
    from seqmix.ops import attention, lattice, linear, palimpsa, path  # noqa: F401

    function, arguments = make(name, dtype=torch.float32)
    calls = []
    operator = {
        "path_attention": "seqmix::path_attention",
        "attention": "seqmix::path_attention",
        "gated_linear_attention": "seqmix::gated_linear_attention",
        "palimpsa": "seqmix::palimpsa",
        "lattice": "seqmix::lattice",
    }[name]

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name == operator:
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    with Record():
        function(**arguments, impl="torch")
    for func, args in calls:
        args = [
            a.detach().clone().requires_grad_(a.is_floating_point())
            if isinstance(a, torch.Tensor)
            else a
            for a in args
        ]
        torch.library.opcheck(func, args)
    assert calls


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_eager_at_three_lengths(name):
    function, arguments = make(name)
    compiled = torch.compile(
        lambda a: function(**a, **asking(name), impl="torch"), fullgraph=True, backend="aot_eager"
    )
    for length in (5, 12, 17):
        _, arguments = make(name, T=length)
        eager, leaves = differentiable(arguments), differentiable(arguments)
        wanted, got = function(**eager, **asking(name), impl="torch"), compiled(leaves)
        close(outputs(got), outputs(wanted))
        close(gradients(got, leaves), gradients(wanted, eager))


@pytest.mark.parametrize("name", CASES)
def test_activation_checkpointing_changes_nothing(name):
    from torch.utils.checkpoint import checkpoint

    function, arguments = make(name)
    a, b = differentiable(arguments), differentiable(arguments)
    wanted = function(**a, impl="torch")
    got = checkpoint(lambda: function(**b, impl="torch").y, use_reentrant=False)
    close(gradients((got,), b), gradients((wanted.y,), a))


@pytest.mark.parametrize("name", CASES)
def test_several_calls_give_the_same_bits(name):
    function, arguments = make(name, T=30)
    first = None
    for _ in range(5):
        leaves = differentiable(arguments)
        result = function(**leaves, impl="torch")
        bits = [*outputs(result), *gradients(result, leaves)]
        assert first is None or all(map(torch.equal, first, bits))
        first = bits
