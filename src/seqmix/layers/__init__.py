"""Layers: each mixer as an nn.Module that stands alone.

layer = PathAttention(hidden_size=256, num_heads=4)
y, state = layer(x)                # x [B, T, D]
y, state = layer(more, state)      # any number of further tokens
"""

from seqmix.layers.attention import Attention
from seqmix.layers.mixers import MIXERS, build_mixer, mixer_options
from seqmix.layers.state import State

__all__ = ["MIXERS", "Attention", "State", "build_mixer", "mixer_options"]
