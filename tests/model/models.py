"""Tiny models of every mixer and of hybrids, all parameters at random so that no branch hides."""

import torch

from seqmix.model import SeqmixConfig, SeqmixForCausalLM

VOCABULARY = 31

MODELS = {
    "path": (["path"], {}),
    "path_fox": (["path_fox"], {}),
    "palimpsa_d": (["palimpsa_d"], {}),
    "palimpsa_m": (["palimpsa_m"], {}),
    "lattice_1": (["lattice"], {"lattice": {"chunk_size": 1}}),
    "lattice_4": (["lattice"], {"lattice": {"chunk_size": 4}}),
    "rope": (["attention"], {}),
    "nope": (["attention"], {"attention": {"position": "nope"}}),
    "alibi": (["attention"], {"attention": {"position": "alibi"}}),
    "fox": (["fox"], {}),
    "hybrid": (["path_fox", "palimpsa_d", "attention"], {}),
    "hybrid_m": (["palimpsa_m", "lattice", "path"], {"lattice": {"chunk_size": 4}}),
}
MIXERS = [name for name in MODELS if not name.startswith("hybrid")]
CROPPABLE = ("rope", "nope", "alibi", "fox")


def config(name: str, **changes) -> SeqmixConfig:
    mixers, options = MODELS[name]
    sizes = {
        "mixers": mixers,
        "mixer_options": options,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": max(2, len(mixers)),
        "num_heads": 2,
        "intermediate_size": 40,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return SeqmixConfig(**(sizes | changes))


def model(name: str, **changes) -> SeqmixForCausalLM:
    made = SeqmixForCausalLM(config(name, **changes)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return made


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random tokens without special ones."""
    return torch.randint(3, VOCABULARY, (batch, length))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|."""
    a, b = a.detach(), b.detach()
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def tensors(state) -> dict[str, torch.Tensor]:
    """All tensors of a state by name."""
    return {name: x for name, x in vars(state).items() if isinstance(x, torch.Tensor)}
