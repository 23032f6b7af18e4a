"""Palimpsa layers: the equations once more, pieces, packing, initialisation, and Mamba2."""

import pytest
import torch
from torch.nn.functional import rms_norm, silu, softplus
from transformers import AutoModel, Mamba2Config  # noqa: F401  (Auto classes before any model)
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from seqmix.layers import palimpsa
from seqmix.layers.common import l2_normalize
from seqmix.layers.palimpsa import PalimpsaD, PalimpsaM
from seqmix.ops import gated_linear_attention

KINDS = {
    "d": (PalimpsaD, {"expand_v": 1.5, "learn_prior": True}),
    "d shared": (PalimpsaD, {"beta_groups": 1, "head_dim": 5, "prior": 2.0}),
    "d plain": (PalimpsaD, {"metaplasticity": False, "conv_size": 2}),
    "m": (PalimpsaM, {"bias": True, "learn_prior": True}),
    "m grouped": (PalimpsaM, {"num_groups": 2, "state_size": 5, "beta_groups": 3}),
    "m plain": (PalimpsaM, {"metaplasticity": False, "num_groups": 1, "norm_groups": 4}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def layer(kind, **options):
    cls, fixed = KINDS[kind]
    made = cls(24, 4, **fixed | options).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def assert_close(x, y, tolerance=1e-12):
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@each_kind
@pytest.mark.parametrize("size", [1, 3, 63, 64, 65, 100])
def test_pieces_equal_the_whole(kind, size):
    mix, x = layer(kind), torch.randn(2, 140, 24).double()
    whole, last = mix(x)
    state, pieces = None, []
    for piece in x.split(size, dim=1):
        y, state = mix(piece, state)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), whole)
    assert state.seen.tolist() == [140, 140]
    assert_close(state.content, last.content)
    assert_close(state.conv, last.conv)


@each_kind
def test_ragged_rows_go_on_like_single_sequences(kind):
    mix, first, second, third = layer(kind), [0, 5, 5, 23], [0, 3, 7, 8], [0, 0, 70, 71]
    if mix.conv1d.bias is not None:
        torch.nn.init.ones_(mix.conv1d.bias)  # a padding row would then write
    x = [torch.randn(1, offsets[-1], 24).double() for offsets in (first, second, third)]
    state, outputs = None, []
    for piece, offsets in zip(x, (first, second, third), strict=True):
        y, state = mix(piece, state, torch.tensor(offsets))
        outputs.append(y)
    for n in range(3):
        where = [slice(offsets[n], offsets[n + 1]) for offsets in (first, second, third)]
        own = torch.cat([piece[:, at] for piece, at in zip(x, where, strict=True)], 1)
        alone, last = mix(own)
        assert_close(torch.cat([y[:, at] for y, at in zip(outputs, where, strict=True)], 1), alone)
        assert_close(state.content[n], last.content[0])
        assert_close(state.conv[n], last.conv[0])
    assert state.seen.tolist() == [8, 74, 20]


@each_kind
def test_packed_documents_are_apart(kind):
    mix, x = layer(kind), torch.randn(1, 20, 24).double().requires_grad_()
    y, _ = mix(x, None, torch.tensor([0, 8, 20]))
    (gradient,) = torch.autograd.grad(y[:, 8:].sum(), x)
    assert not gradient[:, :8].any()
    assert_close(y[:, 8:], mix(x[:, 8:])[0])


@each_kind
def test_select_and_copy_keep_states_apart(kind):
    mix, x = layer(kind), torch.randn(3, 9, 24).double()
    _, state = mix(x[:, :6])
    rows = torch.tensor([2, 0, 0])
    straight, _ = mix(x[:, 6:], state)
    assert_close(mix(x[:, 6:][rows], state.select(rows))[0], straight[rows])
    before = state.copy()
    mix(x[:, 6:], state)
    assert torch.equal(before.content, state.content) and torch.equal(before.conv, state.conv)
    with pytest.raises(ValueError, match="cannot forget the last 2 tokens"):
        state.crop(4)


@each_kind
def test_every_parameter_gets_a_gradient(kind):
    mix = layer(kind)
    x = torch.randn(2, 7, 24).double()
    y, state = mix(x[:, :4])
    (mix(x[:, 4:], state)[0].square().sum() + y.square().sum()).backward()
    for name, parameter in mix.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@each_kind
def test_costs_count_what_is_there(kind):
    mix = layer(kind).float()
    _, state = mix(torch.randn(1, 9, 24))
    assert mix.state_bytes(9) == state.nbytes - state.seen.nbytes
    assert mix.flops(20) == 2 * mix.flops(10) > 20 * 2 * mix.out_proj.weight.numel()


