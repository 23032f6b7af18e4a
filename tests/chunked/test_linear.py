"""Gated linear attention in chunks against its definition: outputs, states, every gradient."""

import pytest
import torch

from seqmix.chunked import linear
from seqmix.reference.linear import gated_linear_attention
from tests.chunked.errors import LargestTensor, check_budget, definition

SCALE = 0.7
NAMES = "y state dq dk dw dlog_decay dstate"
C = linear.CHUNK
DECAYS = {
    "none": lambda *shape: torch.zeros(shape),
    "slow": lambda *shape: -1e-3 * torch.rand(shape),
    "mean -2.6": lambda *shape: -5.2 * torch.rand(shape),
    "-20": lambda *shape: torch.full(shape, -20.0),
    "-1e4": lambda *shape: torch.full(shape, -1e4),
    "mixed": lambda *shape: -torch.tensor([0, 1e-3, 0.3, 20, 1e4])[torch.randint(5, shape)],
}


def random_inputs(T, *, B=2, H=3, K=5, V=6, decay="slow"):
    """Arguments and cotangents in float64; neither the state nor its cotangent is zero."""
    inputs = [
        torch.randn(B, T, H, K),
        torch.randn(B, T, H, K),
        torch.randn(B, T, H, V),
        DECAYS[decay](B, T, H),
        torch.randn(B, H, V, K),
    ]
    cotangents = [torch.randn(B, T, H, V), torch.randn(B, H, V, K)]
    return [x.double() for x in inputs], [x.double() for x in cotangents]


def defined(inputs, cotangents):
    def run(*inputs):
        *inputs, state = inputs
        return gated_linear_attention(*inputs, scale=SCALE, state=state)

    return definition(run, inputs, cotangents)


def computed(inputs, cotangents):
    return [*linear.forward(*inputs, SCALE), *linear.backward(*cotangents, *inputs, SCALE)]


def assert_same(got, expected, tolerance=1e-12):
    for name, x, y in zip(NAMES.split(), got, expected, strict=True):
        torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("T", [1, 2, C - 1, C, C + 1, 3 * C + 5])
def test_it_is_the_definition(T):
    inputs, cotangents = random_inputs(T, decay="mean -2.6")
    assert_same(computed(inputs, cotangents), defined(inputs, cotangents))


@pytest.mark.parametrize("B, H, K, V", [(1, 1, 1, 1), (3, 2, 8, 3), (1, 5, 3, 12)])
def test_it_is_the_definition_for_other_sizes(B, H, K, V):
    inputs, cotangents = random_inputs(C + 3, B=B, H=H, K=K, V=V)
    assert_same(computed(inputs, cotangents), defined(inputs, cotangents))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_error_is_at_most_twice_the_definitions(dtype):
    inputs, cotangents = random_inputs(3 * C + 5, decay="mean -2.6")
    low = [x.to(dtype) for x in inputs], [x.to(dtype) for x in cotangents]
    exact = defined(*([x.double() for x in group] for group in low))
    check_budget(NAMES, computed(*low), defined(*low), exact)


@pytest.mark.parametrize("decay", DECAYS)
def test_any_decay_is_finite_and_right(decay):
    inputs, cotangents = random_inputs(2 * C + 3, decay=decay)
    low = [x.float() for x in inputs], [x.float() for x in cotangents]
    exact = defined(*([x.double() for x in group] for group in low))
    check_budget(NAMES, computed(*low), defined(*low), exact)


def test_a_decay_of_zero_forgets_everything():
    inputs, cotangents = random_inputs(C + 5)
    expected = [x.clone() for x in inputs]
    inputs[3][:, ::3], expected[3][:, ::3] = -torch.inf, -1e4
    assert_same(computed(inputs, cotangents), computed(expected, cotangents))


@pytest.mark.slow
def test_gradients_stay_exact_over_many_tokens():
    inputs, cotangents = random_inputs(4096, B=1, H=2, K=3, V=6)
    low = [x.float() for x in inputs], [x.float() for x in cotangents]
    exact = defined(*([x.double() for x in group] for group in low))
    check_budget(NAMES, computed(*low), defined(*low), exact)


def test_neutral_tokens_at_the_end_change_nothing():
    T, tail = C + 3, C + 6
    (q, k, w, log_decay, state), (dy, dstate) = random_inputs(T + tail)
    for x in (w, log_decay, dy):
        x[:, T:] = 0
    padded = computed([q, k, w, log_decay, state], [dy, dstate])
    expected = computed([x[:, :T] for x in (q, k, w, log_decay)] + [state], [dy[:, :T], dstate])
    assert_same([x[:, :T] if x.ndim < 5 and x.shape[1] > T else x for x in padded], expected)


def test_results_have_the_dtype_of_their_argument_and_the_state_float32():
    inputs, cotangents = random_inputs(C + 1)
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float64]
    inputs = [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    before = [x.clone() for x in (*inputs, *cotangents)]
    y, state = linear.forward(*inputs, SCALE)
    grads = linear.backward(*cotangents, *inputs, SCALE)
    assert y.dtype == torch.float16 and state.dtype == torch.float32
    assert [x.dtype for x in grads] == dtypes
    assert all(map(torch.equal, (*inputs, *cotangents), before))
    assert all(x.is_contiguous() for x in (y, state, *grads))


def test_memory_is_linear_in_tokens():
    inputs, cotangents = random_inputs(8192, B=1, H=1, K=4, V=4)
    with LargestTensor() as largest:
        computed(inputs, cotangents)
    assert largest.elements <= 4 * 8192
