"""The decoder of an encoder-decoder model, called as a decoder-only model is.

Its self-attention is paged. Its cross-attention reads keys and values that `SourceEncoder` computed once for each
source, so the projections that `transformers` would apply to the encoder's output in every pass are replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from workers.forward.attention import READS_SOURCE, UnsupportedModel

_CROSS_ATTENTION = ("encoder_attn", "EncDecAttention", "cross_attention", "cross_attn", "crossattention.self")
_SELF_ATTENTION = ("self_attn", "SelfAttention")
_SCALED_IF_TIED = ("switch_transformers", "umt5")
"""Model types that scale the states before the head exactly if it is the embedding."""
_KEY_AND_VALUE = (("k_proj", "v_proj"), ("k", "v"), ("key", "value"))


class SourcedDecoder(nn.Module):
    """The decoder, its head, and the scale and bias of the logits, of an encoder-decoder model of `transformers`.

    Raises `UnsupportedModel` for a family whose parts have other names.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module) -> None:
        """`decoder` is that of the model, or one in another form with its parameters."""
        super().__init__()
        self.config = model.config
        self.tp_plan: dict[str, str] = {}
        self.decoder = decoder
        self.writes_logits = isinstance(self.decoder, GenerationMixin)
        """Whether the decoder is a language model with a head of its own."""
        self.lm_head: nn.Module = nn.Identity() if self.writes_logits else _head(model)
        self.scale = logits_scale(model)
        bias = getattr(model, "final_logits_bias", None)
        self.register_buffer("logits_bias", bias if bias is not None and bool(bias.any()) else None, persistent=False)
        self._positions = _replace_positions(self.decoder)
        takes = inspect.signature(self.decoder.forward).parameters
        self._takes_positions = self._positions is None and "position_ids" in takes
        self._soft_cap: float | None = getattr(self.decoder.config, "final_logit_softcapping", None)
        embedding: torch.Tensor = self.decoder.get_input_embeddings().weight  # type: ignore[operator]
        self.register_buffer("no_states", embedding.new_zeros((1, 1, embedding.shape[1])), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,  # [1, tokens]
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,  # [1, tokens]
        logits_to_keep: torch.Tensor | int = 0,
        **_: Any,
    ) -> CausalLMOutput:
        """The logits of the tokens whose indices are `logits_to_keep`; of all for 0."""
        if self._positions is not None:
            self._positions.position_ids = position_ids
        positions = {"position_ids": position_ids} if self._takes_positions else {}
        found = self.decoder(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=self.no_states,
            use_cache=False,
            **positions,
        )
        states = found.logits if self.writes_logits else found.last_hidden_state
        kept = states if isinstance(logits_to_keep, int) else states[:, logits_to_keep]
        logits = self.lm_head(kept if self.scale is None else kept * self.scale)
        if self._soft_cap is not None:
            logits = self._soft_cap * torch.tanh(logits / self._soft_cap)
        return CausalLMOutput(logits=logits if self.logits_bias is None else logits + self.logits_bias)


class _StepPositions(nn.Module):
    """Replaces a decoder's position embeddings: tokens of a step have any positions, equal ones inside trees."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, offset: int) -> None:
        """`offset` is the row of `weight` `[rows, hidden]` that belongs to position 0."""
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight, persistent=False)
        self.offset = offset
        self.position_ids: torch.Tensor | None = None
        """Positions of the pass's tokens, `[1, tokens]`."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Returns `[1, tokens, hidden]`."""
        if self.position_ids is None:
            raise RuntimeError("a decoder was called without positions")
        return nn.functional.embedding(self.position_ids + self.offset, self.weight)


class _NoProjection(nn.Module):
    """Replaces the projection of the encoder's output to keys or values, which are stored already."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns zeros `[…, width]`, which nothing reads."""
        return states.new_zeros((*states.shape[:-1], self._width))


