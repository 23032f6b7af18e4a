"""What every mixer promises, by name: one contract for all layers."""

import re

import pytest
import torch

from seqmix.layers import MIXERS, build_mixer, mixer_options
from seqmix.layers.mixers import check_options

VARIANTS = {name: (name, {}) for name in MIXERS} | {
    "lattice_chunked": ("lattice", {"chunk_size": 4, "sweeps": 2}),
    "palimpsa_m_mamba2": ("palimpsa_m", {"metaplasticity": False}),
    "palimpsa_d_shared": ("palimpsa_d", {"beta_groups": 1}),
    "attention_alibi": ("attention", {"position": "alibi"}),
    "path_qk_norm": ("path", {"qk_norm": True, "num_kv_heads": 1}),
}
every_mixer = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str, size: int = 32, heads: int = 2, **options) -> torch.nn.Module:
    name, fixed = VARIANTS[variant]
    return build_mixer(name, hidden_size=size, num_heads=heads, **fixed | options)


def randomise(layer: torch.nn.Module) -> torch.nn.Module:
    """Disturb every parameter, so that no default hides a wrong branch."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return layer


@every_mixer
@pytest.mark.parametrize("batch", [1, 3])
def test_one_token_with_a_state_keeps_its_shape(variant, batch):
    layer = randomise(build(variant))
    _, state = layer(torch.randn(batch, 5, 32))
    y, state = layer(torch.randn(batch, 1, 32), state)
    assert y.shape == (batch, 1, 32)
    assert state.seen.tolist() == [6] * batch


@every_mixer
def test_every_length_from_nothing_to_twenty_trains(variant):
    layer = randomise(build(variant))
    for length in range(21):
        y, _ = layer(torch.randn(2, length, 32))
        y.square().sum().backward()
        assert y.shape == (2, length, 32)
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@every_mixer
def test_pieces_equal_the_whole(variant):
    layer, x = randomise(build(variant)).double(), torch.randn(2, 70, 32).double()
    whole, last = layer(x)
    state, pieces = None, []
    for a, b in [(0, 1), (1, 1), (1, 4), (4, 67), (67, 68), (68, 70)]:
        y, state = layer(x[:, a:b], state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert torch.equal(state.seen, last.seen)


@every_mixer
def test_truncated_backpropagation_reaches_through_the_state(variant):
    layer, x = randomise(build(variant)).double(), torch.randn(1, 12, 32).double()
    x.requires_grad_()
    _, state = layer(x[:, :7])
    y, _ = layer(x[:, 7:], state)
    (pieces,) = torch.autograd.grad(y.square().sum(), x)
    (whole,) = torch.autograd.grad(layer(x)[0][:, 7:].square().sum(), x)
    torch.testing.assert_close(pieces, whole)
    y, _ = layer(x[:, 7:], state.detach())
    (cut,) = torch.autograd.grad(y.sum(), x)
    assert not cut[:, :7].any()


@every_mixer
def test_a_layer_does_not_change_the_state_it_is_given(variant):
    layer = randomise(build(variant))
    _, state = layer(torch.randn(2, 9, 32))
    before, x = state.copy(), torch.randn(2, 6, 32)
    first, _ = layer(x, state)
    again, _ = layer(x, state)
    from_copy, _ = layer(x, before)
    assert torch.equal(first, again)
    assert torch.equal(first, from_copy)


@every_mixer
def test_rows_of_a_batch_do_not_meet(variant):
    layer, x = randomise(build(variant)).double(), torch.randn(4, 9, 32).double()
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(layer(x)[0][order], layer(x[order])[0])
    (gradient,) = torch.autograd.grad(layer(x.requires_grad_())[0][0].sum(), x)
    assert not gradient[1:].any()


@every_mixer
def test_the_past_does_not_see_the_future(variant):
    layer, x = randomise(build(variant)).double(), torch.randn(1, 20, 32).double()
    before, _ = layer(x)
    x[:, 13:] = 100
    after, _ = layer(x)
    torch.testing.assert_close(before[:, :13], after[:, :13], rtol=0, atol=1e-12)


@every_mixer
def test_training_and_evaluation_are_one_function(variant):
    layer, x = randomise(build(variant)), torch.randn(2, 9, 32)
    assert torch.equal(layer.train()(x)[0], layer.eval()(x)[0])
    assert torch.equal(layer(x)[0], layer(x, return_state=False)[0])
    assert layer(x, return_state=False)[1] is None


@every_mixer
def test_every_parameter_gets_a_gradient(variant):
    layer = randomise(build(variant))
    layer(torch.randn(2, 9, 32))[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@every_mixer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_with_float32_weights(variant, dtype):
    layer, x = build(variant), torch.randn(2, 9, 32)
    with torch.autocast("cpu", dtype=dtype):
        y, state = layer(x)
        z, _ = layer(x[:, :2], state)
    (y.float().square().sum() + z.float().square().sum()).backward()
    exact, _ = layer(x)
    assert (y.float() - exact).norm() < 0.05 * exact.norm() + 1e-3
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@every_mixer
def test_a_bfloat16_layer_runs_and_keeps_its_dtype(variant):
    layer = build(variant).bfloat16()
    y, state = layer(torch.randn(2, 9, 32).bfloat16())
    z, _ = layer(torch.randn(2, 2, 32).bfloat16(), state)
    assert y.dtype == z.dtype == torch.bfloat16


@every_mixer
@pytest.mark.parametrize("size", range(16, 97, 8))
def test_every_width_and_number_of_heads_runs_or_says_why(variant, size):
    for heads in (1, 2, 3, 4, 8):
        try:
            layer = build(variant, size, heads)
        except ValueError as error:
            assert re.match(r"\w+: \w+ must .*, got ", str(error)), error
            continue
        assert layer(torch.randn(1, 3, size))[0].shape == (1, 3, size)


@every_mixer
def test_meta_device_then_init_weights_gives_a_fresh_layer(variant):
    with torch.device("meta"):
        layer = build(variant)
    layer = layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    layer.init_weights()
    normal = build(variant)
    for (name, a), b in zip(layer.named_parameters(), normal.parameters(), strict=True):
        assert a.isfinite().all(), name
        error = ((a.var() + b.var()) / a.numel()).sqrt() if a.numel() > 1 else a.new_tensor(1.0)
        assert (a.mean() - b.mean()).abs() <= 5 * error + 1e-6, name
    assert layer(torch.randn(1, 5, 32))[0].isfinite().all()


@every_mixer
def test_costs_are_counted(variant):
    layer = build(variant)
    assert layer.flops(20) > layer.flops(10) > 0
    _, state = layer(torch.randn(1, 40, 32))
    stored = state.nbytes - state.seen.nbytes
    assert stored / 2 <= layer.state_bytes(40) <= 2 * stored


@every_mixer
@pytest.mark.slow
def test_compiled_whole_equals_eager_at_three_lengths(variant):
    layer = randomise(build(variant)).double()
    compiled = torch.compile(
        lambda x: layer(x, return_state=False)[0], fullgraph=True, backend="aot_eager"
    )
    for length in (5, 9, 33):
        x = torch.randn(2, length, 32).double()
        torch.testing.assert_close(compiled(x), layer(x)[0])


@every_mixer
def test_a_wrong_input_or_state_is_refused(variant):
    layer = build(variant)
    _, state = layer(torch.randn(2, 5, 32))
    one, two = torch.randn(1, 5, 32), torch.randn(2, 5, 32)
    for arguments, message in (
        ((torch.randn(2, 5, 31),), "x must have shape [B, T, D=32], got [2, 5, 31]"),
        ((two[0],), "x must have shape [B, T, D=32], got [5, 32]"),
        ((two.long(),), "x must be floating point, got int64"),
        ((two, state.seen), "got Tensor"),
        ((one, state), "state must have N=1 rows, one a sequence, got 2"),
        ((one, state, torch.tensor([0, 1, 2, 5])), "state must have N=3 rows, one a sequence"),
        ((two, None, torch.tensor([0, 5])), "the batch must be packed into B=1, got B=2"),
        ((one, state, torch.tensor([0, 4, 2])), "cu_seqlens must rise from 0 to at most T=5"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            layer(*arguments)


def test_an_unknown_mixer_or_option_names_the_known_ones():
    with pytest.raises(ValueError, match="mixers: unknown mixer 'rwkv'; known are path, path_fox"):
        build_mixer("rwkv", hidden_size=8, num_heads=1)
    with pytest.raises(ValueError, match="mixers: lattice has no option 'chunks'; it has head_dim"):
        check_options("lattice", {"chunks": 4})
    with pytest.raises(ValueError, match="mixers: impl of path must be one of 'reference', 't"):
        check_options("path", {"impl": "nosuch"})
    assert mixer_options("attention")["position"] == "rope"
    assert "forget_gate" not in mixer_options("fox")


@pytest.mark.parametrize(
    ("name", "option", "value", "wanted"),
    [
        ("path", "conv_size", 0, "a positive integer"),
        ("path", "w_rank", 0, "a positive integer or None"),
        ("path", "max_beta", "high", "a finite number"),
        ("path", "qk_norm", 1, "true or false"),
        ("lattice", "slots", 0, "a positive integer or None"),
        ("lattice", "objective", 3, "a name"),
        ("attention", "rope_theta", float("nan"), "a finite number"),
        ("palimpsa_d", "b_scale", [0.1], "two finite numbers"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused(name, option, value, wanted):
    with pytest.raises(ValueError, match=f"mixers: {option} of {name} must be {wanted}, got "):
        check_options(name, {option: value})


def test_defaults_and_lists_from_json_pass_the_check():
    for name in MIXERS:
        check_options(name, mixer_options(name))
    check_options("palimpsa_m", {"b_scale": [0.1, 1]})


def test_sizes_a_mixer_does_not_know_are_left_out():
    layer = build_mixer("lattice", hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=6)
    assert layer.head_dim == 6
