"""The cache of a model: one state per layer, in the clothes that `generate()` expects.

States are immutable (layers/state.py); the cache is the list of the newest ones, and counts the
columns it has seen, padding included, as `generate()` counts them.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from seqmix.layers.attention import KeyValueState
from seqmix.layers.path import PathState
from seqmix.layers.state import State

# What the installed transformers calls the cache: `cache` now, `past_key_values` earlier in 5.x.
CACHE_NAME = next(
    name
    for name in ("cache", "past_key_values")
    if name in {field.name for field in fields(CausalLMOutputWithPast)}
)


class SeqmixCache(Cache):
    """The states of all layers behind the tokens seen so far.

    states: one per layer, None before the first token. Each has one row a sequence.
    columns: columns of `input_ids` seen; padded: how many of them, from the left, may hold padding.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.states: list[State | None] = [None] * num_layers
        self.columns = self.padded = 0

    def rows(self, count: int) -> list[State | None]:
        """The states, to go on with `count` rows. ValueError if they have another number."""
        if self.batch_size not in (-1, count):
            raise ValueError(
                f"SeqmixModel: the cache has {self.batch_size} rows, the input {count}"
            )
        return self.states

    def advance(self, states: list[State | None], columns: int, padded: int = 0) -> None:
        """Take over the states behind `columns` more columns, the first `padded` with padding."""
        self.states = states
        self.padded = self.columns + padded if padded else self.padded
        self.columns += columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of `input_ids` seen so far, padding included; the same for every layer."""
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from what was row `beam_idx[i]`."""
        self._update(lambda state: state.select(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, side by side."""
        self._update(
            lambda state: state.select(
                torch.arange(len(state.seen), device=state.seen.device).repeat_interleave(repeats)
            )
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` columns, exactly or with ValueError.

        A positive number is the length to keep, as earlier versions call it; 0 does nothing.
        """
        keep = tokens_to_remove if tokens_to_remove > 0 else self.columns + tokens_to_remove
        drop = self.columns - max(keep, 0)
        if drop <= 0:
            return
        if self.columns - drop < self.padded:
            raise ValueError(
                f"SeqmixCache: cannot crop into padding, {self.padded} columns may hold some"
            )
        self._update(lambda state: state.crop(-drop))
        self.columns -= drop

    def copy(self) -> Self:
        """A cache that goes its own way from here, so that a prefix is computed once."""
        twin = type(self)(len(self.states))
        twin.states = [state.copy() if state is not None else None for state in self.states]
        twin.columns, twin.padded = self.columns, self.padded
        return twin

    def __deepcopy__(self, memo: dict) -> Self:
        return self.copy()

    def detach(self) -> None:
        """Cut the states off from the graph that computed them (truncated backpropagation)."""
        self._update(lambda state: state.detach())

    def reset(self) -> None:
        """Forget everything."""
        self.states = [None for _ in self.states]
        self.columns = self.padded = 0

    def _update(self, function: Callable[[State], State]) -> None:
        self.states = [state if state is None else function(state) for state in self.states]

    @property
    def batch_size(self) -> int:
        """The number of rows, -1 before the first token."""
        return next((len(state.seen) for state in self.states if state is not None), -1)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.states if state is not None)

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"SeqmixCache({len(self)} layers, {self.columns} columns)"

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        """False: states are replaced, so none keeps its address."""
        return False

    @property
    def is_initialized(self) -> bool:
        return self.batch_size >= 0

    @property
    def is_croppable(self) -> bool:
        """Whether the tokens of the last call can be taken back (in PaTH, at most a window)."""
        return all(isinstance(state, KeyValueState | PathState) for state in self.states)

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """False also for fixed-size memories: this cache knows its length, so inputs are sliced."""
        return [False] * len(self)
