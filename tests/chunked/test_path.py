"""PaTH attention in blocks against its definition: outputs, keys, every gradient."""

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from seqmix.chunked import path
from seqmix.chunked.path_blocks import BLOCK, SOLVE
from seqmix.reference.attention import attention
from seqmix.reference.path import path_attention
from tests.chunked.errors import LargestTensor, check_budget, definition

SCALE = 0.7
NAMES = "y keys dq dk dv dw dbeta dlog_forget"
C = BLOCK
GATES = {
    "none": None,
    "slow": lambda *shape: -1e-3 * torch.rand(shape),
    "half": lambda *shape: logsigmoid(torch.randn(shape)),
    "-1e4": lambda *shape: torch.full(shape, -1e4),
    "mixed": lambda *shape: -torch.tensor([0, 1e-3, 0.3, 20, 1e4])[torch.randint(5, shape)],
}


def random_inputs(T, *, B=2, H=4, G=2, K=5, V=3, gate="half"):
    """Arguments and cotangents of y and keys in float64; log_forget is left out for "none"."""
    inputs = [
        torch.randn(B, T, H, K),
        torch.randn(B, T, G, K),
        torch.randn(B, T, G, V),
        normalize(torch.randn(B, T, G, K).double(), dim=-1),
        2 * torch.rand(B, T, G),
    ]
    if GATES[gate] is not None:
        inputs.append(GATES[gate](B, T, H))
    cotangents = [torch.randn(B, T, H, V), torch.randn(B, T, G, K)]
    return [x.double() for x in inputs], [x.double() for x in cotangents]


def defined(inputs, cotangents):
    return definition(lambda *x: path_attention(*x, scale=SCALE), inputs, cotangents)


def computed(inputs, cotangents):
    inputs = [*inputs, *[None] * (6 - len(inputs))]
    y, lse, keys = path.forward(*inputs, SCALE, return_keys=True)
    gradients = path.backward(*cotangents, *inputs, y, lse, SCALE)
    assert [x is None for x in gradients] == [x is None for x in inputs]
    return [y, keys, *(x for x in gradients if x is not None)]


def assert_same(got, expected, tolerance=1e-12):
    for name, x, y in zip(NAMES.split(), got, expected, strict=False):
        torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert len(got) == len(expected)


def assert_near(got, expected, tolerance):
    """By root mean square, where single elements and exact zeros have no error of their own."""
    for name, x, y in zip(NAMES.split(), got, expected, strict=False):
        rms = (x - y).square().mean().sqrt()
        assert rms <= tolerance * (1 + y.square().mean().sqrt()), f"{name}: {rms:.1e}"
    assert len(got) == len(expected)


def exact(inputs, cotangents):
    """The definition in float64, of inputs as they are rounded."""
    return defined(*([x.double() for x in group] for group in (inputs, cotangents)))


@pytest.mark.parametrize("gate", ["none", "half"])
@pytest.mark.parametrize("T", [1, 2, SOLVE - 1, SOLVE, SOLVE + 1, C - 1, C, C + 1, 3 * C + 5])
def test_it_is_the_definition(T, gate):
    inputs, cotangents = random_inputs(T, gate=gate)
    assert_same(computed(inputs, cotangents), defined(inputs, cotangents))


@pytest.mark.parametrize(
    "B, H, G, K, V", [(1, 1, 1, 1, 1), (3, 2, 2, 8, 3), (1, 5, 1, 3, 12), (2, 6, 3, 33, 7)]
)
def test_it_is_the_definition_for_other_sizes(B, H, G, K, V):
    inputs, cotangents = random_inputs(C + 3, B=B, H=H, G=G, K=K, V=V)
    assert_same(computed(inputs, cotangents), defined(inputs, cotangents))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_error_is_at_most_twice_the_definitions(dtype):
    inputs, cotangents = random_inputs(2 * C + 5, K=32, V=16)
    low = [x.to(dtype) for x in inputs], [x.to(dtype) for x in cotangents]
    check_budget(NAMES, computed(*low), defined(*low), exact(*low))


@pytest.mark.parametrize("gate", GATES)
def test_any_gate_is_finite_and_right(gate):
    inputs, cotangents = random_inputs(2 * C + 3, K=32, V=16, gate=gate)
    assert_same(computed(inputs, cotangents), defined(inputs, cotangents))
    single = [x.float() for x in inputs], [x.float() for x in cotangents]
    assert_near(computed(*single), exact(*single), 1e-6)


