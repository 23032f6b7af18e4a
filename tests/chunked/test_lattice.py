"""Lattice in chunks against its definition: outputs, state and every gradient."""

import pytest
import torch
from torch.nn.functional import normalize

from seqmix.chunked import lattice, lattice_exact
from seqmix.reference import lattice as reference
from tests.chunked.errors import LargestTensor, check_budget, definition

NAMES = "y state dq dk dv dgamma dmu dstate"
OBJECTIVES = ("dec", "dot", "enc")
WAYS = [  # form, norm, sweeps
    ("gated", "token", 1),
    ("gated", "chunk", 1),
    ("frozen", "token", 1),
    ("frozen", "chunk", 1),
    ("gated", "token", 2),
    ("gated", "token", 4),
]


def random_inputs(T, *, B=2, H=2, S=4, V=5, strength=1.0):
    """Arguments and cotangents in float64; the slots are unit, and so are the values nearly."""
    inputs = [
        normalize(torch.randn(B, T, H, S).double(), dim=-1),
        normalize(torch.randn(B, T, H, S).double(), dim=-1),
        torch.randn(B, T, H, V) * V**-0.5,
        strength * torch.randn(B, T, H).sigmoid(),
        1 - 0.1 * torch.rand(B, T, H),
        normalize(torch.randn(B, H, V, S).double(), dim=-2),
    ]
    cotangents = [torch.randn(B, T, H, V), torch.randn(B, H, V, S)]
    return [x.double() for x in inputs], [x.double() for x in cotangents]


def rule(objective="dec", chunk_size=4, form="gated", norm="token", sweeps=1):
    return objective, chunk_size, form, norm, sweeps


def defined(inputs, cotangents, rule):
    objective, chunk_size, form, norm, sweeps = rule
    options = {"objective": objective, "chunk_size": chunk_size, "form": form, "norm": norm}

    def run(*inputs):
        *tokens, state = inputs
        return reference.lattice(*tokens, state=state, sweeps=sweeps, **options)

    return definition(run, inputs, cotangents)


def computed(inputs, cotangents, rule):
    *tokens, state = inputs
    tokens += [None] * (5 - len(tokens))
    outputs = lattice.forward(*tokens, state, *rule)
    gradients = lattice.backward(*cotangents, *tokens, state, *rule)
    assert [x is None for x in gradients] == [x is None for x in (*tokens, state)]
    return [*outputs, *(x for x in gradients if x is not None)]


def without_radial(results, state):
    """The last result, the gradient of the first slots, without its part along them."""
    *results, dstate = results
    slots = normalize(state.double(), dim=-2).to(dstate.dtype)
    return [*results, dstate - slots * (dstate * slots).sum(-2, keepdim=True)]


def compare(inputs, cotangents, rule):
    """Both sides in float64. The loop over tokens promises nothing about the radial part."""
    pair = [f(inputs, cotangents, rule) for f in (computed, defined)]
    exact = rule[1] == 1 and rule[3] == "token"
    return [without_radial(x, inputs[-1]) for x in pair] if exact else pair


