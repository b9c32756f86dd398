"""Takes a loaded encoder-decoder model apart: a decoder that is called as a decoder-only model is, and an encoder."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from cluster.core.errors import ConfigurationError
from workers.forward.encoder_decoder.decoder import SourcedDecoder, take_projections, take_relative_bias
from workers.forward.encoder_decoder.encoder import SourceEncoder
from workers.forward.loaded_model import SourceParts
from workers.model.encoder_decoder.generation_defaults import read_generation_defaults
from workers.model.encoder_decoder.shard import shard_decoder
from workers.model.share import Share

_DEFAULT_CONTEXT = 512
"""Longest source and answer of a model whose configuration does not bound them, as for T5's relative positions."""


@dataclass(frozen=True, slots=True)
class SplitModel:
    """The parts of an encoder-decoder model."""

    decoder: PreTrainedModel
    """Only called, and asked for its configuration and modules, as the model classes of `transformers` are."""
    source: SourceParts
    encoder: SourceEncoder
    """The encoder of `source`."""
    vocabulary_size: int
    """Tokens that the decoder distinguishes."""


def split_encoder_decoder(
    model: PreTrainedModel,
    directory: Path,
    quantization: str,
    share: Share | None = None,
    code_directory: str | None = None,
) -> SplitModel:
    """Take a model of `transformers` apart, and keep this rank's `share` of its decoder.

    The encoder keeps its own linear layers (see `SourceEncoder.replace_linear_layers`). `code_directory` keeps the
    compiled CPU kernels. Raises `ModelLoadError` for a
    family whose parts have other names than those of T5, Marian and BART, `ConfigurationError` for sizes that the ranks
    do not divide.
    """
    defaults = read_generation_defaults(directory)
    vocabulary_size = int(getattr(model.config, "decoder_vocab_size", None) or model.config.vocab_size)
    source_vocabulary = encoder_vocabulary_size(model)
    own_decoder, encoder = model.get_decoder(), model.get_encoder()
    projections = take_projections(own_decoder, 1 if share is None else share.ranks)
    bias = take_relative_bias(own_decoder)
    decoder = SourcedDecoder(model)
    if share is not None:
        shard_decoder(decoder, projections, bias, share, quantization, code_directory)
    config = model.config.get_text_config()
    heads = int(getattr(config, "decoder_attention_heads", None) or config.num_attention_heads)
    if share is not None:
        heads = len(range(heads)[share.of(heads, "the number of heads")])
    _attend_densely(encoder)
    reader = SourceEncoder(encoder, _joined(projections), len(projections), heads)
    source = SourceParts(
        encoder=reader,
        decoder_start=defaults.decoder_start,
        max_source_len=context_limit(config) or _DEFAULT_CONTEXT,
        vocabulary_size=source_vocabulary,
        forced_eos_token_id=defaults.forced_eos_token_id,
        bad_words=defaults.bad_words,
        no_repeat_ngram_size=defaults.no_repeat_ngram_size,
        min_tokens=defaults.min_tokens,
        beam_scoring=defaults.beam_scoring,
        renormalize_logits=defaults.renormalize_logits,
        relative_bias=bias,
    )
    return SplitModel(cast(PreTrainedModel, decoder), source, reader, vocabulary_size)


def encoder_vocabulary_size(model: PreTrainedModel) -> int:
    """Tokens that the encoder distinguishes."""
    return int(model.get_encoder().get_input_embeddings().weight.shape[0])


def context_limit(config: PreTrainedConfig) -> int | None:
    """Longest sequence of the model, in tokens; `None` if its positions are relative and nothing bounds them."""
    for name in ("max_position_embeddings", "n_positions"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    return None


def decoder_context_len(config: PreTrainedConfig, wanted: int | None) -> int:
    """Longest answer, in tokens. Raises `ConfigurationError` if `wanted` is beyond the model's positions."""
    own = context_limit(config)
    if wanted is not None and own is not None and wanted > own:
        raise ConfigurationError(f"target.max_context_len: {wanted} is refused; the model's limit is {own}")
    return wanted or own or _DEFAULT_CONTEXT


def _joined(projections: list[tuple[nn.Linear, nn.Linear]]) -> nn.Linear:
    """One product for the keys and values of all layers: layer after layer, keys before values."""
    layers = [projection for pair in projections for projection in pair]
    has_bias = layers[0].bias is not None
    weight = torch.cat([layer.weight.detach() for layer in layers])
    joined = nn.Linear(weight.shape[1], len(weight), bias=has_bias, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if has_bias:
        joined.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]), requires_grad=False)
    return joined


def _attend_densely(encoder: PreTrainedModel) -> None:
    """Let the encoder use the attention of torch, since it reads whole sources and stores nothing."""
    config = copy.deepcopy(encoder.config)
    config._attn_implementation = "sdpa"
    for part in encoder.modules():
        if isinstance(getattr(part, "config", None), PreTrainedConfig):
            part.config = config  # type: ignore[assignment]
