"""Lattice's definition: by hand, by descent on the sphere, by Eq. 15 and 17 in matrix form."""

import pytest
import torch

from seqmix.reference.lattice import lattice

RULES = [  # form, norm, sweeps
    ("gated", "token", 1),
    ("gated", "chunk", 1),
    ("frozen", "token", 1),
    ("frozen", "chunk", 1),
    ("gated", "token", 3),
]
OBJECTIVES = ("dec", "dot", "enc")


def unit(x, dim=-1):
    return x / torch.linalg.vector_norm(x, dim=dim, keepdim=True)


def random_inputs(T, *, B=2, H=2, S=4, V=5, seed=0, dtype=torch.float64):
    """q, k, v, gamma, mu and a state of unit slots."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [
        unit(normal(B, T, H, S)),
        unit(normal(B, T, H, S)),
        normal(B, T, H, V),
        normal(B, T, H).sigmoid(),
        1 - 0.3 * normal(B, T, H).sigmoid(),
        unit(normal(B, H, V, S), -2),
    ]
    return [x.to(dtype) for x in inputs]


def run(inputs, objective="dec", chunk_size=1, form="gated", norm="token", sweeps=1):
    *tokens, state = inputs
    return lattice(
        *tokens,
        state=state,
        objective=objective,
        chunk_size=chunk_size,
        form=form,
        norm=norm,
        sweeps=sweeps,
    )


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def one_token(k, v, gamma, mu, state, **options):
    """y and state of one token of one head, read with q = (1, 2)."""
    *tokens, state = (
        torch.tensor(x, dtype=torch.float64) for x in ([1.0, 2.0], k, v, gamma, mu, state)
    )
    y, state = lattice(*(x[None, None, None] for x in tokens), state=state[None, None], **options)
    return y[0, 0, 0].tolist(), state[0, 0].tolist()


@pytest.mark.parametrize("norm", ["token", "chunk"])
@pytest.mark.parametrize("form", ["gated", "frozen"])
@pytest.mark.parametrize(
    ("objective", "k", "v"),
    [
        ("dec", (1, 80 / 99), (1 + 0.6 * 80 / 99 - 2, 0.8 * 80 / 99 + 1)),
        ("dot", (1, 80 / 99), (-2, 1)),
        ("enc", (2 - 1, 0.4 - 80 / 99), (2, -1)),
    ],
)
def test_one_token_is_as_computed_by_hand(objective, k, v, form, norm):
    # slots (1, 0) and (.6, .8) are offered h = (2, -1) and want c = (1, 80/99) of it: a = (2, .4),
    # |h|^2 - a^2 = (1, 4.84); b = (.8, .6) for gamma = 3/4, mu = 1; khat = (.6, 4/11);
    # the gates are .8 + 2 * .6 = 2 and .6 + .4 * 4/11
    expected = [[0.8, -0.28], [0.6, 0.96]]
    for size in (1, 0.5):  # gamma and mu scale the step before it returns to the sphere
        y, state = one_token(
            k, v, 0.75 * size, size, ((1, 0.6), (0, 0.8)), objective=objective, form=form, norm=norm
        )
        assert sum(state, []) == pytest.approx(sum(expected, []), abs=1e-12)
        length = (1, 1) if norm == "token" else (size / 0.8, size / 0.6)  # y reads before the norm
        slots = [[s * n for s, n in zip(row, length, strict=True)] for row in expected]
        assert y == pytest.approx([row[0] + 2 * row[1] for row in slots], abs=1e-12)


def test_the_orthogonal_part_of_h_has_length_4_84_not_5_16():
    # gamma |h - a s| = 1 and mu = 3/4 make a triangle of sides 3, 4, 5
    slots = ((0.6, 1), (0.8, 0))
    _, state = one_token((1, 0), (-2, 1), 1 / 4.84**0.5, 0.75, slots, objective="dot")
    assert sum(state, []) == pytest.approx([-0.28, 1, 0.96, 0], abs=1e-12)


def loss(state, k, v, objective):
    """The half-squared losses of the paper, in which the state is normalised."""
    slots = unit(state, -2)
    decoded, encoded = (slots * k[..., None, :]).sum(-1), (slots * v[..., :, None]).sum(-2)
    return {
        "dec": ((decoded - v) ** 2).sum() / 2,
        "dot": -(decoded * v).sum(),
        "enc": ((encoded - k) ** 2).sum() / 2,
    }[objective]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_it_is_descent_on_the_sphere(objective):
    inputs = random_inputs(7)
    q, k, v, gamma, mu, state = inputs
    outputs = []
    for t in range(7):
        state = state.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(state, k[:, t], v[:, t], objective), state)
        torch.testing.assert_close((gradient * state).sum(-2), torch.zeros(2, 2, 4).double())
        step = mu[:, t, :, None, None] * state - gamma[:, t, :, None, None] * gradient
        state = unit(step, -2)
        outputs.append((state * q[:, t, :, None, :]).sum(-1))
    y, final = run(inputs, objective)
    torch.testing.assert_close(y, torch.stack(outputs, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(final, state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("norm", ["token", "chunk"])
@pytest.mark.parametrize("form", ["gated", "frozen"])
def test_a_chunk_has_the_matrix_form(objective, form, norm):
    inputs = random_inputs(5, B=1, H=1)
    q, k, v = (x[0, :, 0] for x in inputs[:3])
    gamma, mu = (x[0] for x in inputs[3:5])
    S0 = inputs[5][0, 0]
    h = {"dec": k @ S0.T - v, "dot": -v, "enc": v}[objective]
    a, c = h @ S0, (v @ S0 - k if objective == "enc" else k)
    b = 1 / (mu**2 + (gamma * c) ** 2 * ((h**2).sum(-1, keepdim=True) - a**2)).sqrt()
    b = torch.ones_like(b) if norm == "chunk" else b
    khat = gamma * b * c
    gate = mu * b + a * khat if form == "gated" else mu * b
    y = torch.zeros(5, 5).double()
    for t in range(5):
        omega = [gate[i + 1 : t + 1].prod(0) for i in range(t + 1)]
        D = gate[: t + 1].prod(0)
        if form == "frozen":
            D = D + sum(omega[i] * a[i] * khat[i] for i in range(t + 1))
        P = [(q[t] * khat[i] * omega[i]).sum() for i in range(t + 1)]
        y[t] = S0 @ (q[t] * D) - sum(P[i] * h[i] for i in range(t + 1))
    last = S0 * D - h.T @ (khat * torch.stack(omega))
    got, final = run(inputs, objective, 5, form, norm)
    torch.testing.assert_close(got[0, :, 0], y, rtol=0, atol=1e-12)
    torch.testing.assert_close(final[0, 0], unit(last, -2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("form", "norm", "sweeps"), RULES)
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_its_gradients_are_those_of_finite_differences(objective, form, norm, sweeps, chunk_size):
    inputs = [x.requires_grad_() for x in random_inputs(4, B=1, H=1, S=2, V=3)]
    rule = objective, chunk_size, form, norm, sweeps
    assert torch.autograd.gradcheck(lambda *x: run(x, *rule), inputs)


@pytest.mark.parametrize(("form", "norm", "sweeps"), RULES)
@pytest.mark.parametrize(("chunk_size", "cut"), [(1, 4), (4, 8), (3, 9)])
def test_whole_equals_pieces_bitwise(form, norm, sweeps, chunk_size, cut):
    *tokens, state = random_inputs(11)
    rule = "dec", chunk_size, form, norm, sweeps
    whole, final = run([*tokens, state], *rule)
    first, state = run([*(x[:, :cut] for x in tokens), state], *rule)
    second, state = run([*(x[:, cut:] for x in tokens), state], *rule)
    assert torch.equal(whole, torch.cat([first, second], 1))
    assert torch.equal(final, state)


@pytest.mark.parametrize(("form", "norm", "sweeps"), RULES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_past_does_not_see_the_future_bitwise(objective, form, norm, sweeps):
    one, other = random_inputs(9), random_inputs(9, seed=1)
    for t in (1, 4, 6):
        mixed = [
            torch.cat([a[:, :t], b[:, t:]], 1) for a, b in zip(one[:5], other[:5], strict=True)
        ]
        rule = objective, 4, form, norm, sweeps
        assert torch.equal(run(one, *rule)[0][:, :t], run([*mixed, one[5]], *rule)[0][:, :t])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_with_chunks_of_one_token_every_form_and_norm_is_the_exact_rule(objective):
    inputs = random_inputs(6)
    y, final = run(inputs, objective)
    for form, norm, sweeps in RULES:
        got, state = run(inputs, objective, 1, form, norm, sweeps)
        torch.testing.assert_close(state, final, rtol=0, atol=1e-12)
        if norm == "token":  # norm "chunk" reads the state before it is renormalised
            torch.testing.assert_close(got, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_as_many_sweeps_as_tokens_are_exact(objective):
    inputs = random_inputs(19)
    y, final = run(inputs, objective)
    got, state = run(inputs, objective, 6, sweeps=6)
    torch.testing.assert_close(got, y, rtol=0, atol=1e-10)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-10)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_n_sweeps_make_the_first_n_tokens_of_a_chunk_exact(objective):
    inputs = random_inputs(8)
    y, _ = run(inputs, objective)
    for sweeps in (1, 2, 5):
        got, _ = run(inputs, objective, 8, sweeps=sweeps)
        torch.testing.assert_close(got[:, :sweeps], y[:, :sweeps], rtol=0, atol=1e-10)
        assert relative(got[:, sweeps], y[:, sweeps]) > 1e-6


def test_sweeps_converge_to_the_exact_rule():
    inputs = random_inputs(96, B=1, H=1, S=32, V=32)
    inputs[2] = unit(inputs[2])
    for objective in OBJECTIVES:
        y, _ = run(inputs, objective)
        errors = [relative(run(inputs, objective, 16, sweeps=n)[0], y) for n in (1, 2, 4, 8)]
        assert all(b < a / 2 for a, b in zip(errors[:-1], errors[1:], strict=True)), errors
        assert errors[-1] < 1e-5


def test_the_clamp_keeps_sweeps_bounded_where_slots_are_few():
    inputs = random_inputs(64, B=1, H=1, S=6, V=5)
    y, _ = run(inputs)
    for sweeps in (2, 3, 4, 8):
        assert relative(run(inputs, "dec", 16, sweeps=sweeps)[0], y) < 5


def test_dec_without_normalisation_is_the_delta_rule():
    # h orthogonal to every slot: nothing to project away, and y reads before the slots are
    # brought back to length one (norm "chunk")
    q, k, _, gamma, _, _ = random_inputs(1)
    basis = torch.linalg.qr(random_inputs(1, S=5, seed=1)[-1]).Q
    state, normal = basis[..., :4], basis[..., 4]
    v = (state * k[:, 0, :, None, :]).sum(-1) + normal
    y, _ = lattice(q, k, v[:, None], gamma, state=state, norm="chunk")
    error = (v - (state * k[:, 0, :, None, :]).sum(-1))[..., None] * k[:, 0, :, None, :]
    delta = state + gamma[:, 0, :, None, None] * error
    torch.testing.assert_close(y[:, 0], (delta * q[:, 0, :, None, :]).sum(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_a_parallel_or_zero_write_gives_no_nan(objective, chunk_size):
    for dtype in (torch.float32, torch.float64):
        q, k, v, gamma, mu, state = random_inputs(8, dtype=dtype)
        v[:, ::2] = state[:, None, :, :, 0]  # dot and enc: h parallel to the first slot
        k[:, 1::4], v[:, 1::4] = 0, 0  # h = 0
        k[:, 2] = torch.tensor([1.0, 0, 0, 0])  # dec: the first slot holds v already, h = 0
        v[:, 4] = 3 * state[:, :, :, 1]
        inputs = [x.requires_grad_() for x in (q, k, v, gamma, mu, state)]
        y, final = run(inputs, objective, chunk_size)
        gradients = torch.autograd.grad(y.sum() + final.sum(), inputs)
        assert all(x.isfinite().all() for x in (y, final, *gradients))


@pytest.mark.parametrize(("objective", "chunk_size"), [("dec", 1), ("enc", 1), ("dec", 16)])
def test_slots_keep_length_one_over_thousands_of_tokens_in_single_precision(objective, chunk_size):
    inputs = random_inputs(4000, B=1, H=1, S=16, V=16, dtype=torch.float32)
    with torch.no_grad():
        y, final = run(inputs, objective, chunk_size)
        exact = run([x.double() for x in inputs], objective, chunk_size)[0]
    torch.testing.assert_close(final.norm(dim=-2), torch.ones(1, 1, 16), rtol=0, atol=1e-6)
    assert relative(y, exact) < 1e-3


def test_no_tokens_give_the_state_back():
    *tokens, state = random_inputs(3)
    y, final = run([*(x[:, :0] for x in tokens), state], "dec", 4)
    assert y.shape == (2, 0, 2, 5)
    assert final is state


def test_a_missing_mu_is_one():
    q, k, v, gamma, mu, state = random_inputs(5)
    got = run([q, k, v, gamma, None, state])
    expected = run([q, k, v, gamma, torch.ones_like(mu), state])
    assert torch.equal(got[0], expected[0])
