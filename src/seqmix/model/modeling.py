"""One Hugging Face model for every mixer and hybrid.

    x = embed(tokens)
    x = x + mixer(norm(x));  x = x + mlp(norm(x))      every block
    logits = head(norm(x))

Padding is turned into packed documents once, at the top: a row becomes a document without its
padding, so the layers never see a mask and every state keeps one row a sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from seqmix.layers.attention import Attention
from seqmix.layers.common import RMSNorm
from seqmix.layers.mixers import build_mixer
from seqmix.layers.path import PathAttention
from seqmix.layers.state import State
from seqmix.model.cache import CACHE_NAME, SeqmixCache
from seqmix.model.config import SeqmixConfig
from seqmix.model.loss import chunked_cross_entropy, next_tokens
from seqmix.model.padding import Packing
from seqmix.ops.check import Arguments

HALF = (torch.float16, torch.bfloat16)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def init_weights(self, std: float) -> None:
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(linear.weight, std=std)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SeqmixBlock(GradientCheckpointingLayer):
    """Norm, mixer, residual; norm, SwiGLU, residual (unless the mixer is a whole block itself)."""

    def __init__(self, config: SeqmixConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer: Any = build_mixer(
            config.mixers[layer],
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            **config.layer_options(layer),
        )
        for parameter in self._special().values():
            if parameter.dtype in HALF:
                parameter.data = parameter.data.float()
        self.mlp = None
        if config.intermediate_size and self.mixer.mlp:
            self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def init_weights(self, std: float) -> None:
        for part in cast(Iterator[Any], self.children()):
            part.init_weights(std)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: State | None = None,
        cu_seqlens: Int[Tensor, "N+1"] | None = None,
        return_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], State | None]:
        y, state = self.mixer(self.mixer_norm(x), state, cu_seqlens, return_state=return_state)
        x = x + y
        if self.mlp is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x, state

    def flops(self, length: int) -> int:
        """Forward FLOPs of one sequence of `length` tokens."""
        mlp = 0 if self.mlp is None else 6 * length * self.mlp.up_proj.weight.numel()
        return self.mixer.flops(length) + mlp

    def _special(self) -> dict[str, nn.Parameter]:
        """Gates, decays and priors of the mixer: always in float32, half precision hurts them."""
        names = tuple(self.mixer.no_decay)
        return {name: p for name, p in self.mixer.named_parameters() if name.endswith(names)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast everything, but cast nothing special to half precision."""
        exact = {name: p.data for name, p in self._special().items()}
        super()._apply(fn, recurse)
        for name, parameter in self._special().items():
            if parameter.dtype in HALF:
                parameter.data = exact[name].to(parameter.device)
        return self


class SeqmixPreTrainedModel(PreTrainedModel):
    """What both models share with the library: names and initialisation."""

    config_class = SeqmixConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SeqmixBlock"]

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Set every parameter that no checkpoint has set; the library marks those that one has."""
        for part in _parts(self):
            parameters = list(part.parameters())
            loaded = [(p, p.clone()) for p in parameters if getattr(p, "_is_hf_initialized", False)]
            if len(loaded) < len(parameters):
                self._init_weights(part)
                for parameter, value in loaded:
                    parameter.copy_(value)

    def _init_weights(self, module: Any) -> None:
        if hasattr(module, "init_weights"):
            module.init_weights(self.config.initializer_range)
        else:
            super()._init_weights(module)


class SeqmixModel(SeqmixPreTrainedModel):
    """Embedding, blocks and the last norm."""

    def __init__(self, config: SeqmixConfig) -> None:
        super().__init__(config)
        if len(config.mixers) != config.num_hidden_layers:
            raise ValueError(
                f"SeqmixModel: config.mixers names {len(config.mixers)} layers, "
                f"num_hidden_layers is {config.num_hidden_layers}; change both"
            )
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks = nn.ModuleList(SeqmixBlock(config, i) for i in range(config.num_hidden_layers))
        self.layers = cast(Sequence[SeqmixBlock], blocks)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self._keep_in_fp32_modules_strict = {
            f"mixer.{name}" for block in self.layers for name in block.mixer.no_decay
        }
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        cache: SeqmixCache | None = None,
        past_key_values: SeqmixCache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Int[Tensor, "N+1"] | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Run the blocks over the tokens, on from `cache` if there is one.

        attention_mask: [B, T], or [B, past + T] of which the last T columns count. 0 is padding,
            which may stand anywhere in a row; outputs are zero there.
        cache: goes on from it and advances it; `past_key_values` is its name in earlier versions.
        use_cache: start a cache; by default as `config.use_cache` says, and not in training.
        cu_seqlens: borders of packed documents (B = 1); a mask beside it must be all ones.
        """
        x = self._embed(input_ids, inputs_embeds)
        cache = self._cache(cache if past_key_values is None else past_key_values, use_cache)
        past = 0 if cache is None else cache.columns
        packing = Packing.of(x, attention_mask, past, cu_seqlens)
        old = [None] * len(self.layers) if cache is None else cache.rows(packing.rows)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        x, hidden, states = packing.pack(x), [], []
        for block, state in zip(self.layers, old, strict=True):
            if output_hidden_states:
                hidden.append(packing.unpack(x))
            x, state = block(x, state, packing.cu_seqlens, cache is not None)
            states.append(state)
        x = packing.unpack(self.norm(x))
        if cache is not None:
            cache.advance(states, packing.length, packing.padded)
        all_hidden = (*hidden, x) if output_hidden_states else None
        output: dict[str, Any] = {"hidden_states": all_hidden, CACHE_NAME: cache}
        return BaseModelOutputWithPast(x, **output)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if inputs_embeds is not None and input_ids is None:
            return inputs_embeds
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("SeqmixModel: give either input_ids or inputs_embeds")
        Arguments("SeqmixModel", input_ids).shape("input_ids", input_ids, "B T")
        return self.embed_tokens(input_ids)

    def _cache(self, cache: SeqmixCache | None, use_cache: bool | None) -> SeqmixCache | None:
        """The cache to go on from, a new one, or None."""
        checkpoints = any(block.gradient_checkpointing for block in self.layers)
        recomputed = checkpoints and self.training and torch.is_grad_enabled()
        if cache is None:
            if use_cache is None:
                use_cache = self.config.use_cache and not self.training
            return SeqmixCache(len(self.layers)) if use_cache and not recomputed else None
        if not isinstance(cache, SeqmixCache) or len(cache) != len(self.layers):
            raise ValueError(
                f"SeqmixModel: the cache must be a SeqmixCache of {len(self.layers)} layers "
                f"(model(..., use_cache=True) returns one), got {cache!r}"
            )
        if recomputed:
            raise ValueError("SeqmixModel: gradient checkpointing cannot go on from a cache")
        return cache

    def flops(self, length: int) -> int:
        """Forward FLOPs of one sequence of `length` tokens; a multiply-add counts as two."""
        return sum(block.flops(length) for block in self.layers)

    def state_bytes(self, length: int) -> int:
        """Bytes of the cache behind one sequence of `length` tokens."""
        return sum(block.mixer.state_bytes(length) for block in self.layers)


