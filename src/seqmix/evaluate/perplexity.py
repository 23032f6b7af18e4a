"""Held-out loss: token perplexity and bits per byte of a causal language model on text.

    loss = - sum_t log p(x_t | x_<t in its window) / number of scored tokens
    perplexity = exp(loss)          bits per byte = - sum_t log2 p / bytes of the scored tokens

A document is tokenised as in training (with a BOS where the tokenizer adds one) and cut into
windows of `window` input tokens, one every `stride`. Each token is scored once, by the first window
that has it as a target. What has no context at all, the first token of a document without a BOS, is
not scored and its bytes are not counted. EOS is not scored: bits per byte then compares tokenizers.

Windows are batched before they are dealt to processes, each is summed by itself, and the sums are
added exactly: one process or many give the same bits. Any causal model of the library will do.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from seqmix.report import progress
from seqmix.tokenizer import encode


@dataclass(frozen=True)
class Window:
    """Consecutive tokens: all but the last are read, those from `first` on are scored."""

    ids: list[int]
    first: int


@torch.no_grad()
def perplexity(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    *,
    window: int = 1024,
    stride: int | None = None,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Return loss, perplexity and bits per byte of `model` on `documents`.

    `stride` is `window` by default: windows do not overlap, as the rows of training.
    """
    if not 1 <= (window if stride is None else stride) <= window:
        raise ValueError(f"perplexity: need 1 <= stride <= window, got {stride}, {window}")
    if batch_size < 1:
        raise ValueError(f"perplexity: batch_size must be at least 1, got {batch_size}")
    texts = [text for text in documents if text]
    windows: list[Window] = []
    scored_bytes = 0
    for text, ids in zip(texts, encode(tokenizer, texts) if texts else [], strict=True):
        has_bos = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
        scored_bytes += len(text.encode()) - (0 if has_bos else _first_bytes(tokenizer, text))
        windows += list(cut(ids, window, stride or window))
    tokens = sum(len(w.ids) - w.first for w in windows)
    if not tokens:
        raise ValueError("perplexity: the text has no token to score")
    nats = math.fsum(_score(model, windows, batch_size))
    return {
        "loss": nats / tokens,
        "perplexity": math.exp(min(nats / tokens, 700)),
        "bits_per_byte": nats / math.log(2) / scored_bytes,
        "tokens": tokens,
        "bytes": scored_bytes,
        "documents": len(texts),
        "window": window,
        "stride": stride or window,
    }


def cut(ids: list[int], window: int, stride: int) -> Iterator[Window]:
    """Cut a document into windows that score each token but the first exactly once."""
    scored = 1
    for start in range(0, len(ids) - 1, stride):
        piece = ids[start : start + window + 1]
        if start + len(piece) > scored:
            yield Window(piece, scored - start)
            scored = start + len(piece)


def _score(model: Any, windows: list[Window], batch_size: int) -> list[float]:
    """Return the summed -log p of each window, computed by all processes together."""
    state = PartialState()
    batches = [windows[i : i + batch_size] for i in range(0, len(windows), batch_size)]
    mine = range(state.process_index, len(batches), state.num_processes)
    was_training = model.training
    model.eval()
    with progress(shown=state.is_main_process) as bar:
        sums = [(i, _nats(model, batches[i])) for i in bar.track(mine, description="perplexity")]
    model.train(was_training)
    if state.num_processes > 1:
        sums = gather_object(sums)
    return [nats for _, batch in sorted(sums) for nats in batch]


def _nats(model: Any, batch: list[Window]) -> list[float]:
    """Score one batch, padded on the right: a causal model never looks there."""
    longest = max(len(w.ids) for w in batch)
    ids = torch.tensor([w.ids + [0] * (longest - len(w.ids)) for w in batch], device=model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    log_p = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].double().cpu()
    return [-log_p[row, w.first - 1 : len(w.ids) - 1].sum().item() for row, w in enumerate(batch)]


def _first_bytes(tokenizer: Any, text: str) -> int:
    """Count the bytes of the text's first token."""
    offsets = tokenizer(text[:256], return_offsets_mapping=True, split_special_tokens=True)
    return len(text[: offsets["offset_mapping"][0][1]].encode())
