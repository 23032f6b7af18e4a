"""The loss: equal to the plain one in value and gradients, without all logits at once."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from seqmix.model import loss as loss_module
from seqmix.model.loss import chunked_cross_entropy, next_tokens
from tests.model.models import model, tokens


def plain(logits, labels, mask=None):
    """The loss of every row by itself, its padding cut out."""
    losses = []
    for i in range(labels.shape[0]):
        kept = slice(None) if mask is None else mask[i] == 1
        predicted, wanted = logits[i, kept][:-1], labels[i, kept][1:]
        losses.append(cross_entropy(predicted, wanted, reduction="none")[wanted != -100])
    return torch.cat(losses)


@pytest.mark.parametrize("rows", [1, 7, 10_000])
def test_the_chunked_loss_equals_the_plain_one(rows, monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", rows * 31)
    made, ids = model("path_fox").double(), tokens(3, 11)
    labels = ids.clone()
    labels[0, 3:5] = -100
    expected = plain(made(ids).logits, labels).mean()
    wanted = torch.autograd.grad(expected, list(made.parameters()))
    made.train()
    value = made(ids, labels=labels).loss
    torch.testing.assert_close(value, expected)
    got = torch.autograd.grad(value, list(made.parameters()))
    torch.testing.assert_close(got, wanted)


def test_the_logits_of_all_tokens_never_exist(monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 8 * 31)
    made, ids, shapes = model("rope").train(), tokens(2, 30), []
    made.lm_head.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    made(ids, labels=ids).loss.backward()
    assert len(shapes) == 2 * 8  # 60 tokens in 8 chunks, forward and again in backward
    assert max(shape[0] for shape in shapes) == 8
    shapes.clear()
    outputs = made.eval()(ids, labels=ids, return_logits=False)
    assert outputs.logits is None and max(shape[0] for shape in shapes) == 8


def test_padding_is_neither_predicted_nor_predicts():
    made, ids = model("hybrid").double().train(), tokens(3, 12)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :5], mask[1, 3:6], mask[2, 9:] = 0, 0, 0
    value = made(ids, attention_mask=mask, labels=ids).loss
    logits = made(ids, attention_mask=mask).logits
    torch.testing.assert_close(value, plain(logits, ids, mask).mean())


def test_a_document_does_not_predict_the_next():
    made, ids = model("hybrid").double().train(), tokens(1, 15)
    borders = torch.tensor([0, 6, 6, 7, 13], dtype=torch.int32)
    value = made(ids, cu_seqlens=borders, labels=ids).loss
    pieces = [ids[:, :6], ids[:, 7:13]]  # a document of one token predicts nothing
    total = torch.cat([plain(made(piece).logits, piece) for piece in pieces])
    torch.testing.assert_close(value, total.mean())


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ({}, [11, 12, 13, 14, -100]),
        ({"attention_mask": [0, 1, 1, 0, 1]}, [-100, 12, 14, -100, -100]),
        ({"attention_mask": [0, 0, 0, 0, 0]}, [-100] * 5),
        ({"attention_mask": [1, 0, 1, 1, 1, 0, 1]}, [11, 12, 14, -100, -100]),
        ({"cu_seqlens": [0, 2, 2, 5]}, [11, -100, 13, 14, -100]),
        ({"cu_seqlens": [0, 0, 3]}, [11, 12, -100, -100, -100]),
        ({"cu_seqlens": [0]}, [-100] * 5),
    ],
)
def test_targets_by_hand(given, targets):
    labels = torch.arange(10, 15)[None]
    mask = given.get("attention_mask")
    borders = given.get("cu_seqlens")
    got = next_tokens(
        labels,
        None if mask is None else torch.tensor([mask]),
        None if borders is None else torch.tensor(borders, dtype=torch.int32),
    )
    assert got[0].tolist() == targets


def test_the_number_of_items_divides_the_sum():
    made, ids = model("rope").train(), tokens(2, 8)
    mean = made(ids, labels=ids).loss
    for number in (28, torch.tensor(28)):
        value = made(ids, labels=ids, num_items_in_batch=number).loss
        torch.testing.assert_close(value, mean * 14 / 28)
    nothing = made(ids, labels=torch.full_like(ids, -100)).loss
    assert nothing == 0 and nothing.requires_grad


def test_logits_are_there_unless_a_loss_was_asked_for_in_training():
    made, ids = model("rope"), tokens(2, 8)
    for mode in (True, False):
        made.train(mode)
        assert made(ids).logits.shape == (2, 8, 31)
        outputs = made(ids, labels=ids)
        assert (outputs.logits is None) == mode
        assert made(ids, labels=ids, return_logits=True).logits.shape == (2, 8, 31)
    last = made(ids, logits_to_keep=3).logits
    torch.testing.assert_close(last, made(ids).logits[:, -3:])
    some = made(ids, logits_to_keep=torch.tensor([0, 5])).logits
    torch.testing.assert_close(some, made(ids).logits[:, [0, 5]])


def test_the_softmax_is_in_float32():
    head = torch.nn.Linear(4, 64, bias=False).to(torch.bfloat16)
    hidden, targets = torch.randn(1, 50, 4).to(torch.bfloat16), torch.randint(64, (1, 50))
    value = chunked_cross_entropy(head, hidden, targets, 64)
    exact = cross_entropy(head(hidden).double().flatten(0, 1), targets.flatten())
    assert value.dtype == torch.float32
    assert abs(value.item() - exact.item()) < 1e-5
