"""The cache: pieces equal the whole, rows move together, forgetting is exact or refused."""

import copy

import pytest
import torch
from transformers import DynamicCache

from seqmix.model import CACHE_NAME, SeqmixCache
from tests.model.models import CROPPABLE, MODELS, distance, model, tensors, tokens


@torch.no_grad()
def run(made, ids, cache=None, **inputs):
    outputs = made(ids, use_cache=True, **{CACHE_NAME: cache}, **inputs)
    return outputs.logits, outputs[CACHE_NAME]


def in_pieces(made, ids, cuts):
    """Logits of `ids` cut at the columns `cuts`."""
    cache, logits = None, []
    for a, b in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        piece, cache = run(made, ids[:, a:b], cache)
        logits.append(piece)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cuts", [[1], [3], [63, 64, 65], [100]], ids=str)
def test_pieces_equal_the_whole(name, cuts):
    made, ids = model(name), tokens(2, 130)
    whole, last = run(made, ids)
    pieces, cache = in_pieces(made, ids, cuts)
    assert distance(pieces, whole) < 1e-4
    assert cache.get_seq_length() == last.get_seq_length() == 130


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_equals_the_whole(name):
    made, ids = model(name), tokens(2, 70)
    pieces, cache = in_pieces(made, ids, list(range(1, 70)))
    whole, last = run(made, ids)
    assert distance(pieces, whole) < 1e-4
    more = tokens(2, 5)  # the states are the same in what they mean, if not in their tensors
    assert distance(run(made, more, cache)[0], run(made, more, last)[0]) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_a_warm_cache_takes_many_tokens_and_then_decodes(name):
    made, ids = model(name), tokens(2, 37 + 16 + 10)
    whole, _ = run(made, ids)
    pieces, _ = in_pieces(made, ids, [37, *range(53, 63)])
    assert distance(pieces, whole) < 1e-4
    _, prompt = run(made, ids[:, :37])
    one, _ = run(made, ids[:, 37:38], prompt.copy())
    many, _ = run(made, ids[:, 37:53], prompt)
    assert distance(many[:, :1], one) < 1e-5


@pytest.mark.parametrize("name", ["path_fox", "palimpsa_m", "lattice_4", "fox"])
def test_pieces_equal_the_whole_in_bfloat16(name):
    made, ids = model(name), tokens(2, 96)
    exact, _ = run(made, ids)
    made.to(torch.bfloat16)
    whole, _ = run(made, ids)
    pieces, _ = in_pieces(made, ids, [48])
    assert distance(pieces.float(), exact) < 2 * distance(whole.float(), exact) + 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_has_seen_the_same(name):
    made = model(name)
    _, cache = run(made, tokens(2, 7))
    assert [state.seen.tolist() for state in cache.states] == [[7, 7]] * len(cache)
    assert [cache.get_seq_length(layer) for layer in range(len(cache))] == [7] * len(cache)