def assert_same(got, expected, tolerance=1e-12):
    names = NAMES.split() if len(got) == 8 else [x for x in NAMES.split() if x != "dmu"]
    for name, x, y in zip(names, got, expected, strict=True):
        torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(("form", "norm", "sweeps"), WAYS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("C", [1, 4, 16])
def test_it_is_the_definition(C, objective, form, norm, sweeps):
    for T in sorted({1, 2, C - 1, C, C + 1, 3 * C + 5} - {0}):
        inputs, cotangents = random_inputs(T)
        way = rule(objective, C, form, norm, sweeps)
        assert_same(*compare(inputs, cotangents, way), tolerance=1e-10)


@pytest.mark.parametrize(("form", "norm", "sweeps"), WAYS)
@pytest.mark.parametrize("C", [1, 3, 7])
def test_it_is_the_definition_for_other_sizes_and_without_mu(C, form, norm, sweeps):
    for B, H, S, V in ((1, 1, 1, 3), (3, 1, 7, 2), (1, 3, 2, 9)):
        inputs, cotangents = random_inputs(2 * C + 1, B=B, H=H, S=S, V=V)
        del inputs[4]
        objective = OBJECTIVES[H + S & 1]
        way = rule(objective, C, form, norm, sweeps)
        pair = computed(inputs, cotangents, way), defined_without_mu(inputs, cotangents, way)
        if C == 1 and norm == "token":
            pair = [without_radial(x, inputs[-1]) for x in pair]
        assert_same(*pair, tolerance=1e-10)


def defined_without_mu(inputs, cotangents, rule):
    with_mu = [*inputs[:4], torch.ones_like(inputs[3]), inputs[4]]
    y, state, *gradients = defined(with_mu, cotangents, rule)
    del gradients[4]
    return [y, state, *gradients]


@pytest.mark.parametrize("rows", [1, 20, 100])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_chunks_may_be_worked_on_in_groups_of_any_size(rows, objective, monkeypatch):
    monkeypatch.setattr(lattice, "AT_ONCE", rows)
    monkeypatch.setattr(lattice_exact, "BLOCK", 3)
    inputs, cotangents = random_inputs(23)
    for way in (rule(objective, 2), rule(objective, 4, sweeps=2), rule(objective, 1)):
        assert_same(*compare(inputs, cotangents, way), tolerance=1e-10)


@pytest.mark.parametrize(("form", "norm", "sweeps"), WAYS)
@pytest.mark.parametrize("C", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_error_is_at_most_twice_the_definitions(dtype, C, form, norm, sweeps):
    for objective in OBJECTIVES:
        inputs, cotangents = random_inputs(3 * C + 5, B=3, S=8, V=8, strength=0.5)
        way = rule(objective, C, form, norm, sweeps)
        low = [[x.to(dtype) for x in group] for group in (inputs, cotangents)]
        low[0][-1] = normalize(low[0][-1].double(), dim=-2).to(dtype)
        exact = defined(*([x.double() for x in group] for group in low), way)
        results = [computed(*low, way), defined(*low, way), exact]
        if C == 1 and norm == "token":
            results = [without_radial(x, inputs[-1]) for x in results]
        check_budget(NAMES, *results)


def test_sweeps_beyond_the_chunk_add_nothing():
    inputs, cotangents = random_inputs(11)
    exact = defined(inputs, cotangents, rule(chunk_size=1))
    for sweeps in (4, 9):
        got = computed(inputs, cotangents, rule(sweeps=sweeps))
        pair = [without_radial(x, inputs[-1]) for x in (got, exact)]
        assert_same(*pair, tolerance=1e-9)


@pytest.mark.parametrize(("form", "norm", "sweeps"), WAYS[:5])
@pytest.mark.parametrize(("C", "T", "tail"), [(1, 5, 40), (4, 8, 9), (4, 6, 9), (16, 3, 40)])
def test_idle_tokens_at_the_end_change_nothing(C, T, tail, form, norm, sweeps):
    (*tokens, state), (dy, dstate) = random_inputs(T + tail)
    short = [x[:, :T] for x in tokens]
    q, k, v, gamma, mu = tokens
    gamma[:, T:], mu[:, T:], dy[:, T:] = 0, 1, 0
    for objective in OBJECTIVES:
        way = rule(objective, C, form, norm, sweeps)
        y, last, *gradients = computed([*tokens, state], [dy, dstate], way)
        expected = computed([*short, state], [dy[:, :T], dstate], way)
        whole = [y[:, :T], last, *(x[:, :T] for x in gradients[:5]), gradients[5]]
        assert_same(whole, expected, tolerance=1e-11)
        assert not any(x[:, T:].any() for x in gradients[:3])


@pytest.mark.parametrize("C", [1, 4])
def test_a_row_of_idle_tokens_keeps_its_slots_bitwise(C):
    (*tokens, state), (dy, dstate) = random_inputs(9)
    tokens[3][0], tokens[4][0], dy[0] = 0, 1, 0
    state[0] *= 1.01  # even if they are no unit slots
    for norm in ("token", "chunk"):
        way = rule("dec", C, "gated", norm)
        _, last, *_, dfirst = computed([*tokens, state], [dy, dstate], way)
        assert torch.equal(last[0], state[0])
        assert torch.equal(dfirst[0], dstate[0])


@pytest.mark.parametrize("sweeps", [1, 2])
@pytest.mark.parametrize(("C", "cut"), [(1, 7), (4, 8), (5, 15)])
def test_two_calls_equal_one(C, cut, sweeps):
    (*tokens, state), _ = random_inputs(19)
    whole, last = lattice.forward(*tokens, state, *rule("dec", C, sweeps=sweeps))
    pieces = []
    for piece in (slice(None, cut), slice(cut, None)):
        part = [x[:, piece] for x in tokens]
        y, state = lattice.forward(*part, state, *rule("dec", C, sweeps=sweeps))
        pieces.append(y)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if C > 1 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **tolerance)
    torch.testing.assert_close(state, last, **tolerance)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("C", [1, 4])
def test_zero_and_parallel_writes_are_the_definition_too(C, objective):
    (q, k, v, gamma, mu, state), cotangents = random_inputs(8)
    v[:, ::2] = state[:, None, :, :, 0]  # parallel to the first slot (dot, enc)
    k[:, 1::4], v[:, 1::4] = 0, 0
    k[:, 2] = torch.tensor([1.0, 0, 0, 0])  # the first slot holds v already (dec)
    gamma[:, 3] = 0
    inputs = [q, k, v, gamma, mu, state]
    for sweeps in (1, 3):
        assert_same(*compare(inputs, cotangents, rule(objective, C, sweeps=sweeps)), 1e-8)
    for group in ([x.float() for x in inputs], [x.bfloat16() for x in inputs]):
        assert all(x.isfinite().all() for x in computed(group, cotangents, rule(objective, C)))


def test_gates_of_zero_are_the_definition_too():
    # one slot, h = 2 s and c = -1: gate = mu b + a khat = 1 - 2 gamma
    state = torch.tensor([0.6, 0.8]).double()
    v = (2 * state).expand(1, 6, 1, 2).clone()
    k = torch.full((1, 6, 1, 1), 3.0).double()
    gamma = torch.tensor([[0.5, 0.2, 0.5, 0.0, 0.5, 0.7]]).double()[..., None]
    inputs = [k.clone(), k, v, gamma, torch.ones_like(gamma), state.view(1, 1, 2, 1)]
    cotangents = [torch.randn(1, 6, 1, 2).double(), torch.randn(1, 1, 2, 1).double()]
    for C in (4, 6):
        for form, norm, sweeps in WAYS[1::2]:
            way = rule("enc", C, form, norm, sweeps)
            assert_same(*compare(inputs, cotangents, way), tolerance=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        rule(chunk_size=1),
        rule("enc", chunk_size=1),
        rule(chunk_size=4, norm="chunk"),
        rule(chunk_size=16),
        rule("dot", chunk_size=16, sweeps=2),
        rule(chunk_size=16, form="frozen", norm="chunk"),
        rule(chunk_size=64),
        rule(chunk_size=64, norm="chunk"),
        rule("enc", chunk_size=64, form="frozen"),
    ],
)
def test_sixteen_thousand_tokens_stay_bounded(way):
    inputs, cotangents = random_inputs(16384, B=1, H=1, S=16, V=16)
    y, last, *gradients = computed([x.float() for x in inputs], cotangents, way)
    assert all(x.isfinite().all() for x in gradients)
    assert (last.norm(dim=-2) - 1).abs().max() < 1e-6
    assert y.abs().max() < 10


