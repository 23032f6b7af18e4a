"""Palimpsa in chunks against its definition: outputs, states and every gradient."""

import pytest
import torch

from seqmix.chunked import palimpsa
from seqmix.reference import palimpsa as reference
from tests.chunked.errors import LargestTensor, check_budget, definition

SCALE = 0.7
NAMES = "y content excess dq dk dw dbeta dlog_decay dprior dcontent dexcess"
C = palimpsa.CHUNK
DECAYS = {
    "none": lambda *shape: torch.zeros(shape),
    "slow": lambda *shape: -1e-3 * torch.rand(shape),
    "mean -2.6": lambda *shape: -5.2 * torch.rand(shape),
    "-20": lambda *shape: torch.full(shape, -20.0),
    "-1e4": lambda *shape: torch.full(shape, -1e4),
    "mixed": lambda *shape: -torch.tensor([0, 1e-3, 0.3, 20, 1e4])[torch.randint(5, shape)],
}


def random_inputs(T, *, B=2, H=3, K=5, V=6, M=6, decay="slow"):
    """Arguments and cotangents in float64; neither states nor their cotangents are zero."""
    inputs = [
        torch.randn(B, T, H, K),
        torch.randn(B, T, H, K),
        torch.randn(B, T, H, V),
        torch.rand(B, T, H, M),
        DECAYS[decay](B, T, H),
        0.5 + torch.rand(H),
        torch.randn(B, H, V, K),
        torch.rand(B, H, M, K),
    ]
    cotangents = [torch.randn(B, T, H, V), torch.randn(B, H, V, K), torch.randn(B, H, M, K)]
    return [x.double() for x in inputs], [x.double() for x in cotangents]


def defined(inputs, cotangents):
    def run(*inputs):
        *inputs, content, excess = inputs
        return reference.palimpsa(*inputs, scale=SCALE, content=content, excess=excess)

    return definition(run, inputs, cotangents)


def computed(inputs, cotangents):
    outputs = palimpsa.forward(*inputs, SCALE)
    return [*outputs, *palimpsa.backward(*cotangents, *inputs, SCALE)]


def assert_same(got, expected, tolerance=1e-12):
    for name, x, y in zip(NAMES.split(), got, expected, strict=True):
        torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("M", [1, 2, 6])
@pytest.mark.parametrize("T", [1, 2, C - 1, C, C + 1, 3 * C + 5, 65])
def test_it_is_the_definition(T, M):
    inputs, cotangents = random_inputs(T, M=M, decay="mean -2.6")
    assert_same(computed(inputs, cotangents), defined(inputs, cotangents))


@pytest.mark.parametrize("B, H, K, V, M", [(1, 1, 1, 1, 1), (3, 2, 8, 3, 3), (1, 5, 3, 12, 4)])
def test_it_is_the_definition_for_other_sizes(B, H, K, V, M):
    inputs, cotangents = random_inputs(C + 3, B=B, H=H, K=K, V=V, M=M)
    assert_same(computed(inputs, cotangents), defined(inputs, cotangents))


