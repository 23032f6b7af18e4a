"""PaTH layers that decode on kernels do what they do on chunked PyTorch."""

from dataclasses import fields

import pytest
import torch

from seqmix.layers import path
from seqmix.layers.path import PathAttention
from seqmix.ops import path_cache
from tests.layers.test_path import run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def pair(**options):
    """One layer twice: on kernels, and on chunked PyTorch."""
    options = {"num_kv_heads": 2, "head_dim": 6, "forget_gate": True} | options
    made = [PathAttention(24, 4, impl=impl, **options).to(DEVICE) for impl in ("triton", "torch")]
    for parameter in made[0].parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    made[1].load_state_dict(made[0].state_dict())
    return made


def random_tokens(*shape):
    return torch.randn(*shape, 24, device=DEVICE)


def assert_same(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def assert_same_state(got, wanted):
    for field in fields(wanted):
        a, b = getattr(got, field.name), getattr(wanted, field.name)
        if field.name == "corner" and b is not None:
            a, b = (x[..., : x.shape[1]].transpose(1, 2).tril(-1) for x in (a, b))
        if b is not None:
            assert_same(a, b)


@pytest.mark.parametrize("sizes", [[70, *[1] * 8, 3, 1, 1], [1] * 6, [0, 1, 2, 62, 1, 1, 130, 1]])
@pytest.mark.parametrize("gate", [True, False])
def test_pieces_equal_the_whole(sizes, gate):
    on_kernels, plain = pair(forget_gate=gate)
    x = random_tokens(2, sum(sizes))
    got, state = run(on_kernels, x.split(sizes, 1))
    wanted, last = run(plain, x.split(sizes, 1))
    assert_same(got, wanted)
    assert_same(got, plain(x)[0])
    assert_same_state(state, last)
    assert state.moves.shape == state.w.shape  # the last token took a step of its own


def test_many_tokens_behind_a_cache_come_in_large_pieces(monkeypatch):
    monkeypatch.setattr(path, "PREFILL", 100)
    on_kernels, plain = pair()
    x = random_tokens(2, 300)
    got, state = run(on_kernels, x.split([30, 260, 10], 1))
    wanted, _ = run(plain, x.split([30, 260, 10], 1))
    assert_same(got, wanted)
    assert_same(on_kernels(x[:, :1], state)[0], plain(x[:, :1], state)[0])


def test_ragged_rows_go_on_like_single_sequences():
    on_kernels, plain = pair(window=5)
    cuts = [0, 2, 2, 11], [0, 1, 8, 9], [0, 0, 1, 2], [0, 1, 1, 2]
    states = [None, None]
    for offsets in cuts:
        x, cu_seqlens = random_tokens(1, offsets[-1] + 1), torch.tensor(offsets, device=DEVICE)
        got, states[0] = on_kernels(x, states[0], cu_seqlens)
        wanted, states[1] = plain(x, states[1], cu_seqlens)
        assert_same(got, wanted)


def test_a_crop_keeps_the_solution():
    on_kernels, plain = pair()
    x = random_tokens(1, 20)
    _, state = run(on_kernels, x.split([3, *[1] * 17], 1))
    cut = state.crop(12)
    assert cut.moves.shape[1] == cut.k.shape[1] == 12
    assert_same(run(on_kernels, x[:, 12:].split(1, 1), cut)[0], plain(x)[0][:, 12:])


def test_with_gradients_the_cache_is_read_by_chunked_pytorch():
    on_kernels, plain = pair()
    x = random_tokens(1, 6)
    with torch.enable_grad():
        found = []
        for mix in (on_kernels, plain):
            y, state = run(mix, x.split([4, 1, 1], 1))
            assert state.moves is None
            found.append(torch.autograd.grad(y[:, 4:].sum(), list(mix.parameters())))
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


def test_decoding_is_one_graph():
    on_kernels, _ = pair(forget_gate=False)
    x = random_tokens(1, 6)
    _, state = on_kernels(x[:, :4])
    whole = torch.compile(on_kernels, fullgraph=True, backend="aot_eager", dynamic=True)
    for t in (4, 5):
        got, compiled = whole(x[:, t : t + 1], state)
        wanted, state = on_kernels(x[:, t : t + 1], state)
        assert_same(got, wanted)
        assert_same_state(compiled, state)


def test_operations_of_the_cache_are_sound():
    N, P, F, G, H, K = 2, 3, 5, 1, 2, 16

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE)

    k, v, w = (normal(N, P, G, K) for _ in range(3))
    beta, gate = torch.rand(N, P, G, device=DEVICE), -torch.rand(N, P, H, device=DEVICE)
    count = torch.tensor([P, P - 1], device=DEVICE)
    cache = normal(N, F, G, K), normal(N, F, G, K), -torch.rand(N, F, H, device=DEVICE)
    length = torch.tensor([5, 0], device=DEVICE)
    q, conv = normal(N, 1, H, K), normal(N, P + 2, G, K)
    tests = {"raise_exception": True, "test_utils": ("test_schema", "test_faketensor")}
    arguments = (q, count - 1, k, v, w, beta, gate, *cache, length, 0.3)
    torch.library.opcheck(path_cache._decode, arguments, **tests)
    _, *solution = path_cache._decode(*arguments)
    new = [normal(N, 1, G, K) for _ in range(4)] + [beta[:, :1], gate[:, :1]]
    old = [k, v, w, conv, beta, gate, *solution]
    torch.library.opcheck(path_cache._step, (q, new, count, old, *cache, length, 0.3), **tests)
    torch.library.opcheck(path_cache._fold, (cache[0], k, w, beta), **tests)
    arguments = (q, normal(N, 1, H), q, gate[:, :1], *cache, length)
    torch.library.opcheck(path_cache._read_on, arguments, **tests)