@pytest.mark.parametrize("name", MODELS)
def test_reordering_moves_every_tensor(name):
    made, rows = model(name), torch.tensor([2, 0, 0, 1])
    _, cache = run(made, tokens(3, 9))
    before = [tensors(state) for state in cache.states]
    cache.reorder_cache(rows)
    for old, state in zip(before, cache.states, strict=True):
        new = tensors(state)
        assert new.keys() == old.keys()
        for key in old:
            assert torch.equal(new[key], old[key][rows]), key
    cache.batch_select_indices(torch.tensor([3]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 2
    assert torch.equal(cache.states[0].seen, before[0]["seen"][[1, 1]])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("twin", [SeqmixCache.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_prefix_is_computed_once_and_used_twice(name, twin):
    made, prefix, ends = model(name), tokens(1, 20), [tokens(1, 6), tokens(1, 8)]
    _, cache = run(made, prefix)
    for end in ends:
        own = twin(cache)
        logits, own = run(made, end, own)
        whole, _ = run(made, torch.cat([prefix, end], 1))
        assert distance(logits, whole[:, 20:]) < 1e-5
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("name", CROPPABLE)
def test_keys_and_values_are_cropped_exactly(name):
    made, ids = model(name), tokens(2, 30)
    whole, _ = run(made, ids)
    _, cache = run(made, torch.cat([ids[:, :20], tokens(2, 7)], 1))
    cache.crop(-7)
    assert cache.is_croppable and cache.get_seq_length() == 20
    assert distance(run(made, ids[:, 20:], cache)[0], whole[:, 20:]) < 1e-5
    cache.crop(20)
    assert cache.get_seq_length() == 20
    assert distance(run(made, ids[:, 20:], cache)[0], whole[:, 20:]) < 1e-5
    cache.crop(0)
    assert cache.get_seq_length() == 30


def test_path_crops_inside_its_pending_window_and_refuses_beyond():
    made, ids = model("path"), tokens(1, 30)
    whole, _ = run(made, ids)
    _, cache = in_pieces(made, torch.cat([ids[:, :20], tokens(1, 3)], 1), [20, 21, 22])
    cache.crop(-3)
    assert distance(run(made, ids[:, 20:], cache)[0], whole[:, 20:]) < 1e-5
    with pytest.raises(ValueError, match=r"cannot"):
        run(made, tokens(1, 200), cache)[1].crop(-200)


@pytest.mark.parametrize("name", ["palimpsa_d", "palimpsa_m", "lattice_1", "hybrid"])
def test_a_memory_of_fixed_size_refuses_to_forget(name):
    made = model(name)
    _, cache = run(made, tokens(1, 9))
    assert not cache.is_croppable
    before = [tensors(state) for state in cache.states]
    with pytest.raises(ValueError, match="cannot forget the last 4 tokens"):
        cache.crop(-4)
    assert cache.get_seq_length() == 9
    for old, state in zip(before, cache.states, strict=True):
        assert all(torch.equal(x, old[key]) for key, x in tensors(state).items())


def test_padding_is_not_cropped():
    made, ids = model("rope"), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    _, cache = run(made, ids, attention_mask=mask)
    new = tokens(2, 4)
    expected, cache = run(made, new, cache)
    cache.crop(-5)
    again, cache = run(made, torch.cat([ids[:, -1:], new], 1), cache)
    torch.testing.assert_close(again[:, 1:], expected)
    with pytest.raises(ValueError, match="cannot crop into padding, 2 columns may hold some"):
        cache.crop(-9)


@pytest.mark.parametrize(
    "given", [(), DynamicCache(), SeqmixCache(7)], ids=lambda x: type(x).__name__
)
def test_another_cache_is_refused(given):
    made = model("rope")
    with pytest.raises(
        ValueError, match="SeqmixModel: the cache must be a SeqmixCache of 2 layers"
    ):
        run(made, tokens(1, 3), given)


def test_a_cache_of_other_rows_is_refused():
    made = model("rope")
    _, cache = run(made, tokens(3, 5))
    with pytest.raises(ValueError, match="SeqmixModel: the cache has 3 rows, the input 2"):
        run(made, tokens(2, 1), cache)


def test_both_names_of_the_cache_go_in_and_the_librarys_comes_out():
    made, ids = model("rope"), tokens(1, 5)
    for name in ("cache", "past_key_values"):
        cache = SeqmixCache(2)
        assert made(ids, **{name: cache})[CACHE_NAME] is cache
        assert cache.get_seq_length() == 5


@pytest.mark.parametrize("name", MODELS)
def test_gradients_flow_through_the_cache(name):
    made, ids = model(name), tokens(1, 12)
    embeds = made.model.embed_tokens(ids).detach().requires_grad_()
    whole = made(inputs_embeds=embeds, use_cache=False).logits[:, 6:]
    weights = torch.randn_like(whole)
    (expected,) = torch.autograd.grad((whole * weights).sum(), embeds)
    cache = made(inputs_embeds=embeds[:, :6], use_cache=True)[CACHE_NAME]
    later = made(inputs_embeds=embeds[:, 6:], **{CACHE_NAME: cache}).logits
    (gradient,) = torch.autograd.grad((later * weights).sum(), embeds, retain_graph=True)
    assert distance(gradient, expected) < 1e-4
    cache.detach()
    assert not any(x.requires_grad for state in cache.states for x in tensors(state).values())


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_those_of_the_layers(name):
    made = model(name)
    _, cache = run(made, tokens(1, 50))
    assert made.state_bytes(50) == made.model.state_bytes(50)
    assert 0.5 < cache.nbytes / made.state_bytes(50) < 2
    head = 2 * 50 * made.lm_head.weight.numel()
    assert made.flops(50) == made.model.flops(50) + head
    matrices = sum(p.numel() for p in made.model.layers.parameters() if p.ndim == 2)
    assert made.model.flops(50) > 1.5 * 50 * matrices