class RelativePositionBias(nn.Module):
    """T5's biases of attention by relative position."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.embedding: nn.Embedding = attention.relative_attention_bias
        self._bucket = attention._relative_position_bucket
        if "bidirectional" in inspect.signature(self._bucket).parameters:  # UMT5's reads its module
            buckets, longest = attention.relative_attention_num_buckets, attention.relative_attention_max_distance
            self._bucket = partial(self._bucket, bidirectional=False, num_buckets=buckets, max_distance=longest)

    def forward(self, relative: torch.Tensor) -> torch.Tensor:
        """Map key position minus query position `[rows, queries, keys]` to biases `[rows, heads, queries, keys]`."""
        bias: torch.Tensor = self.embedding(self._bucket(relative))
        return bias.permute(0, 3, 1, 2)


def _head(model: PreTrainedModel) -> nn.Module:
    own: nn.Module | None = getattr(model.get_decoder(), "output_projection", None)  # of FSMT
    return model.get_output_embeddings() if own is None else own


def logits_scale(model: PreTrainedModel) -> float | None:
    """Factor on the states before the head; `None`: 1."""
    config = model.config
    scales = getattr(config, "scale_decoder_outputs", False)  # as the configurations of T5 state
    if config.model_type in _SCALED_IF_TIED:
        scales = config.tie_word_embeddings
    return float(config.d_model**-0.5) if scales else None


def free_experts(decoder: nn.Module) -> None:
    """Let the experts of a decoder take every token that chooses them.

    Switch and NLLB-MoE bound how many tokens of a pass one expert takes. `transformers` writes an answer by passes of
    one token, which no bound reaches; a step has the tokens of many rows and of their trees.
    """
    for part in decoder.modules():
        if hasattr(part, "expert_capacity"):
            part.expert_capacity = inf  # type: ignore[assignment]
        if hasattr(part, "moe_eval_capacity_token_fraction"):  # NLLB-MoE computes the bound from a pass's tokens
            part.moe_eval_capacity_token_fraction = 1.0  # type: ignore[assignment]


def take_projections(decoder: nn.Module, ranks: int = 1) -> list[tuple[nn.Linear, nn.Linear]]:
    """Take the projections of the encoder's output out of the decoder: keys and values of each layer, in order.

    Marks the modules of cross-attention, which will have the heads of one of `ranks` ranks. Raises `UnsupportedModel`
    if there are none.
    """
    taken: dict[int, tuple[nn.Linear, nn.Linear]] = {}
    for attention in _named(decoder, _CROSS_ATTENTION):
        names = next((names for names in _KEY_AND_VALUE if all(hasattr(attention, name) for name in names)), None)
        if names is None:
            raise UnsupportedModel(f"{type(attention).__name__} has no projections {_KEY_AND_VALUE}")
        key, value = (getattr(attention, name) for name in names)
        for name, projection in zip(names, (key, value), strict=True):
            setattr(attention, name, _NoProjection(projection.out_features // ranks))
        setattr(attention, READS_SOURCE, True)
        taken[int(attention.layer_idx)] = key, value  # type: ignore[arg-type]
    if not taken or sorted(taken) != list(range(len(taken))):
        raise UnsupportedModel(f"{type(decoder).__name__}: its cross-attention has no modules {_CROSS_ATTENTION}")
    return [taken[layer] for layer in range(len(taken))]


def take_relative_biases(decoder: nn.Module) -> tuple[RelativePositionBias, ...]:
    """Take the biases of relative positions out of the decoder: those of each layer. Empty if it has none.

    A layer without biases of its own has those of the layer before. The decoder would compute those of a dense
    sequence; the paged attention adds those of the step.
    """
    found: list[RelativePositionBias] = []
    for attention in _named(decoder, _SELF_ATTENTION):
        if getattr(attention, "has_relative_attention_bias", False):
            found.append(RelativePositionBias(attention))
            attention.has_relative_attention_bias = False  # type: ignore[assignment]
            del attention.relative_attention_bias
        elif found:
            found.append(found[-1])
    return tuple(found)


def _named(module: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    for path, part in list(module.named_modules()):
        if f".{path}".endswith(tuple(f".{name}" for name in names)):
            yield part


def _replace_positions(decoder: Any) -> _StepPositions | None:
    """Replace the decoder's position embeddings. `None` if it has none. Raises `UnsupportedModel` for unknown ones."""
    embedding = getattr(decoder, "embed_positions", None)
    if embedding is None:
        return None
    if isinstance(weight := getattr(embedding, "weight", None), torch.Tensor):
        positions = _StepPositions(weight, int(getattr(embedding, "offset", 0)))
    elif isinstance(weight := getattr(embedding, "weights", None), torch.Tensor):  # M2M-100: a table behind padding
        positions = _StepPositions(weight, int(embedding.padding_idx) + 1)
    elif hasattr(embedding, "max_scale"):  # Pegasus-X computes them in each pass
        like: torch.Tensor = next(decoder.parameters())
        longest = int(decoder.config.max_position_embeddings)
        positions = _StepPositions(embedding(like.new_zeros((1, longest, embedding.embed_dim)))[0].contiguous(), 0)
    else:
        raise UnsupportedModel(f"its positions are those of {type(embedding).__name__}, which is not known")
    decoder.embed_positions = positions
    return positions
