"""Packed documents as padded rows, for implementations that know only rows.

Documents of a packed sequence [1, T, ...] are grouped by length (a factor of two at most within a
group, so that padding at most doubles the work), padded at their end with neutral tokens, run as
a batch, and put back.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Packed = tuple[Tensor | None, float]  # a packed tensor and the value of its neutral token


def over_documents(
    function: Callable[..., tuple[Sequence, Sequence, Sequence]],
    packed: Sequence[Packed],
    states: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    results: tuple[Sequence, Sequence, Sequence],
) -> tuple[Sequence, Sequence, Sequence]:
    """Call `function(*rows, *states)` on each group of documents and fill `results`.

    Without `cu_seqlens` the rows are what is given, and what `function` returns is the result, made
    contiguous and of the dtypes of `results`.

    packed: tensors [1, T, ...], handed over as rows [n, L, ...], each with its neutral value.
    states: tensors [N, ...], handed over as [n, ...].
    results, and what `function` returns for its group: packed tensors (written where documents
    are), states (written for documents that are not empty) and sums over the batch (added up).
    None passes through.
    """
    if cu_seqlens is None:
        found = function(*(x for x, _ in packed), *states)
        return tuple(map(_like, found, results))
    length = next(x for x, _ in packed if x is not None).shape[1]
    for documents, index in _groups(cu_seqlens, length):
        rows = [_unpack(x, index, neutral) for x, neutral in packed]
        some = [None if state is None else state[documents] for state in states]
        tokens, finals, sums = function(*rows, *some)
        real = index < length
        for whole, y in zip(results[0], tokens, strict=True):
            if whole is not None:
                whole[0, index[real]] = y[real].to(whole.dtype)
        for whole, final in zip(results[1], finals, strict=True):
            if whole is not None:
                whole[documents] = final.to(whole.dtype)
        for whole, part in zip(results[2], sums, strict=True):
            if whole is not None:
                whole += part
    return results


def pad_rows(x: Tensor | None, cu_seqlens: Tensor | None, neutral: float = 0.0) -> Tensor | None:
    """Packed documents [1, T, ...] as rows [N, L, ...], padded at their end; differentiable.

    Without `cu_seqlens` x holds rows already; None passes through.
    """
    if x is None or cu_seqlens is None:
        return x
    return _unpack(x, _index(cu_seqlens, x.shape[1]), neutral)


def pack_rows(rows: Tensor, cu_seqlens: Tensor, length: int) -> Tensor:
    """Rows [N, L, ...] as packed documents [1, length, ...], zero behind the last."""
    index = _index(cu_seqlens, length)
    packed = rows.new_zeros(length + 1, *rows.shape[2:])
    packed = packed.index_put((index.flatten(),), rows.flatten(0, 1))
    return packed[None, :length]


def _index(cu_seqlens: Tensor, length: int) -> Tensor:
    """Where each token of each row lies in the packed sequence; `length` for padding. [N, L]."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    longest = int((ends - starts).max()) if len(starts) else 0
    index = starts[:, None] + torch.arange(longest, device=cu_seqlens.device)
    return index.masked_fill(index >= ends[:, None], length)


def _groups(cu_seqlens: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Documents of similar length, not empty: their numbers [n] and token indices [n, L]."""
    offsets = cu_seqlens.long().cpu()
    lengths = offsets.diff()
    classes = torch.where(lengths > 0, (2 * lengths - 1).double().log2().floor(), -1.0)
    for size in classes.unique().tolist():
        if size < 0:
            continue
        documents = (classes == size).nonzero().squeeze(1)
        starts, ends = offsets[:-1][documents], offsets[1:][documents]
        index = starts[:, None] + torch.arange(int((ends - starts).max()))
        index = index.masked_fill(index >= ends[:, None], length)
        yield documents.to(cu_seqlens.device), index.to(cu_seqlens.device)


def _like(found: Sequence, wanted: Sequence) -> list:
    return [
        x if x is None or like is None else x.to(like.dtype).contiguous()
        for x, like in zip(found, wanted, strict=True)
    ]


def _unpack(x: Tensor | None, index: Tensor, neutral: float) -> Tensor | None:
    if x is None:
        return None
    behind = x.new_full((1, *x.shape[2:]), neutral)
    return torch.cat([x[0], behind])[index]


def each_document(
    function: Callable[..., tuple[Sequence, Sequence]],
    packed: Sequence[Tensor | None],
    states: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
) -> tuple[list, list]:
    """Call `function(*tokens, *states) -> (tokens, states)` on each document; differentiable.

    Without `cu_seqlens`, one call with everything. The tail behind the last document is zero.
    """
    if cu_seqlens is None:
        tokens, finals = function(*packed, *states)
        return list(tokens), list(finals)
    offsets = cu_seqlens.tolist()
    length = next(x for x in packed if x is not None).shape[1]
    pieces = [(a, b) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    results = [
        function(
            *(None if x is None else x[:, a:b] for x in packed),
            *(None if x is None else x[n : n + 1] for x in states),
        )
        for n, (a, b) in enumerate(pieces or [(0, 0)])
    ]
    tail = length - offsets[-1]
    tokens = [
        torch.cat([*parts, parts[0].new_zeros(1, tail, *parts[0].shape[2:])], 1)
        for parts in zip(*(tokens for tokens, _ in results), strict=True)
    ]
    finals = [
        torch.cat(parts)[: len(pieces)]
        for parts in zip(*(finals for _, finals in results), strict=True)
    ]
    return tokens, finals
