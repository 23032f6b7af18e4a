"""The protocol of states: rows, copies, crops."""

from dataclasses import dataclass

import pytest
import torch

from seqmix.layers.state import State, append


@dataclass(frozen=True)
class Memory(State):
    content: torch.Tensor
    extra: torch.Tensor | None = None


def memory() -> Memory:
    return Memory(torch.tensor([3, 5]), torch.arange(6.0).view(2, 3))


def test_select_takes_every_tensor_by_row():
    chosen = memory().select(torch.tensor([1, 1, 0]))
    assert chosen.seen.tolist() == [5, 5, 3]
    assert chosen.content.tolist() == [[3, 4, 5], [3, 4, 5], [0, 1, 2]]
    assert chosen.extra is None


def test_a_copy_shares_nothing():
    first = memory()
    second = first.copy()
    second.content.zero_()
    assert first.content.sum() == 15


def test_crop_refuses_where_the_past_is_gone():
    state = memory()
    assert state.crop(5) is state
    assert state.crop(9) is state
    with pytest.raises(ValueError, match="Memory: cannot forget the last 2 tokens"):
        state.crop(3)
    with pytest.raises(ValueError, match="Memory: cannot forget the last 1 tokens"):
        state.crop(-1)


def test_bytes_count_every_tensor():
    assert memory().nbytes == 2 * 8 + 6 * 4


def test_append_writes_behind_each_row():
    rows = torch.tensor([[1.0, 2.0, 0.0], [4.0, 0.0, 0.0]])
    more = append(rows, torch.tensor([2, 1]), torch.tensor([[7.0, 8.0], [9.0, 0.0]]))
    assert more.tolist() == [[1, 2, 7, 8, 0], [4, 9, 0, 0, 0]]