@each_kind
def test_no_tokens_and_no_state_are_fine(kind):
    mix, x = layer(kind), torch.randn(2, 5, 24).double()
    y, state = mix(x, return_state=False)
    assert state is None and torch.equal(y, mix(x)[0])
    _, state = mix(x[:, :3])
    empty, same = mix(x[:, :0], state)
    assert empty.shape == (2, 0, 24) and torch.equal(same.content, state.content)
    assert_close(mix(x[:, 3:], same)[0], y[:, 3:])


def recurrence(mix, scale, x, q, k, v, s, dt):
    """y of one head at a time and token by token, from the definition in (mu, I)."""
    heads = []
    for h in range(mix.num_heads):
        prior = mix.prior if mix.log_prior is None else mix.log_prior[h].exp()
        mean = torch.zeros(x.shape[0], mix.value_dim, mix.key_dim).double()
        importance, tokens = prior * torch.ones_like(mean), []
        for t in range(x.shape[1]):
            alpha = (-mix.A_log[h].exp() * dt[:, t, h])[:, None, None].exp()
            beta = torch.zeros(x.shape[0], mix.value_dim).double()
            if mix.beta_proj is not None:
                low = mix.beta_proj.up(mix.beta_proj.down(x[:, t])).unflatten(-1, (4, -1))[:, h]
                low = low.repeat_interleave(mix.value_dim // low.shape[-1], dim=-1)
                beta = s[:, t, h, None] * low.sigmoid() * softplus(mix.b_scale[h])
            key, old = k[:, t, h, None], importance
            importance = alpha * old + (1 - alpha) * prior + beta[..., None] * key**2
            write = s[:, t, h, None, None] * v[:, t, h, :, None] * key
            mean = alpha * old / importance * mean + write / importance
            read = scale * (mean * q[:, t, h, None]).sum(-1)
            tokens.append(read + mix.D[h] * v[:, t, h])
        heads.append(torch.stack(tokens, 1))
    return torch.stack(heads, 2)


def convolved(mix, x):
    conv = mix.conv1d
    padded = torch.nn.functional.pad(x, (0, 0, conv.width - 1, 0)).transpose(1, 2)
    y = torch.nn.functional.conv1d(padded, conv.weight, conv.bias, groups=x.shape[2])
    return silu(y.transpose(1, 2))


@pytest.mark.parametrize("kind", ["d", "d shared", "d plain"])
def test_d_is_its_equations(kind):
    mix, x = layer(kind), torch.randn(2, 11, 24).double()
    q, k, v = convolved(mix, mix.qkv_proj(x)).split(mix.sizes, -1)
    q, k, v = (part.unflatten(-1, (4, -1)) for part in (q, k, v))
    s, dt = mix.s_proj(x).sigmoid(), softplus(mix.dt_proj(x) + mix.dt_bias)
    y = recurrence(mix, mix.key_dim**-0.5, x, l2_normalize(q), l2_normalize(k), v, s, dt)
    y = rms_norm(y, [mix.value_dim], mix.norm.weight, 1e-6).flatten(2)
    assert_close(mix(x)[0], mix.out_proj(y * silu(mix.gate_proj(x))), 1e-10)


@pytest.mark.parametrize("kind", ["m", "m grouped", "m plain"])
def test_m_is_its_equations(kind):
    mix, x = layer(kind), torch.randn(2, 11, 24).double()
    z, vkq, dt = mix.in_proj(x).split([48, sum(mix.sizes), 4], -1)
    v, k, q = convolved(mix, vkq).split(mix.sizes, -1)
    q, k = (part.unflatten(-1, (-1, mix.key_dim)) for part in (q, k))
    q, k = (part[:, :, [h * part.shape[2] // 4 for h in range(4)]] for part in (q, k))
    dt = softplus(dt + mix.dt_bias)
    y = recurrence(mix, 1, x, q, k, v.unflatten(-1, (4, -1)), dt, dt).flatten(2)
    y = (y * silu(z)).unflatten(-1, (mix.norm.groups, -1))
    y = rms_norm(y, [y.shape[-1]], None, 1e-5).flatten(2) * mix.norm.weight
    assert_close(mix(x)[0], mix.out_proj(y), 1e-10)


@pytest.mark.parametrize("cls", [PalimpsaD, PalimpsaM])
def test_without_evidence_it_is_the_layer_without_metaplasticity(cls):
    mix = cls(24, 4, prior=2.0).double()
    plain = cls(24, 4, prior=2.0, metaplasticity=False).double()
    plain.load_state_dict({k: x for k, x in mix.state_dict().items() if k in plain.state_dict()})
    torch.nn.init.constant_(mix.b_scale, -1e3)
    x = torch.randn(2, 30, 24).double()
    assert_close(mix(x)[0], plain(x)[0])


SIZES = [  # hidden_size, num_heads, state_size, n_groups, expand, conv_kernel, T
    (32, 4, 8, 1, 2, 4, 50),
    (32, 4, 8, 2, 2, 4, 17),
    (24, 6, 5, 6, 2, 3, 70),
    (32, 4, 16, 2, 3, 4, 1),
]


@pytest.mark.parametrize("hidden, heads, state_size, groups, expand, conv, T", SIZES)
def test_m_without_metaplasticity_is_the_mamba2_of_transformers(
    hidden, heads, state_size, groups, expand, conv, T
):
    config = Mamba2Config(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=expand * hidden // heads,
        state_size=state_size,
        n_groups=groups,
        expand=expand,
        conv_kernel=conv,
        chunk_size=16,
        num_hidden_layers=1,
    )
    theirs = Mamba2Mixer(config, layer_idx=0)
    torch.nn.init.normal_(theirs.conv1d.bias)
    torch.nn.init.normal_(theirs.D)
    torch.nn.init.normal_(theirs.norm.weight)
    ours = PalimpsaM(
        hidden,
        heads,
        state_size=state_size,
        num_groups=groups,
        expand_v=expand,
        conv_size=conv,
        norm_groups=groups,
        norm_eps=config.layer_norm_epsilon,
        metaplasticity=False,
    )
    ours.load_state_dict(theirs.state_dict())
    x, dy = torch.randn(2, T, hidden), torch.randn(2, T, hidden)
    inputs, results = [x.clone().requires_grad_() for _ in range(2)], []
    for mix, leaf in zip((theirs, ours), inputs, strict=True):
        y = mix(leaf)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(dy)
        gradients = {name: p.grad for name, p in mix.named_parameters()}
        results.append({"y": y.detach(), "x": leaf.grad} | gradients)
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        got = results[1][name]
        assert (got - expected).norm() <= 3e-6 * (expected.norm() + 1e-6), name


@pytest.mark.parametrize("cls", [PalimpsaD, PalimpsaM])
def test_it_starts_as_published(cls):
    mix = cls(64, 32, learn_prior=True, prior=2.0)
    step, scale = softplus(mix.dt_bias), softplus(mix.b_scale)
    for value, low, high in ((step, 1e-3, 0.1), (scale, 0.1, 1.0), (mix.A_log.exp(), 1, 16)):
        assert low * (1 - 1e-5) <= value.min() < value.max() <= high * (1 + 1e-5)
        assert value.max() > 2 * value.min()
    assert (mix.D == 1).all() and torch.allclose(mix.log_prior.exp(), torch.tensor(2.0))
    assert mix.beta_proj.down.out_features == 4 and mix.beta_proj.up.weight.abs().max() <= 0.5
    mix.init_weights(std=0.5)
    assert 0.4 < mix.out_proj.weight.std() < 0.6
    narrow = cls(64, 4, b_scale=(0.01, 0.02))
    assert softplus(narrow.b_scale).max() < 0.0201


@each_kind
def test_gates_are_computed_in_float32_whatever_the_weights(kind, monkeypatch):
    mix, seen = layer(kind).bfloat16(), {}
    for name in ("palimpsa", "gated_linear_attention"):
        function = getattr(palimpsa, name)

        def spy(*arguments, function=function, **options):
            seen["gates"] = [x for x in arguments[3:] if isinstance(x, torch.Tensor)]
            seen["log_decay"] = arguments[3 if function is gated_linear_attention else 4]
            return function(*arguments, **options)

        monkeypatch.setattr(palimpsa, name, spy)
    x = torch.randn(2, 64, 24).bfloat16()
    y, state = mix(x)
    assert y.dtype == torch.bfloat16 and state.content.dtype == torch.float32
    for gate in seen["gates"]:
        assert gate.dtype == torch.float32 and (gate.bfloat16() != gate).any()
    dt = mix.dt_proj(x) if isinstance(mix, PalimpsaD) else mix.in_proj(x)[..., -4:]
    step = softplus(dt.double() + mix.dt_bias.double())
    torch.testing.assert_close(seen["log_decay"].double(), -mix.A_log.double().exp() * step)
    expected, _ = mix.double()(x.double())
    assert (y - expected).norm() < 0.05 * expected.norm()


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="palimpsa_d: hidden_size must be a multiple of num_head"):
        PalimpsaD(10, 4)
    with pytest.raises(ValueError, match="palimpsa_d: beta_groups must divide 6, got 4"):
        PalimpsaD(24, 4, beta_groups=4)
    with pytest.raises(ValueError, match="palimpsa_m: num_groups must divide 4, got 3"):
        PalimpsaM(24, 4, num_groups=3)
    with pytest.raises(ValueError, match="palimpsa_m: prior must be positive, got 0"):
        PalimpsaM(24, 4, prior=0)
    with pytest.raises(ValueError, match="palimpsa_d: b_scale must be a range of positive"):
        PalimpsaD(24, 4, b_scale=(0.0, 1.0))
