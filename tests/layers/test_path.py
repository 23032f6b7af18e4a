"""PaTH layers: the equations once more, pieces, packing, the cache, its folds and crops."""

import pytest
import torch
from torch.nn.functional import logsigmoid, silu

from seqmix.layers.path import PathAttention
from seqmix.reference.path import path_attention

KINDS = {
    "path": {},
    "path_fox": {"forget_gate": True},
    "options": {"forget_gate": True, "qk_norm": True, "conv_activation": "silu", "w_rank": None},
    "narrow": {"forget_gate": True, "window": 5, "conv_size": 4, "max_beta": 2.0},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def layer(kind, **options):
    made = PathAttention(24, 4, num_kv_heads=2, head_dim=6, **KINDS[kind] | options).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def random_tokens(*shape):
    return torch.randn(*shape, 24).double()


def run(mix, pieces, state=None):
    """Outputs of consecutive pieces, and the state behind the last."""
    outputs = []
    for piece in pieces:
        y, state = mix(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def assert_close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("silu_on", [False, True])
def test_it_is_what_the_equations_say(silu_on):
    mix = layer("path_fox", conv_activation="silu" if silu_on else None, max_beta=1.2)
    x, weight = random_tokens(1, 9), mix.w_conv.weight[:, 0]
    low = mix.w_proj.up.weight @ mix.w_proj.down.weight
    w = torch.zeros(1, 9, 12).double()
    for t in range(9):
        for back in range(3):
            if t - back >= 0:
                w[0, t] += weight[:, 2 - back] * (low @ x[0, t - back])
    w = (silu(w) if silu_on else w).view(1, 9, 2, 6)
    w = w / w.norm(dim=-1, keepdim=True)
    beta = (2 * mix.beta_proj(x).sigmoid()).clamp(max=1.2)
    assert (beta == 1.2).any() and (beta < 1.2).any()
    q, k, v = (f(x).view(1, 9, -1, 6) for f in (mix.q_proj, mix.k_proj, mix.v_proj))
    y, _ = path_attention(q, k, v, w, beta, logsigmoid(mix.f_proj(x)), scale=6**-0.5)
    assert_close(mix(x)[0], mix.o_proj(y.flatten(2)))


@each_kind
@pytest.mark.parametrize("size", [1, 3, 63, 64, 65, 100])
def test_pieces_equal_the_whole(kind, size):
    mix, x = layer(kind), random_tokens(2, 140)
    whole, last = mix(x)
    pieces, state = run(mix, x.split(size, dim=1))
    assert_close(pieces, whole)
    assert state.seen.tolist() == last.seen.tolist() == [140, 140]
    more = random_tokens(2, 7)
    assert_close(mix(more, state)[0], mix(more, last)[0])


@each_kind
def test_pending_tokens_stay_within_the_window(kind):
    mix, x = layer(kind), random_tokens(1, 150)
    _, state = mix(x[:, :100])
    for t in range(100, 150):
        _, state = mix(x[:, t : t + 1], state)
        assert 1 <= state.pending.item() <= state.k.shape[1] <= mix.window
        assert state.keys.shape[1] + state.k.shape[1] == t + 1


@each_kind
def test_ragged_rows_go_on_like_single_sequences(kind):
    mix = layer(kind)
    cuts = [0, 5, 5, 83], [0, 3, 73, 74], [0, 0, 70, 71], [0, 1, 2, 2]
    x = [random_tokens(1, offsets[-1] + 2) for offsets in cuts]  # two tokens belong to nobody
    state, outputs = None, []
    for piece, offsets in zip(x, cuts, strict=True):
        y, state = mix(piece, state, torch.tensor(offsets))
        assert not y[:, offsets[-1] :].any()
        assert (state.pending <= state.seen).all()
        outputs.append(y)
    for n in range(3):
        where = [slice(offsets[n], offsets[n + 1]) for offsets in cuts]
        alone, _ = mix(torch.cat([piece[:, at] for piece, at in zip(x, where, strict=True)], 1))
        assert_close(torch.cat([y[:, at] for y, at in zip(outputs, where, strict=True)], 1), alone)
    assert state.seen.tolist() == [9, 141, 80]


@each_kind
def test_packed_documents_are_apart(kind):
    mix, x = layer(kind), random_tokens(1, 20).requires_grad_()
    y, _ = mix(x, None, torch.tensor([0, 8, 20]))
    (gradient,) = torch.autograd.grad(y[:, 8:].sum(), x)
    assert not gradient[:, :8].any()
    assert_close(y[:, 8:], mix(x[:, 8:])[0])


@each_kind
def test_no_tokens_change_nothing(kind):
    mix, x = layer(kind), random_tokens(2, 12)
    y, state = mix(x[:, :0])
    assert y.shape == (2, 0, 24) and state.seen.tolist() == [0, 0]
    first, state = mix(x[:, :7], state)
    nothing, state = mix(x[:, :0], state)
    rest, _ = mix(x[:, 7:], state)
    assert nothing.shape == (2, 0, 24)
    assert_close(torch.cat([first, rest], 1), mix(x)[0])


@each_kind
def test_crop_inside_the_window_is_exact(kind):
    mix, x, other = layer(kind), random_tokens(2, 90), random_tokens(2, 90)
    for lost in (1, 4, 5):
        _, state = mix(x[:, :83])
        _, state = mix(other[:, :lost], state)
        for cut in (state.crop(83), state.crop(-lost)):
            assert cut.seen.tolist() == [83, 83]
            assert_close(mix(x[:, 83:], cut)[0], mix(x)[0][:, 83:])
        assert state.seen.tolist() == [83 + lost] * 2


def test_crop_follows_a_prefill_and_reaches_back_one_window():
    mix, x = layer("path_fox"), random_tokens(1, 200)
    whole, state = mix(x)
    assert_close(mix(x[:, 136:], state.crop(136))[0], whole[:, 136:])
    with pytest.raises(ValueError, match="PathState: cannot forget the last 65 tokens, older keys"):
        state.crop(135)
    assert state.crop(200) is state and state.crop(500) is state


def test_crop_of_ragged_rows_and_of_everything():
    mix, x = layer("path_fox"), random_tokens(1, 9)
    _, state = mix(x, None, torch.tensor([0, 2, 9]))
    cut = state.crop(4)  # both rows lose three, as far as they have them
    assert cut.seen.tolist() == [0, 4]
    y, _ = mix(torch.cat([x[:, :2], x[:, 6:]], 1), cut, torch.tensor([0, 2, 5]))
    assert_close(y[:, :2], mix(x[:, :2])[0])
    assert_close(y[:, 2:], mix(x[:, 2:])[0][:, 4:])
    assert_close(mix(x[:, :2], state.crop(0).select(torch.tensor([1])))[0], mix(x[:, :2])[0])


def test_crop_of_ragged_rows_behind_a_long_prefill():
    mix, x = layer("path_fox"), random_tokens(1, 90)
    _, state = mix(x, None, torch.tensor([0, 5, 90]))
    y, _ = mix(torch.cat([x[:, 2:5], x[:, 87:]], 1), state.crop(-3), torch.tensor([0, 3, 6]))
    assert_close(y[:, :3], mix(x[:, :5])[0][:, 2:])
    assert_close(y[:, 3:], mix(x[:, 5:])[0][:, 82:])


def test_speculative_tokens_are_taken_back_again_and_again():
    mix, x = layer("path_fox"), random_tokens(1, 180)
    whole, _ = mix(x)
    y, state = mix(x[:, :10])
    outputs, t = [y], 10
    while t < 170:
        guess = torch.cat([x[:, t : t + 4], random_tokens(1, 3)], 1)
        y, state = mix(guess, state)
        state, t = state.crop(-3), t + 4
        outputs.append(y[:, :4])
        assert state.k.shape[1] <= mix.window and state.keys.shape[1] <= t
    assert_close(torch.cat(outputs, 1), whole[:, :t])


@each_kind
def test_select_and_copy_keep_states_apart(kind):
    mix, x = layer(kind), random_tokens(3, 80)
    _, state = mix(x[:, :70])
    _, state = mix(x[:, 70:72], state)
    rows = torch.tensor([2, 0, 0])
    straight, _ = mix(x[:, 72:], state)
    assert_close(mix(x[:, 72:][rows], state.select(rows))[0], straight[rows])
    before = state.copy()
    mix(x[:, 72:], state)
    for name, tensor in vars(state).items():
        if tensor is not None:
            assert torch.equal(getattr(before, name), tensor), name
            assert getattr(before, name).data_ptr() != tensor.data_ptr() or not tensor.numel()


@each_kind
def test_every_parameter_gets_a_gradient(kind):
    mix = layer(kind)
    x = random_tokens(2, 70)
    y, state = mix(x)
    z, _ = mix(random_tokens(2, 3), state)
    for output in (y, z):
        gradients = torch.autograd.grad(
            output.square().sum(), list(mix.parameters()), retain_graph=True
        )
        for (name, _), gradient in zip(mix.named_parameters(), gradients, strict=True):
            assert gradient.abs().sum() > 0, name


def test_gradients_flow_through_the_state():
    mix, x = layer("path_fox", window=4), random_tokens(1, 11).requires_grad_()
    whole = mix(x)[0][:, 6:].square().sum()
    first, state = mix(x[:, :6])
    pieces = run(mix, x[:, 6:].split(2, 1), state)[0].square().sum()
    assert_close(torch.autograd.grad(pieces, x)[0], torch.autograd.grad(whole, x)[0])


def test_a_bare_layer_takes_one_token_at_a_time():
    mix, x = PathAttention(24, 4, forget_gate=True), torch.randn(3, 1, 24)
    y, state = mix(x)
    z, state = mix(x, state)
    assert y.shape == z.shape == (3, 1, 24) and state.seen.tolist() == [2, 2, 2]
    assert mix(x, return_state=False)[1] is None
    torch.testing.assert_close(torch.cat([y, z], 1), mix(x.expand(3, 2, 24))[0])


def test_half_precision_decodes_close_to_single():
    mix = PathAttention(64, 2, forget_gate=True)
    for parameter in mix.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    x = torch.randn(1, 300, 64).bfloat16()
    half = PathAttention(64, 2, forget_gate=True).bfloat16()
    half.load_state_dict(mix.state_dict())
    mix.load_state_dict(half.state_dict())
    exact = mix(x.float())[0]
    with torch.no_grad():
        whole, (stepped, state) = half(x)[0], run(half, x.split(1, 1))
    assert (state.keys.dtype, state.k.dtype, state.w.dtype) == (
        torch.bfloat16, torch.float32, torch.float32)  # fmt: skip
    for y in (whole, stepped):
        assert (y.float() - exact).norm() <= 0.02 * exact.norm()


def test_autocast_leaves_gates_and_folds_in_single_precision():
    mix, x = PathAttention(32, 2, forget_gate=True), torch.randn(1, 70, 32)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = mix(x)
        _, state = mix(x[:, :2], state)
    for name in ("k", "w", "beta", "log_forget", "decay"):
        assert getattr(state, name).dtype == torch.float32, name
    torch.testing.assert_close(state.w.norm(dim=-1), torch.ones_like(state.beta))


def test_beta_and_gates_start_where_the_options_say():
    mix = PathAttention(24, 4, forget_gate=True, beta_bias=-5.0, forget_bias=8.0)
    torch.nn.init.zeros_(mix.beta_proj.weight)
    _, state = mix(torch.randn(1, 3, 24))
    torch.testing.assert_close(state.beta, torch.full_like(state.beta, 2 / (1 + 148.41316)))
    assert (state.log_forget > -1e-2).all()
    mix = PathAttention(24, 4, max_beta=2.0, beta_bias=50.0)
    assert (mix(torch.randn(1, 3, 24))[1].beta == 2).all()


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="path: num_heads must be a multiple of num_kv_heads"):
        PathAttention(24, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"path: max_beta must be in \(0, 2\], got 2.5"):
        PathAttention(24, 4, max_beta=2.5)
    with pytest.raises(ValueError, match="path: window must be at least 1, got 0"):
        PathAttention(24, 4, window=0)


@pytest.mark.parametrize("length", [11, 64, 100])
def test_costs_count_what_is_stored(length):
    mix = layer("path_fox").float()
    _, state = mix(torch.randn(1, length, 24))
    counters = state.seen.nbytes + state.pending.nbytes
    assert mix.state_bytes(length) == state.nbytes - counters
    assert mix.flops(2 * length) > 2 * mix.flops(length)
