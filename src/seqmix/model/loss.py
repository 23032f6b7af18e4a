"""The next-token loss, computed a chunk of tokens at a time so that all logits never exist at once.

    loss = -sum_t log softmax(head(h_t))[target_t] / count       over t with target_t != -100

The logits of a chunk are computed again in the backward pass: one more product with the head
in exchange for [B, T, vocabulary] floats. A batch that fits one chunk pays nothing.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # the label that PyTorch and Hugging Face leave out
LOGITS_AT_ONCE = 2**24  # 64 MiB in float32, large enough to keep a GPU busy


def next_tokens(
    labels: Int[Tensor, "B T"],
    attention_mask: Tensor | None = None,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
) -> Int[Tensor, "B T"]:
    """The target at each token: the label of the next token of its document, or IGNORE.

    Padding is skipped: the target before a gap is the label behind it. The first token of a
    document is nobody's target. The last columns of `attention_mask` are those of `labels`.
    """
    length = labels.shape[1]
    labels = F.pad(labels, (0, 1), value=IGNORE)
    column = torch.arange(length + 1, device=labels.device)
    if cu_seqlens is not None:
        first = torch.isin(column, cu_seqlens) | (column >= cu_seqlens[-1])
        return labels.masked_fill(first, IGNORE)[:, 1:]
    if attention_mask is None:
        return labels[:, 1:]
    real = attention_mask[:, attention_mask.shape[1] - length :].bool()
    own = F.pad(column[:-1].where(real, length), (0, 1), value=length)
    following = own[:, 1:].flip(1).cummin(1).values.flip(1)
    return labels.gather(1, following).masked_fill(~real, IGNORE)


def chunked_cross_entropy(
    head: nn.Module,
    hidden: Float[Tensor, "B T D"],
    targets: Int[Tensor, "B T"],
    vocabulary: int,
    num_items: Tensor | int | None = None,
) -> Float[Tensor, ""]:
    """The summed loss over `num_items`, by default the number of targets (0 without any).

    `head` maps hidden states to logits; the softmax is computed in float32 (float64 stays).
    """
    rows = max(1, LOGITS_AT_ONCE // vocabulary)
    chunks = zip(hidden.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
    if targets.numel() <= rows:
        total = _summed(head, *next(chunks))
    else:
        parts = [checkpoint(_summed, head, *chunk, use_reentrant=False) for chunk in chunks]
        total = torch.stack(parts).sum()
    if num_items is None:
        num_items = (targets != IGNORE).sum().clamp(min=1)
    return total / num_items


def _summed(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
