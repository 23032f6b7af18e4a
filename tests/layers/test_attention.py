"""Attention layers: positions, gates, cache."""

import pytest
import torch
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from seqmix.layers.attention import Attention, alibi_slopes, gates_behind, gates_between, rotate

KINDS = {
    "rope": {"position": "rope"},
    "nope": {"position": "nope", "qk_norm": True},
    "alibi": {"position": "alibi"},
    "fox": {"position": "nope", "forget_gate": True},
}


def layer(kind: str, impl: str | None = None) -> Attention:
    made = Attention(24, 4, num_kv_heads=2, head_dim=6, impl=impl, **KINDS[kind]).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[1, 2, 2, 20], [5], list(range(1, 30))])
def test_pieces_equal_the_whole(kind, cuts):
    attend, x = layer(kind), torch.randn(2, 30, 24).double()
    whole, last = attend(x)
    state, pieces = None, []
    for a, b in zip([0, *cuts], [*cuts, 30], strict=True):
        y, state = attend(x[:, a:b], state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert torch.equal(state.seen, last.seen)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_go_on_like_single_sequences(kind):
    attend, first, second = layer(kind), [0, 5, 5, 17], [0, 3, 7, 8]
    x, more = torch.randn(1, 17, 24).double(), torch.randn(1, 8, 24).double()
    y, state = attend(x, None, torch.tensor(first))
    z, state = attend(more, state, torch.tensor(second))
    for n in range(3):
        one = slice(first[n], first[n + 1]), slice(second[n], second[n + 1])
        alone, _ = attend(torch.cat([x[:, one[0]], more[:, one[1]]], 1))
        torch.testing.assert_close(torch.cat([y[:, one[0]], z[:, one[1]]], 1), alone)
    assert state.seen.tolist() == [8, 4, 13]


@pytest.mark.parametrize("kind", KINDS)
def test_crop_goes_back_exactly(kind):
    attend, x = layer(kind), torch.randn(2, 20, 24).double()
    whole, state = attend(x)
    for cut in (state.crop(13), state.crop(-7)):
        again, _ = attend(x[:, 13:], cut)
        torch.testing.assert_close(again, whole[:, 13:])
    assert state.seen.tolist() == [20, 20]


@pytest.mark.parametrize("kind", KINDS)
def test_select_and_copy_keep_states_apart(kind):
    attend, x = layer(kind), torch.randn(3, 9, 24).double()
    _, state = attend(x[:, :6])
    rows = torch.tensor([2, 0, 0])
    chosen, _ = attend(x[:, 6:][rows], state.select(rows))
    straight, _ = attend(x[:, 6:], state)
    torch.testing.assert_close(chosen, straight[rows])
    before = state.copy()
    attend(x[:, 6:], state)
    for name in ("keys", "values", "seen"):
        assert torch.equal(getattr(before, name), getattr(state, name))
        assert getattr(before, name).data_ptr() != getattr(state, name).data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_apart(kind):
    attend, x = layer(kind), torch.randn(1, 12, 24).double().requires_grad_()
    y, _ = attend(x, None, torch.tensor([0, 5, 12]))
    (gradient,) = torch.autograd.grad(y[:, 5:].sum(), x)
    assert not gradient[:, :5].any()
    torch.testing.assert_close(y[:, 5:], attend(x[:, 5:])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind):
    attend = layer(kind)
    attend(torch.randn(2, 7, 24).double())[0].square().sum().backward()
    for name, parameter in attend.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_rotary_logits_depend_on_distance_alone():
    q, k = torch.randn(1, 1, 1, 8).double(), torch.randn(1, 1, 1, 8).double()
    power = torch.arange(4) / 4
    at = lambda position: position * (10_000.0**-power).double()[None, None]  # noqa: E731
    logit = lambda i, j: (rotate(q, at(i)) * rotate(k, at(j))).sum()  # noqa: E731
    torch.testing.assert_close(logit(9, 4), logit(105, 100))
    assert (logit(9, 4) - logit(9, 5)).abs() > 1e-3


def test_the_forget_gate_is_added_after_the_scale():
    attend, x = layer("fox"), torch.randn(1, 8, 24).double()
    heads = lambda t, n: t.view(1, 8, n, 6).transpose(1, 2)  # noqa: E731
    q, k, v = (heads(f(x), n) for f, n in zip(
        (attend.q_proj, attend.k_proj, attend.v_proj), (4, 2, 2), strict=True))  # fmt: skip
    gate = logsigmoid(attend.f_proj(x)).transpose(1, 2)
    bias = torch.full((4, 8, 8), -torch.inf).double()
    for i in range(8):
        for j in range(i + 1):
            bias[:, i, j] = gate[0, :, j + 1 : i + 1].sum(-1)
    y = scaled_dot_product_attention(q, k, v, attn_mask=bias[None], enable_gqa=True)
    torch.testing.assert_close(attend(x)[0], attend.o_proj(y.transpose(1, 2).flatten(2)))


def test_alibi_slopes_are_the_published_ones():
    torch.testing.assert_close(alibi_slopes(8), 2.0 ** -torch.arange(1.0, 9.0))


def test_sums_of_gates_take_no_differences():
    gates = -torch.tensor([1.0, 1e4, 3.0, 1e-3]).view(1, 4, 1)
    assert gates_behind(gates).flatten().tolist() == [
        pytest.approx(x) for x in (-10003.001, -3.001, -1e-3, 0.0)
    ]
    between = gates_between(gates)[0, :, :, 0]
    assert between[3, 2].item() == pytest.approx(-1e-3)
    assert between[3, 1].item() == pytest.approx(-3.001)
    assert not between.diagonal().any()


def test_a_reset_gate_forgets_everything_before_it():
    attend, x = layer("fox"), torch.randn(1, 10, 24).double()
    _, state = attend(x[:, :6])

    def reset(position: int):
        return attend.f_proj.register_forward_hook(
            lambda module, inputs, out: out.index_fill(1, torch.tensor([position]), -1e4)
        )

    with reset(6):
        whole, _ = attend(x)
    with reset(0):
        warm, cold = attend(x[:, 6:], state)[0], attend(x[:, 6:])[0]
    torch.testing.assert_close(warm, cold)
    torch.testing.assert_close(whole[:, 6:], cold)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="attention: position must be one of 'rope', 'nope'"):
        Attention(8, 2, position="learned")
    with pytest.raises(ValueError, match="attention: num_heads must be a multiple of"):
        Attention(8, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="attention: hidden_size must be a multiple of num_heads"):
        Attention(9, 2)


def test_costs_count_what_is_stored():
    attend, x = layer("fox").float(), torch.randn(1, 11, 24)
    _, state = attend(x)
    assert attend.state_bytes(11) == state.nbytes - state.seen.nbytes
    assert attend.flops(22) > 2 * attend.flops(11)
