"""The Lattice layer: the equations once more, pieces, ragged rows, packing, slots."""

import pytest
import torch
from torch.nn.functional import gelu, normalize, pad, rms_norm

from seqmix.layers.lattice import Lattice
from seqmix.reference.lattice import lattice

RULES = {
    "exact": {"chunk_size": 1},
    "enc": {"chunk_size": 1, "objective": "enc", "slots": 3, "forget_gate": False},
    "C4": {"chunk_size": 4, "slots": 9},
    "C16": {"chunk_size": 16, "objective": "dot"},
    "frozen": {"chunk_size": 16, "form": "frozen", "norm": "chunk", "forget_gate": False},
    "sweeps": {"chunk_size": 5, "sweeps": 2, "conv_size": 2},
}
each_rule = pytest.mark.parametrize("name", RULES)


def layer(name, **options):
    mix = Lattice(24, 4, **RULES[name] | options).double()
    for parameter in mix.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mix


def assert_close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def in_pieces(mix, x, size, state=None):
    pieces = []
    for piece in x.split(size, dim=1):
        y, state = mix(piece, state)
        pieces.append(y)
    return torch.cat(pieces, 1), state


def assert_same_state(a, b):
    """Equal but for what lies behind a row's pending tokens."""
    assert torch.equal(a.seen, b.seen)
    assert_close(a.slots, b.slots)
    assert_close(a.conv, b.conv)
    for x, y in ((a.k, b.k), (a.v, b.v), (a.gamma, b.gamma), (a.mu, b.mu)):
        if x is not None and y is not None:
            assert_close(x, y)


@each_rule
def test_it_is_its_equations(name):
    mix, x = layer(name), torch.randn(2, 21, 24).double()
    codes = mix.qk_conv.weight.shape[0] // 2
    taps = pad(mix.qk_proj(x), (0, 0, mix.qk_conv.width - 1, 0)).transpose(1, 2)
    conv = torch.nn.functional.conv1d(taps, mix.qk_conv.weight, groups=2 * codes).transpose(1, 2)
    q, k = (normalize(t.unflatten(-1, (4, -1)), dim=-1) for t in conv.split(codes, -1))
    v, gamma = mix.v_proj(x).unflatten(-1, (4, -1)), mix.gamma_proj(x).sigmoid()
    mu = None
    if mix.lambda_proj is not None:
        mu = 1 - gamma * 0.99 * mix.lambda_proj(x).sigmoid()
    rule = {"objective": "dec", "form": "gated", "norm": "token", "sweeps": 1} | RULES[name]
    rule = {key: rule[key] for key in ("objective", "chunk_size", "form", "norm", "sweeps")}
    start = normalize(mix.initial_slots, dim=1).expand(2, -1, -1, -1)
    y, _ = lattice(q, k, v, gamma, mu, state=start, **rule)
    y = rms_norm(y, (mix.head_dim,), mix.norm.weight, mix.norm.eps).flatten(2)
    assert_close(mix(x)[0], mix.o_proj(y * gelu(mix.gate_proj(x))), 1e-8)


@each_rule
@pytest.mark.parametrize(
    ("length", "size"), [(37, 1), (37, 3), (140, 63), (140, 64), (140, 65), (140, 100)]
)
def test_pieces_equal_the_whole(name, length, size):
    mix, x = layer(name), torch.randn(2, length, 24).double()
    whole, last = mix(x)
    y, state = in_pieces(mix, x, size)
    assert_close(y, whole)
    assert_same_state(state, last)
    assert state.seen.tolist() == [length, length]
    assert_close(mix(x, return_state=False)[0], whole)


@each_rule
def test_ragged_rows_go_on_like_single_sequences(name):
    mix, first, second, third = layer(name), [0, 5, 5, 23], [0, 3, 7, 8], [0, 0, 70, 71]
    x = [torch.randn(1, offsets[-1] + 2, 24).double() for offsets in (first, second, third)]
    state, outputs = None, []
    for piece, offsets in zip(x, (first, second, third), strict=True):
        y, state = mix(piece, state, torch.tensor(offsets))
        outputs.append(y)
    for n in range(3):
        where = [slice(offsets[n], offsets[n + 1]) for offsets in (first, second, third)]
        own = torch.cat([piece[:, at] for piece, at in zip(x, where, strict=True)], 1)
        alone, last = mix(own)
        assert_close(torch.cat([y[:, at] for y, at in zip(outputs, where, strict=True)], 1), alone)
        assert_same_state(state.select(torch.tensor([n])), last)
    assert state.seen.tolist() == [8, 74, 20]
    y, _ = mix(torch.randn(3, 9, 24).double(), state)  # rows of 3 and 4 and 0 pending tokens
    assert y.isfinite().all()


