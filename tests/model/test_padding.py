"""Padding and packed documents: what is left out leaves no trace, and documents are apart."""

import pytest
import torch

from seqmix.model import CACHE_NAME
from tests.model.models import MIXERS, MODELS, distance, model, tensors, tokens


def padded(rows: list[torch.Tensor], fill: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded rows and their mask."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), fill)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    return ids, mask


@pytest.mark.parametrize("name", MODELS)
def test_left_padding_changes_nothing(name):
    made, rows = model(name), [tokens(1, n)[0] for n in (3, 9, 17)]
    ids, mask = padded(rows)
    embeds = made.model.embed_tokens(ids).detach().requires_grad_()
    logits = made(inputs_embeds=embeds, attention_mask=mask).logits
    weights = torch.randn_like(logits)
    (gradient,) = torch.autograd.grad((logits * weights).sum(), embeds)
    assert (gradient[mask == 0] == 0).all()
    for i, row in enumerate(rows):
        alone = made.model.embed_tokens(row[None]).detach().requires_grad_()
        y = made(inputs_embeds=alone).logits
        (expected,) = torch.autograd.grad((y * weights[i, -len(row) :]).sum(), alone)
        assert distance(logits[i, -len(row) :], y[0]) < 1e-5
        assert distance(gradient[i, -len(row) :], expected[0]) < 1e-5


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_padding_inside_a_row_leaves_no_trace(name):
    made, ids, mask = model(name), tokens(1, 12), torch.ones(1, 12, dtype=torch.long)
    mask[:, 4:7] = 0
    other = ids.clone()
    other[:, 4:7] = tokens(1, 3)
    first, second = (made(x, attention_mask=mask) for x in (ids, other))
    assert torch.equal(first.logits, second.logits)
    for a, b in zip(first[CACHE_NAME].states, second[CACHE_NAME].states, strict=True):
        assert all(torch.equal(x, tensors(b)[key]) for key, x in tensors(a).items())
    kept = made(ids[:, mask[0] == 1]).logits
    assert distance(first.logits[:, mask[0] == 1], kept) < 1e-5


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_one_padded_row_goes_on_with_many_tokens(name):
    made, ids = model(name), tokens(1, 16)
    whole = made(ids[:, 5:]).logits
    mask = torch.ones(1, 16, dtype=torch.long)
    mask[:, :5] = 0
    first = made(ids[:, :13], attention_mask=mask[:, :13])
    assert distance(first.logits[:, 5:], whole[:, :8]) < 1e-5
    cache = first[CACHE_NAME]
    assert cache.get_seq_length() == 13
    second = made(ids[:, 13:], attention_mask=mask, **{CACHE_NAME: cache})
    assert distance(second.logits, whole[:, 8:]) < 1e-5


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_warm_cache_takes_padded_tokens(name):
    made, past = model(name), tokens(2, 10)
    more, mask = padded([tokens(1, 4)[0], tokens(1, 7)[0]])
    cache = made(past)[CACHE_NAME]
    full = torch.cat([torch.ones(2, 10, dtype=torch.long), mask], 1)
    logits = made(more, attention_mask=full, **{CACHE_NAME: cache}).logits
    last = made(tokens(2, 1)[[0, 0]] * 0 + 5, **{CACHE_NAME: cache}).logits
    for i, length in enumerate((4, 7)):
        row = torch.cat([past[i], more[i, -length:], torch.tensor([5])])[None]
        whole = made(row).logits[0, 10:]
        assert distance(logits[i, -length:], whole[:-1]) < 1e-5
        assert distance(last[i], whole[-1:]) < 1e-5


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_row_of_padding_is_an_empty_document(name):
    made, ids = model(name), tokens(3, 6)
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1] = 0
    outputs = made(ids, attention_mask=mask)
    assert (outputs.logits[1] == 0).all()
    assert distance(outputs.logits[2], made(ids[2:]).logits[0]) < 1e-5
    cache, more = outputs[CACHE_NAME], tokens(3, 2)
    assert [state.seen.tolist() for state in cache.states] == [[6, 0, 6]] * len(cache)
    later = made(more, **{CACHE_NAME: cache}).logits
    assert distance(later[1], made(more[1:2]).logits[0]) < 1e-5
    nothing = made(ids, attention_mask=torch.zeros_like(mask))
    assert (nothing.logits == 0).all()
    assert (
        distance(made(more, **{CACHE_NAME: nothing[CACHE_NAME]}).logits, made(more).logits) < 1e-5
    )


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_no_tokens_give_no_logits(name):
    made = model(name)
    assert made(tokens(2, 0)).logits.shape == (2, 0, 31)
    assert made(tokens(0, 4)).logits.shape == (0, 4, 31)


