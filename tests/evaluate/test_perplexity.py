import json
import math
from types import SimpleNamespace

import pytest
import torch

from seqmix.cli import main
from seqmix.evaluate.perplexity import cut, perplexity
from seqmix.run import load_model
from seqmix.tokenizer import encode, train_tokenizer
from seqmix.train import train
from tests import runs


class Table(torch.nn.Module):
    """A bigram model: the logits of the next token depend on the last one."""

    def __init__(self, vocabulary):
        super().__init__()
        torch.manual_seed(0)
        self.logits = torch.nn.Parameter(torch.randn(vocabulary, vocabulary, dtype=torch.float64))
        self.device = torch.device("cpu")

    def forward(self, input_ids, use_cache=None):
        return SimpleNamespace(logits=self.logits[input_ids])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perplexity")
    train(runs.recipe(folder, steps=5), folder / "run")
    return folder


@pytest.mark.parametrize("bos", [True, False])
def test_one_sentence_by_hand(bos):
    tokenizer = train_tokenizer(runs.documents(), 300, bos=bos)
    text = "né the whale"
    ids = encode(tokenizer, [text])[0]
    model = Table(len(tokenizer))
    log_p = model.logits.detach().log_softmax(-1)
    nats = -sum(log_p[a, b].item() for a, b in zip(ids, ids[1:], strict=False))
    scored = text if bos else tokenizer.decode(ids[1:])
    scores = perplexity(model, tokenizer, [text])
    assert scores["tokens"] == len(ids) - 1
    assert scores["bytes"] == len(scored.encode()) == (13 if bos else 12)
    assert scores["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-6)
    bits = nats / math.log(2) / len(scored.encode())
    assert scores["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 20, 33])
@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (8, 1), (1, 1), (5, 4)])
def test_every_token_but_the_first_is_scored_once_with_all_the_context_it_can_have(
    length, window, stride
):
    seen = []
    for w in cut(list(range(length)), window, stride):
        assert w.ids == list(range(w.ids[0], w.ids[0] + len(w.ids))) and w.first >= 1
        seen += [(token, token - w.ids[0]) for token in w.ids[w.first :]]
    assert [token for token, _ in seen] == list(range(1, length))
    assert all(context >= min(token, window - stride + 1) for token, context in seen)
    assert all(context <= window for _, context in seen)


def test_a_long_window_scores_the_document_as_one(trained):
    model, tokenizer = load_model(str(trained / "run"))
    document = runs.documents(3, 40)
    ids = torch.tensor(encode(tokenizer, document[2:]))
    log_p = model(input_ids=ids).logits[0, :-1].log_softmax(-1).detach()
    nats = -log_p.gather(1, ids[0, 1:, None]).double().sum().item()
    scores = perplexity(model, tokenizer, document[2:], window=10_000)
    assert scores["loss"] == pytest.approx(nats / (ids.shape[1] - 1), rel=1e-6)


@pytest.mark.parametrize("batch_size", [2, 5, 100])
def test_the_batch_size_does_not_matter(trained, batch_size):
    model, tokenizer = load_model(str(trained / "run"))
    alone, batched = (
        perplexity(model, tokenizer, runs.documents(7, 30), window=16, stride=5, batch_size=size)
        for size in (1, batch_size)
    )
    for name, value in alone.items():
        assert batched[name] == pytest.approx(value, rel=1e-6)


def test_more_context_lowers_the_loss_of_a_model_that_can_use_it(trained):
    model, tokenizer = load_model(str(trained / "run"))
    short, long = (
        perplexity(model, tokenizer, runs.documents(7), window=window)["loss"] for window in (1, 64)
    )
    assert long < short


@pytest.mark.parametrize(
    ("options", "texts", "message"),
    [
        ({"window": 0}, ["a"], "need 1 <= stride <= window, got None, 0"),
        ({"window": 4, "stride": 5}, ["a"], "need 1 <= stride <= window, got 5, 4"),
        ({"window": 4, "stride": 0}, ["a"], "need 1 <= stride <= window, got 0, 4"),
        ({"batch_size": -1}, ["a"], "batch_size must be at least 1, got -1"),
        ({}, [], "the text has no token to score"),
        ({}, [""], "the text has no token to score"),
    ],
)
def test_what_cannot_be_scored_is_refused(options, texts, message):
    tokenizer = train_tokenizer(["a"], 258)
    with pytest.raises(ValueError, match=message):
        perplexity(Table(258), tokenizer, texts, **options)


@pytest.mark.slow
def test_two_and_three_processes_give_the_bits_of_one(trained, tmp_path):
    words = ["evaluate", str(trained / "run"), "--files", str(trained / "text.jsonl")]
    words += ["--window", "16", "--batch-size", "5", "--out", str(tmp_path / "scores.json")]
    figures = []
    for processes in (1, 2, 3):
        if processes == 1:
            assert main(words) == 0
        else:
            runs.command(processes, *words)
        result = json.loads((tmp_path / "scores.json").read_text())
        assert result["processes"] == processes
        figures.append(result["perplexity"])
    assert figures[0]["tokens"] > 5 * 16 and figures[0] == figures[1] == figures[2]