@each_rule
def test_packed_documents_are_apart_bitwise(name):
    mix, x = layer(name), torch.randn(1, 20, 24).double().requires_grad_()
    cu_seqlens = torch.tensor([0, 8, 20])
    y, _ = mix(x, None, cu_seqlens)
    (gradient,) = torch.autograd.grad(y[:, 8:].sum(), x)
    assert not gradient[:, :8].any()
    assert_close(y[:, 8:], mix(x[:, 8:])[0])
    changed = torch.cat([torch.randn(1, 8, 24).double(), x[:, 8:]], 1)
    for return_state in (True, False):
        pair = [mix(z, None, cu_seqlens, return_state=return_state)[0] for z in (x, changed)]
        assert torch.equal(pair[0][:, 8:], pair[1][:, 8:])


@each_rule
def test_rows_are_rows(name):
    mix, x = layer(name), torch.randn(3, 22, 24).double()
    rows = torch.tensor([2, 0, 0])
    y, state = mix(x[:, :14])
    assert_close(mix(x[rows, :14])[0], y[rows])
    straight, _ = mix(x[:, 14:], state)
    assert_close(mix(x[rows, 14:], state.select(rows))[0], straight[rows])
    before = state.copy()
    mix(x[:, 14:], state)
    assert all(torch.equal(a, b) for a, b in zip(tensors(before), tensors(state), strict=True))
    with pytest.raises(ValueError, match="cannot forget the last 2 tokens"):
        state.crop(12)


def tensors(state):
    found = []
    state.map(lambda x: found.append(x) or x)
    return found


@each_rule
def test_every_parameter_gets_a_gradient_also_through_the_state(name):
    mix, x = layer(name), torch.randn(2, 19, 24).double()

    def gradients(run):
        mix.zero_grad()
        run().square().sum().backward()
        return {key: p.grad.clone() for key, p in mix.named_parameters()}

    whole = gradients(lambda: mix(x, return_state=False)[0])
    pieces = gradients(lambda: in_pieces(mix, x, 7)[0])
    for key, gradient in whole.items():
        assert gradient.abs().sum() > 0, key
        assert_close(pieces[key], gradient)
    start, gradient = mix.initial_slots, whole["initial_slots"]
    assert_close((start * gradient).sum(1), torch.zeros_like(start[:, 0]))  # S_0 is normalised


@each_rule
def test_slots_keep_length_one(name):
    mix, x = layer(name).float(), torch.randn(2, 120, 24)
    state = None
    for piece in x.split(30, dim=1):
        _, state = mix(piece, state)
        length = state.slots.norm(dim=-2)
        torch.testing.assert_close(length, torch.ones_like(length), rtol=0, atol=1e-6)


def test_it_starts_with_mu_at_99_percent_and_never_loses_a_slot():
    mix = Lattice(64, 4)
    seen = []
    mix.lambda_proj.register_forward_hook(lambda m, x, y: seen.append(y))
    mix(torch.randn(2, 9, 64))
    mu = 1 - 0.99 * 0.5 * seen[0].sigmoid()
    assert 0.985 < mu.mean() < 0.995
    with torch.no_grad():  # gamma = lambda = 1: mu at its floor
        mix.gamma_proj.weight.fill_(1e3)
        mix.lambda_proj.bias.fill_(1e3)
    y, state = mix(torch.ones(1, 500, 64))
    assert y.isfinite().all()
    torch.testing.assert_close(state.slots.norm(dim=-2), torch.ones(1, 4, 16))


@each_rule
def test_costs_count_what_is_there(name):
    mix = layer(name).float()
    _, state = mix(torch.randn(1, 9, 24))
    assert mix.state_bytes(9) == state.nbytes - state.seen.nbytes
    assert mix.flops(20) == 2 * mix.flops(10) > 20 * 2 * mix.o_proj.weight.numel()


@each_rule
def test_no_tokens_and_no_state_are_fine(name):
    mix, x = layer(name), torch.randn(2, 5, 24).double()
    y, state = mix(x, return_state=False)
    assert state is None
    _, state = mix(x[:, :3])
    empty, same = mix(x[:, :0], state)
    assert empty.shape == (2, 0, 24)
    assert_same_state(same, state)
    assert_close(mix(x[:, 3:], same)[0], y[:, 3:])


@each_rule
def test_half_precision_is_near_single(name):
    mix = Lattice(24, 4, **RULES[name])
    x, state = torch.randn(2, 40, 24), None
    whole, _ = mix(x)
    y, state = mix.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16 and state.slots.dtype == torch.float32
    assert (y - whole).norm() < 0.1 * whole.norm()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="lattice: objective must be one of"):
        Lattice(24, 4, objective="mse")
    with pytest.raises(ValueError, match="lattice: sweeps > 1 needs form 'gated'"):
        Lattice(24, 4, chunk_size=4, sweeps=2, form="frozen")
    with pytest.raises(ValueError, match="lattice: hidden_size must be a multiple"):
        Lattice(25, 4)
