"""Lattice (arXiv 2504.05646v2): the definition. Unit slots take only what is orthogonal to them.

One head. The columns s_j of the state S [V, S] are the slots; all have length one. Each token takes
a step down its loss, in which S is normalised column by column, then S decays and returns to the
sphere.

    dec: |S k - v|^2 / 2     dot: -(S k) . v     enc: |S^T v - k|^2 / 2

    h = S k - v  (dec)       -v  (dot)           v  (enc)       what every slot is offered  [V]
    a = S^T h, clamped to [-|h|, |h|]                           what it holds of that       [S]
    c = k        (dec)        k  (dot)           a - k  (enc)   how much of it it wants     [S]
    b = 1 / sqrt(mu^2 + gamma^2 c^2 (|h|^2 - a^2))              back to length one          [S]
    khat = gamma b c
    S <- S * (mu b + a khat) - h khat^T                         y = S q

That is the exact rule, chunk_size C = 1. With C > 1, h .. khat of all tokens of a chunk come from
the state S_0 at its start: another function, parallel in the chunk.

    gated  (Eq. 17)    S_t = S_{t-1} * (mu b + a khat) - h khat^T
    frozen (Eq. 15)    S_t = S_{t-1} * (mu b) + S_0 * (a khat) - h khat^T

norm "token" uses this b, "chunk" sets b = 1. At the end of every chunk, the last partial one
included and for every C and norm, the slots are renormalised; y reads the states before that.
Chunks start at the first token of the call. Sweep i of `sweeps` takes h .. khat from the states of
sweep i - 1: one sweep is the paper's form; n sweeps make the first n tokens of a chunk exact.

Departures: the losses are half-squared (gamma absorbs the 2); |h|^2 - a^2 is a difference (Eq. 23
prints a sum); the old slot weighs mu^2 in b; enc at C > 1 takes c from S_0; sweeps are ours, and so
is the clamp, which unit slots never meet but sweeps need to stay bounded. mu > 0.
Cost O(T V S) a head and sweep, state V S numbers.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def lattice(
    q: Float[Tensor, "B T H S"],
    k: Float[Tensor, "B T H S"],
    v: Float[Tensor, "B T H V"],
    gamma: Float[Tensor, "B T H"],
    mu: Float[Tensor, "B T H"] | None = None,
    *,
    state: Float[Tensor, "B H V S"],
    objective: str = "dec",
    chunk_size: int = 1,
    form: str = "gated",
    norm: str = "token",
    sweeps: int = 1,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H V S"]]:
    """Write and read token by token; return outputs and the last state."""
    mu = torch.ones_like(gamma) if mu is None else mu
    states = []
    for begin in range(0, q.shape[1], chunk_size):
        chunk = [x[:, begin : begin + chunk_size].unbind(1) for x in (k, v, gamma, mu)]
        seen = after = [state] * len(chunk[0])
        for _ in range(sweeps):
            writes = [write(*token, objective, norm) for token in zip(seen, *chunk, strict=True)]
            after = run(state, writes, form)
            seen = [state, *after[:-1]]
        states += after
        state = renormalise(after[-1])
    outputs = [read(s, query) for s, query in zip(states, q.unbind(1), strict=True)]
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v), state


def write(
    seen: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor, objective: str, norm: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (h, mu b, a, khat) of a token that sees the state `seen`."""
    gamma, mu = gamma[..., None], mu[..., None]
    h = {"dec": read(seen, k) - v, "dot": -v, "enc": v}[objective]
    length = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    a = read(seen.mT, h).clamp(-length, length)
    c = a - k if objective == "enc" else k
    b = torch.ones_like(c)
    if norm == "token":
        b = (mu**2 + gamma**2 * c**2 * (length**2 - a**2)).rsqrt()
    return h, mu * b, a, gamma * b * c


def run(start: Tensor, writes: list[tuple[Tensor, ...]], form: str) -> list[Tensor]:
    """Return the state after each write of a chunk."""
    states = [start]
    for h, keep, a, khat in writes:
        corrected = states[-1] if form == "gated" else start
        kept = states[-1] * keep[..., None, :] + corrected * (a * khat)[..., None, :]
        states.append(kept - h[..., :, None] * khat[..., None, :])
    return states[1:]


def read(state: Tensor, q: Tensor) -> Tensor:
    """Return S q."""
    return (state * q[..., None, :]).sum(-1)


def renormalise(state: Tensor) -> Tensor:
    """Bring every slot back to length one (a slot of length zero stays)."""
    length = torch.linalg.vector_norm(state, dim=-2, keepdim=True)
    return state / length.clamp(min=torch.finfo(length.dtype).tiny)