def test_a_closed_gate_forgets_everything():
    inputs, cotangents = random_inputs(C + 5)
    expected = [x.clone() for x in inputs]
    inputs[5][:, ::3], expected[5][:, ::3] = -torch.inf, -1e4
    assert_same(computed(inputs, cotangents), computed(expected, cotangents))


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_equal_directions_are_no_trouble(beta):
    inputs, cotangents = random_inputs(2 * C + 3, K=32, V=16)
    inputs[3] = inputs[3][:, :1].expand_as(inputs[3]).contiguous()
    inputs[4] = torch.full_like(inputs[4], beta)
    assert_same(computed(inputs, cotangents), defined(inputs, cotangents), tolerance=1e-9)
    single = [x.float() for x in inputs], [x.float() for x in cotangents]
    assert_near(computed(*single), exact(*single), 5e-5)


def test_reflections_keep_their_norm_over_thousands_of_tokens():
    (q, k, v, w, beta), _ = random_inputs(4096, B=1, H=1, G=1, K=64, gate="none")
    rows = [x.float() for x in (q, k, v, w, torch.full_like(beta, 2.0))]
    keys = path.forward(*rows, None, 0.1, return_keys=True)[2]
    torch.testing.assert_close(keys.norm(dim=-1), k.norm(dim=-1).float(), rtol=2e-5, atol=0)


@pytest.mark.parametrize("gate", ["none", "half"])
def test_without_transitions_it_is_attention(gate):
    inputs, (dy, _) = random_inputs(2 * C + 5, gate=gate)
    q, k, v, *log_forget = inputs[:3] + inputs[5:]
    expected = definition(lambda *x: [attention(*x, scale=SCALE)], [q, k, v, *log_forget], [dy])
    inputs = [q, k, v, None, None, *(log_forget or [None])]
    y, lse, keys = path.forward(*inputs, SCALE)
    dq, dk, dv, dw, dbeta, *dlog_forget = path.backward(dy, None, *inputs, y, lse, SCALE)
    assert keys is dw is dbeta is None
    got = [y, dq, dk, dv, *(x for x in dlog_forget if x is not None)]
    for x, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(x, truth, rtol=1e-12, atol=1e-12)


def test_keys_need_no_gradient_of_their_own():
    inputs, (dy, dkeys) = random_inputs(C + 3)
    y, lse, keys = path.forward(*inputs, SCALE)
    assert keys is None
    without = path.backward(dy, None, *inputs, y, lse, SCALE)
    for x, expected in zip(without, defined(inputs, [dy, 0 * dkeys])[2:], strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


def test_the_past_does_not_see_the_future():
    T, cut = 2 * C, C + 7
    inputs, others = random_inputs(T)[0], random_inputs(T)[0]
    mixed = [torch.cat([x[:, :cut], o[:, cut:]], 1) for x, o in zip(inputs, others, strict=True)]
    for before, after in zip(
        path.forward(*inputs, SCALE), path.forward(*mixed, SCALE), strict=True
    ):
        if before is not None:
            assert torch.equal(before[:, :cut], after[:, :cut])


def test_neutral_tokens_at_the_end_change_nothing():
    T, tail = C + 3, C + 6
    inputs, cotangents = random_inputs(T + tail)
    for x in (*inputs[1:], cotangents[0]):
        x[:, T:] = 0
    padded = computed(inputs, cotangents)
    expected = computed([x[:, :T] for x in inputs], [x[:, :T] for x in cotangents])
    assert_same([x[:, :T] for x in padded], expected)


def test_results_have_the_dtype_of_their_argument_and_inputs_stay():
    inputs, cotangents = random_inputs(C + 1)
    half, single = torch.bfloat16, torch.float32
    dtypes = [half, half, torch.float16, single, single, single]
    inputs = [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    before = [x.clone() for x in (*inputs, *cotangents)]
    y, lse, keys = path.forward(*inputs, SCALE, return_keys=True)
    gradients = path.backward(*cotangents, *inputs, y, lse, SCALE)
    assert (y.dtype, lse.dtype, keys.dtype) == (half, single, half)
    assert [x.dtype for x in gradients] == dtypes
    assert all(map(torch.equal, (*inputs, *cotangents), before))
    assert all(x.is_contiguous() for x in (y, lse, keys, *gradients))


def test_memory_is_linear_in_tokens():
    T = 4096
    inputs, cotangents = random_inputs(T, B=1, H=2, G=1, K=4, V=4)
    with LargestTensor() as largest:
        computed(inputs, cotangents)
    assert largest.elements <= 2 * C * T