@pytest.mark.parametrize("name", MODELS)
def test_documents_are_apart(name):
    made, ids = model(name), tokens(1, 20)
    borders = torch.tensor([0, 0, 7, 7, 20])
    embeds = made.model.embed_tokens(ids).detach().requires_grad_()
    logits = made(inputs_embeds=embeds, cu_seqlens=borders).logits
    changed = embeds.detach().clone()
    changed[:, 6] = torch.randn(32)
    later = made(inputs_embeds=changed, cu_seqlens=borders).logits
    assert torch.equal(logits[:, 7:], later[:, 7:])
    assert not torch.equal(logits[:, 6], later[:, 6])
    (gradient,) = torch.autograd.grad(logits[:, 7:].square().sum(), embeds)
    assert (gradient[:, :7] == 0).all() and (gradient[:, 7:] != 0).any()
    assert distance(logits[:, :7], made(ids[:, :7]).logits) < 1e-5
    assert distance(logits[:, 7:], made(ids[:, 7:]).logits) < 1e-5


@torch.no_grad()
def test_documents_win_over_a_mask_of_ones_and_refuse_padding():
    made, ids, borders = model("hybrid"), tokens(1, 9), torch.tensor([0, 4, 9])
    mask = torch.ones(1, 9, dtype=torch.long)
    packed = made(ids, cu_seqlens=borders).logits
    assert torch.equal(made(ids, cu_seqlens=borders, attention_mask=mask).logits, packed)
    mask[:, 0] = 0
    with pytest.raises(ValueError, match="SeqmixModel: attention_mask beside cu_seqlens must be"):
        made(ids, cu_seqlens=borders, attention_mask=mask)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"attention_mask": torch.ones(2, 1, 5, 5)},
            r"\[B=2, T=5\], 0 at padding, got \[2, 1, 5, 5\]",
        ),
        ({"attention_mask": torch.ones(2, 6)}, r"\[B=2, T=5\], 0 at padding, got \[2, 6\]"),
        ({"attention_mask": torch.ones(1, 5)}, r"\[B=2, T=5\], 0 at padding, got \[1, 5\]"),
        ({"attention_mask": torch.ones(5)}, r"\[B=2, T=5\], 0 at padding, got \[5\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "the batch must be packed into B=1, got B=2"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens must be int32 or int64"),
        ({"input_ids": None}, "give either input_ids or inputs_embeds"),
        ({"inputs_embeds": torch.ones(2, 5, 32)}, "give either input_ids or inputs_embeds"),
        ({"input_ids": torch.ones(5).long()}, r"input_ids must have shape \[B, T\], got \[5\]"),
        ({"labels": torch.ones(2, 4).long()}, r"labels must have shape \[B=2, T=5\], got \[2, 4\]"),
    ],
)
def test_a_wrong_input_is_one_line(inputs, message):
    made = model("rope")
    with pytest.raises(ValueError, match=f"^Seqmix[a-zA-Z]+: .*{message}"):
        made(**({"input_ids": tokens(2, 5)} | inputs))


def test_a_wrong_mask_beside_a_cache_names_both_lengths():
    made = model("rope")
    cache = made(tokens(2, 4))[CACHE_NAME]
    with pytest.raises(ValueError, match=r"\[B=2, T=3\] or \[B=2, past \+ T=7\], .* got \[2, 6\]"):
        made(tokens(2, 3), attention_mask=torch.ones(2, 6), **{CACHE_NAME: cache})
