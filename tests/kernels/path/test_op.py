"""path_attention on its kernels: sizes, opcheck, poisoned memory, autocast, compiled calls."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize

from seqmix.ops import path, path_attention
from tests.kernels.path.cases import DEVICE, NAMES, arguments, definition, error
from tests.kernels.path.test_kernels import LIMIT


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that nobody has written holds NaN, or the largest integer."""

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)

    def poisoning(make):
        return lambda *args, **options: poison(make(*args, **options))

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


def call(tokens, dy, impl="triton", **options):
    leaves = [None if x is None else x.detach().requires_grad_() for x in tokens]
    y = path_attention(*leaves, impl=impl, **options).y
    found = iter(torch.autograd.grad(y, [x for x in leaves if x is not None], dy))
    return y.detach(), [None if x is None else next(found) for x in leaves]


def assert_definition(tokens, offsets=None, limit=1e-5):
    q, v = tokens[0], tokens[2]
    dy = torch.randn(*q.shape[:3], v.shape[3], device=DEVICE).to(q.dtype)
    options = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets, device=DEVICE)}
    y, gradients = call(tokens, dy, **options)
    want_y, want = definition(tokens, dy, q.shape[3] ** -0.5, offsets)
    assert y.dtype == q.dtype and error(y, want_y) < limit
    for name, x, a, b in zip(NAMES, tokens, gradients, want, strict=True):
        if x is not None:
            assert a.dtype == x.dtype and error(a, b, floor=0.1) < limit, name
    return y, gradients


@pytest.mark.parametrize(
    ("K", "V"), [(3, 5), (16, 48), (48, 20), (80, 33), (96, 96), (12, 100), (200, 130)]
)
@pytest.mark.parametrize("gate", [False, True])
def test_any_size(K, V, gate):
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    assert_definition(arguments(1, 70, 2, 1, K, V, dtype, gate=gate), limit=LIMIT[dtype])


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 197])
def test_nothing_unwritten_is_read(poisoned, T):
    assert_definition(arguments(2, T, 2, 1, 20, 12))


def test_nothing_unwritten_is_read_around_documents(poisoned):
    y, gradients = assert_definition(
        arguments(1, 300, 2, 1, 16, 16), [0, 0, 1, 65, 65, 65, 129, 280, 280]
    )
    assert not any(x[:, 280:].any() for x in (y, *gradients))


@pytest.mark.parametrize("offsets", [None, [0, 0, 70, 70]])
def test_no_tokens_no_batch_no_documents(offsets):
    tokens = [x[:, :0] for x in arguments(1, 1, 2, 1, 16, 12)]
    y, gradients = call(tokens, torch.zeros(1, 0, 2, 12, device=DEVICE))
    assert y.shape == (1, 0, 2, 12) and all(map(torch.equal, gradients, tokens))
    tokens = [x[:0] for x in arguments(1, 5, 2, 1, 16, 12)]
    y, gradients = call(tokens, torch.zeros(0, 5, 2, 12, device=DEVICE))
    assert y.shape == (0, 5, 2, 12) and all(map(torch.equal, gradients, tokens))
    if offsets:
        assert_definition(arguments(1, 75, 2, 1, 16, 12), offsets)


def test_inputs_need_not_be_contiguous():
    q, k, v, w, beta, gate = arguments(2, 70, 2, 1, 16, 12)
    q, beta = q.transpose(1, 2).contiguous().transpose(1, 2), beta[:, :1].expand(-1, 70, -1)
    v = v[..., :1].expand(-1, -1, -1, 12)
    assert_definition([q, k, v, normalize(w, dim=-1), beta, gate])


@pytest.mark.parametrize("gate", [False, True])
def test_operations_are_sound(gate):
    tokens = arguments(1, 5, 2, 1, 16, 12, gate=gate)
    leaves = [None if x is None else x.requires_grad_() for x in tokens]
    torch.library.opcheck(path.attend, (*leaves, 0.3, None, False, "triton"))
    with torch.no_grad():
        y, _, lse = path.attend(*tokens, 0.3, None, False, "triton")
        tests = ("test_schema", "test_faketensor")
        arguments_ = (torch.randn_like(y), None, *tokens, y, lse, 0.3, None, "triton")
        torch.library.opcheck(path.attend_backward, arguments_, test_utils=tests)


def test_autocast_leaves_the_operation_alone():
    tokens = arguments(1, 70, 2, 1, 16, 12)
    dy = torch.randn(1, 70, 2, 12, device=DEVICE)
    wanted = call(tokens, dy)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = call(tokens, dy)
    assert torch.equal(got[0], wanted[0])
    assert all(map(torch.equal, got[1], wanted[1]))


def test_one_graph_serves_three_lengths():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(path_attention, fullgraph=True, backend=counter)
    for T in (33, 65, 70):
        tokens = [x.requires_grad_() for x in arguments(1, T, 1, 1, 16, 16)]
        got, wanted = (f(*tokens, impl="triton").y for f in (function, path_attention))
        torch.testing.assert_close(got, wanted)
        pairs = zip(*(torch.autograd.grad(y.sum(), tokens) for y in (got, wanted)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 2  # once for a number, once for any


def test_the_page_names_the_sizes_that_are_served():
    page = (Path(__file__).parents[3] / "docs" / "mixers" / "path.md").read_text()
    for row in path.served():
        assert f"| {' | '.join(row.values())} |" in page


def test_sizes_that_are_not_served_name_the_way_out(monkeypatch):
    monkeypatch.setitem(path.SERVED, torch.float16, path.Sizes((33, 64), (33, 48)))
    monkeypatch.setattr(path, "_has_kernels", lambda *_: False)
    tokens = arguments(1, 5, 1, 1, 16, 12, torch.float16)
    message = (
        r"path_attention: .* 33 to 64 \(33 to 48 with gradients\) in float16, .*, got 16 and 12 in "
    )
    with pytest.raises(NotImplementedError, match=message + "float16; use impl='torch'"):
        path_attention(*tokens, impl="triton")
    assert path_attention(*tokens).y.isfinite().all()