def test_two_sweeps_of_a_long_chunk_over_few_slots_may_grow_but_stay_finite():
    # the definition's own limit: more sweeps or shorter chunks help, and so do smaller gammas
    inputs, cotangents = random_inputs(1024, B=1, H=1, S=16, V=16)
    single = [x.float() for x in inputs]
    results = computed(single, cotangents, rule(chunk_size=64, sweeps=2))
    assert all(x.isfinite().all() for x in results)
    gentle = [x * (0.2 if i == 3 else 1) for i, x in enumerate(single)]
    assert computed(gentle, cotangents, rule(chunk_size=64, sweeps=2))[0].abs().max() < 2


def test_keys_ten_times_too_long_break_eq_17_alone():
    # the instability that the paper reports; the layer normalises its keys
    inputs, cotangents = random_inputs(256, B=1, S=16, V=16)
    inputs[1] *= 10
    single = [x.float() for x in inputs]
    for way in (rule(chunk_size=1), rule(form="frozen", chunk_size=16), rule("dot", chunk_size=16)):
        y, *rest = computed(single, cotangents, way)
        assert y.abs().max() < 10
        assert all(x.isfinite().all() for x in rest)
    assert lattice.forward(*single, *rule(chunk_size=16))[0].abs().max() > 100


def test_results_have_the_dtype_of_their_argument_and_states_float32():
    dtypes = [torch.bfloat16] * 3 + [torch.float32, torch.float16, torch.float64]
    for C in (1, 4):
        inputs, cotangents = random_inputs(7)
        inputs = [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
        before = [x.clone() for x in (*inputs, *cotangents)]
        y, state = lattice.forward(*inputs, *rule("enc", C))
        gradients = lattice.backward(*cotangents, *inputs, *rule("enc", C))
        assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
        assert [x.dtype for x in gradients] == dtypes
        assert all(map(torch.equal, (*inputs, *cotangents), before))
        assert all(x.is_contiguous() for x in (y, state, *gradients))


def test_expanded_arguments_work():
    for C in (1, 4):
        inputs, cotangents = random_inputs(7)
        inputs[0] = inputs[0][:, :, :1].expand_as(inputs[0])
        inputs[1] = inputs[1].transpose(1, 3).contiguous().transpose(1, 3)
        inputs[5] = inputs[5][:1].expand_as(inputs[5])
        contiguous = [x.contiguous() for x in inputs]
        both = [computed(x, cotangents, rule("dec", C)) for x in (inputs, contiguous)]
        assert_same(*both, tolerance=0)


@pytest.mark.parametrize("C", [1, 16])
def test_memory_is_linear_in_tokens(C):
    inputs, cotangents = random_inputs(4096, B=1, H=1, S=8, V=8)
    inputs, cotangents = [x.float() for x in inputs], [x.float() for x in cotangents]
    with LargestTensor() as largest:
        computed(inputs, cotangents, rule(chunk_size=C))
    assert largest.elements <= 8 * 4096