@pytest.mark.parametrize("M", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_error_is_at_most_twice_the_definitions(dtype, M):
    inputs, cotangents = random_inputs(3 * C + 5, B=4, M=M, decay="mean -2.6")
    low = [x.to(dtype) for x in inputs], [x.to(dtype) for x in cotangents]
    exact = defined(*([x.double() for x in group] for group in low))
    check_budget(NAMES, computed(*low), defined(*low), exact)


@pytest.mark.parametrize("M", [1, 2, 6])
@pytest.mark.parametrize("decay", DECAYS)
def test_any_decay_is_finite_and_right(decay, M):
    inputs, cotangents = random_inputs(2 * C + 3, B=4, M=M, decay=decay)
    low = [x.float() for x in inputs], [x.float() for x in cotangents]
    exact = defined(*([x.double() for x in group] for group in low))
    check_budget(NAMES, computed(*low), defined(*low), exact)


@pytest.mark.parametrize("M", [1, 6])
def test_a_decay_of_zero_forgets_everything(M):
    inputs, cotangents = random_inputs(C + 5, M=M)
    expected = [x.clone() for x in inputs]
    inputs[4][:, ::3], expected[4][:, ::3] = -torch.inf, -1e4
    assert_same(computed(inputs, cotangents), computed(expected, cotangents))


@pytest.mark.slow
@pytest.mark.parametrize("M", [1, 6])
def test_gradients_stay_exact_over_many_tokens(M):
    inputs, cotangents = random_inputs(4096, B=2, H=4, K=3, V=6, M=M)
    low = [x.float() for x in inputs], [x.float() for x in cotangents]
    exact = defined(*([x.double() for x in group] for group in low))
    check_budget(NAMES, computed(*low), defined(*low), exact)


@pytest.mark.parametrize("M", [1, 2, 6])
def test_neutral_tokens_at_the_end_change_nothing(M):
    T, tail = 2 * C + 3, C + 6
    (q, k, w, beta, log_decay, *rest), (dy, *dends) = random_inputs(T + tail, M=M)
    for x in (w, beta, log_decay, dy):
        x[:, T:] = 0
    padded = computed([q, k, w, beta, log_decay, *rest], [dy, *dends])
    expected = computed([x[:, :T] for x in (q, k, w, beta, log_decay)] + rest, [dy[:, :T], *dends])
    per_token = [0, *range(3, 8)]
    assert_same([x[:, :T] if i in per_token else x for i, x in enumerate(padded)], expected)


@pytest.mark.parametrize("M", [1, 6])
def test_two_calls_equal_one(M):
    (*tokens, prior, content, excess), _ = random_inputs(3 * C + 5, M=M)
    y, *last = palimpsa.forward(*tokens, prior, content, excess, SCALE)
    for cut in (1, C, 2 * C + 3):
        pieces, states = [], (content, excess)
        for piece in (slice(None, cut), slice(cut, None)):
            out, *states = palimpsa.forward(*(x[:, piece] for x in tokens), prior, *states, SCALE)
            pieces.append(out)
        torch.testing.assert_close(torch.cat(pieces, 1), y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(states, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("M", [1, 2, 6])
def test_heads_may_be_cut_into_any_tiles(M, monkeypatch):
    inputs, cotangents = random_inputs(C + 5, B=3, M=M)
    expected = computed(inputs, cotangents)
    for rows in (1, 2, 4):
        monkeypatch.setattr(palimpsa, "TILE", rows * C * 30)
        assert_same(computed(inputs, cotangents), expected)


@pytest.mark.parametrize("M", [1, 6])
def test_results_have_the_dtype_of_their_argument_and_states_float32(M):
    inputs, cotangents = random_inputs(C + 1, M=M)
    dtypes = [torch.bfloat16] * 3 + [torch.float16, torch.float32, torch.float32]
    dtypes += [torch.float32, torch.float64]
    inputs = [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    before = [x.clone() for x in (*inputs, *cotangents)]
    y, *states = palimpsa.forward(*inputs, SCALE)
    grads = palimpsa.backward(*cotangents, *inputs, SCALE)
    assert y.dtype == torch.bfloat16 and [x.dtype for x in states] == [torch.float32] * 2
    assert [x.dtype for x in grads] == dtypes
    assert all(map(torch.equal, (*inputs, *cotangents), before))
    assert all(x.is_contiguous() for x in (y, *states, *grads))


@pytest.mark.parametrize("M", [1, 6])
def test_expanded_arguments_work(M):
    inputs, cotangents = random_inputs(C + 1, M=M)
    inputs[0] = inputs[0][:, :, :1].expand_as(inputs[0])
    inputs[1] = inputs[1].transpose(1, 3).contiguous().transpose(1, 3)
    contiguous = [x.contiguous() for x in inputs]
    assert_same(computed(inputs, cotangents), computed(contiguous, cotangents), 0)


@pytest.mark.parametrize("M", [1, 4])
def test_memory_is_linear_in_tokens(M):
    inputs, cotangents = random_inputs(4096, B=1, H=1, K=4, V=4, M=M)
    with LargestTensor() as largest:
        computed(inputs, cotangents)
    assert largest.elements <= 16 * 4096


def test_no_tensor_holds_the_states_of_more_heads_than_a_tile():
    inputs, cotangents = random_inputs(C, B=8, H=8, K=24, V=16, M=16)
    with LargestTensor() as largest:
        computed(inputs, cotangents)
    assert largest.elements <= palimpsa.TILE * (C + 1) / C