class SeqmixForCausalLM(SeqmixPreTrainedModel, GenerationMixin):
    """The model with its head: logits, next-token loss, `generate()`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs = True  # the Trainer gives num_items_in_batch

    def __init__(self, config: SeqmixConfig) -> None:
        super().__init__(config)
        self.model = SeqmixModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Assisted decoding takes tokens of the last call back; the library refuses stateful models.
        self._is_stateful = not self._has_only(Attention, PathAttention)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        cache: SeqmixCache | None = None,
        past_key_values: SeqmixCache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Int[Tensor, "N+1"] | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits without labels; with them the loss, and outside training the logits as well.

        labels: as `input_ids`, shifted here; -100 is left out, and so are padding and the first
            token of a document. The loss never holds the logits of all tokens at once.
        logits_to_keep: logits of that many last tokens, or of the given positions; 0 is all.
        return_logits: overrules when logits are returned.
        num_items_in_batch: divides the summed loss; by default the number of predicted tokens.
        output_attentions: refused; here because PEFT always passes it.
        """
        if output_attentions:
            raise ValueError("SeqmixForCausalLM: output_attentions must be False, none are kept")
        if use_cache is None and labels is not None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden, loss, logits = outputs.last_hidden_state, None, None
        if labels is not None:
            check = Arguments("SeqmixForCausalLM", hidden)
            check.shape("hidden", hidden, "B T D")
            check.shape("labels", labels, "B T")
            targets = next_tokens(labels, attention_mask, cu_seqlens)
            size = self.config.vocab_size
            loss = chunked_cross_entropy(self.lm_head, hidden, targets, size, num_items_in_batch)
        if return_logits is None:
            return_logits = labels is None or not self.training
        if return_logits:
            last = isinstance(logits_to_keep, int)
            kept = slice(-logits_to_keep, None) if last else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        rest = {name: getattr(outputs, name) for name in ("hidden_states", CACHE_NAME)}
        return CausalLMOutputWithPast(loss, logits, **rest)

    def _has_only(self, *mixers: type[nn.Module]) -> bool:
        return all(isinstance(block.mixer, mixers) for block in self.model.layers)

    def flops(self, length: int) -> int:
        """Forward FLOPs of one sequence of `length` tokens, the head's included."""
        return self.model.flops(length) + 2 * length * self.lm_head.weight.numel()

    def state_bytes(self, length: int) -> int:
        """Bytes of the cache behind one sequence of `length` tokens."""
        return self.model.state_bytes(length)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> Any:
        """Hand `generate()` our cache where it would make one of keys and values."""
        if generation_config.is_assistant and not self._has_only(Attention):
            raise ValueError(
                "SeqmixForCausalLM: only attention and fox layers can draft for assisted decoding, "
                "because drafts are taken back after several calls"
            )
        if generation_config.use_cache is False or model_kwargs.get(CACHE_NAME) is not None:
            library: Any = super()
            library._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        elif (kind := generation_config.cache_implementation or "dynamic").startswith("dynamic"):
            model_kwargs[CACHE_NAME] = SeqmixCache(self.config.num_hidden_layers)
        else:
            raise ValueError(f"SeqmixForCausalLM: cache_implementation must be None, got {kind!r}")


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Embedding, blocks, norm and head: the modules that initialise all that is inside them."""
    for child in model.children():
        if isinstance(child, PreTrainedModel | nn.ModuleList):
            yield from _parts(child)
        else:
            yield child


AutoModel.register(SeqmixConfig, SeqmixModel, exist_ok=True)
AutoModelForCausalLM.register(SeqmixConfig, SeqmixForCausalLM, exist_ok=True)
