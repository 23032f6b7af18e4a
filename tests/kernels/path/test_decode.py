"""The decode kernels against the same cache read by PyTorch in float64."""

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from seqmix.chunked.path_cache import Folded, Pending, extend
from seqmix.kernels.path.decode import decode
from tests.kernels.path.cases import DEVICE, error


def cache(N, T, P, F, H, G, K, V, gate, dtype=torch.float32):
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    pending = [
        normal(N, P, G, K),
        normal(N, P, G, V).to(dtype),
        normalize(normal(N, P, G, K), dim=-1),
    ]
    pending += [2 * torch.rand(N, P, G, device=DEVICE)]
    pending += [logsigmoid(normal(N, P, H) + 3) if gate else None]
    folded = [normal(N, F, G, K).to(dtype), normal(N, F, G, V).to(dtype)]
    folded += [-torch.rand(N, F, H, device=DEVICE) if gate else None]
    length = torch.arange(N, device=DEVICE) * 7 % (F + 1)
    first = torch.arange(N, device=DEVICE) % (P - T + 1)
    return normal(N, T, H, K).to(dtype), first, pending, folded, length


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(
    ("T", "P", "F", "H", "G", "K", "V"),
    [(1, 5, 70, 2, 1, 16, 16), (3, 64, 300, 2, 2, 20, 12), (20, 33, 1, 4, 2, 16, 16)],
)
def test_decoding_equals_reading_the_cache(T, P, F, H, G, K, V, gate):
    q, first, pending, folded, length = cache(3, T, P, F, H, G, K, V, gate)
    got = decode(q, first, *pending, *folded, length, 0.3)
    exact = [[None if x is None else x.double() for x in part] for part in (pending, folded)]
    wanted = extend(q.double(), first, Pending(*exact[0]), Folded(*exact[1], length), scale=0.3)
    assert error(got, wanted) < 1e-5
