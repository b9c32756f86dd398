"""Takes a loaded encoder-decoder model apart: a decoder that is called as a decoder-only model is, and an encoder.

Under tensor parallelism, each rank keeps its part of the decoder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import BartConfig, MarianConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.bart.modeling_bart import BartDecoder
from transformers.models.marian.modeling_marian import MarianDecoder, MarianEncoder

from cluster.core.errors import ConfigurationError
from workers.forward.attention import ATTENTION_NAME, UnsupportedModel
from workers.forward.encoder_decoder.decoder import (
    RelativePositionBias,
    SourcedDecoder,
    take_projections,
    take_relative_biases,
)
from workers.forward.encoder_decoder.encoder import SourceEncoder, input_embedding
from workers.forward.linear import FastLinear, make_linear_kernel
from workers.forward.loaded_model import SourceParts
from workers.forward.weights.choice import store
from workers.model.encoder_decoder.generation_defaults import read_generation_defaults
from workers.model.sharding import keep_outputs
from workers.model.share import Share
from workers.model.target_ends import decoder_vocabulary_size

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
    if hasattr(model, "enc_to_dec_proj"):
        raise UnsupportedModel("its decoder reads a projection of the encoder's output, which is of another width")
    vocabulary_size = decoder_vocabulary_size(model.config)
    source_vocabulary = encoder_vocabulary_size(model)
    own_decoder, encoder = (in_known_form(part, model.config) for part in (model.get_decoder(), model.get_encoder()))
    projections = take_projections(own_decoder, 1 if share is None else share.ranks)
    biases = take_relative_biases(own_decoder)
    decoder = SourcedDecoder(model, own_decoder)
    if share is not None:
        shard_decoder(decoder, projections, biases, share, quantization, code_directory)
    config = model.config.get_text_config()
    counts = (getattr(config, name, None) for name in ("num_key_value_heads", "decoder_attention_heads"))
    heads = int(next(filter(None, counts), config.num_attention_heads))
    if share is not None:
        heads = len(range(heads)[share.of(heads, "the number of heads")])
    _attend_densely(encoder)
    reader = SourceEncoder(encoder, _joined(projections), len(projections), heads)
    source = SourceParts(
        encoder=reader,
        defaults=defaults,
        max_source_len=_source_limit(getattr(encoder, "config", config)) or _DEFAULT_CONTEXT,
        vocabulary_size=source_vocabulary,
        relative_biases=biases,
    )
    return SplitModel(cast(PreTrainedModel, decoder), source, reader, vocabulary_size)


def encoder_vocabulary_size(model: PreTrainedModel) -> int:
    """Tokens that the encoder distinguishes."""
    return len(input_embedding(model.get_encoder()))


def context_limit(config: PreTrainedConfig) -> int | None:
    """Longest answer of the model, in tokens; `None` if its positions are relative and nothing bounds them."""
    return _stated(config, "max_decoder_position_embeddings")


def _source_limit(config: PreTrainedConfig) -> int | None:
    """Longest source, as `context_limit` says that of answers."""
    return _stated(config, "max_encoder_position_embeddings")


def _stated(config: PreTrainedConfig, own_name: str) -> int | None:
    values = (getattr(config, name, None) for name in (own_name, "max_position_embeddings", "n_positions"))
    return next((int(value) for value in values if value is not None), None)


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
    """Let the encoder use the attention of torch, or its own, since it reads whole sources and stores nothing."""
    configs: dict[int, PreTrainedConfig] = {}
    for part in encoder.modules():
        if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
            dense = configs.setdefault(id(config), copy.deepcopy(config))
            dense._attn_implementation = "sdpa" if encoder._supports_sdpa else "eager"
            part.config = dense  # type: ignore[assignment]


_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "q", "k", "v", "fc1", "wi", "wi_0", "wi_1", "gate_proj", "up_proj")
_BY_INPUT = ("out_proj", "o", "o_proj", "fc2", "wo", "down_proj")


def shard_decoder(
    decoder: SourcedDecoder,
    projections: Sequence[tuple[nn.Linear, nn.Linear]],
    biases: Sequence[RelativePositionBias],
    share: Share,
    quantization: str,
    code_directory: str | None = None,
) -> None:
    """Keep this rank's part of every layer, since `transformers` has no plan for these families.

    Each rank holds the heads, the inner numbers of the feed-forward networks and the tokens of the head that are its
    own. The encoder is whole on every rank: it runs once for a source, and its output is projected to the rank's heads.
    `code_directory` keeps the compiled CPU kernels.

    Raises `ConfigurationError` for sizes that the ranks do not divide.
    """
    for parent, name, layer in _linear_layers(decoder.decoder):
        if name in _BY_OUTPUT:
            keep_outputs(layer, share.of(layer.out_features, f"the outputs of {name}"))
        elif name in _BY_INPUT:
            inputs = share.of(layer.in_features, f"the inputs of {name}")
            weight = layer.weight.detach()[:, inputs].contiguous()
            kernel = make_linear_kernel(store(weight, quantization, cut_inputs=True), None, code_directory)
            own_bias = None if layer.bias is None else layer.bias.detach()
            setattr(parent, name, FastLinear(kernel, layer.out_features, reduce=True, bias=own_bias))
    for part in decoder.decoder.modules():
        if isinstance(count := getattr(part, "n_heads", None), int):  # UMT5 counts them to part its queries
            own_heads = share.of(count, "the number of heads")
            part.n_heads = own_heads.stop - own_heads.start
    for pair in projections:
        for projection in pair:
            keep_outputs(projection, share.of(projection.out_features, "the outputs of cross-attention"))
    for bias in dict.fromkeys(biases):
        heads = share.of(bias.embedding.embedding_dim, "num_heads")
        own = bias.embedding.weight.detach()[:, heads].contiguous()
        bias.embedding = nn.Embedding.from_pretrained(own)  # type: ignore[no-untyped-call]
    head = decoder.lm_head
    if not isinstance(head, nn.Linear):
        raise ConfigurationError(f"target.tensor_parallel: {share.ranks} is refused for a head {type(head).__name__}")
    tokens = share.tokens(head.out_features)
    keep_outputs(head, tokens)
    if isinstance(decoder.logits_bias, torch.Tensor):
        decoder.logits_bias = decoder.logits_bias[:, tokens]


def _linear_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                yield parent, name, child


_FORMS: dict[str, tuple[Any, Any]] = {
    "FSMTDecoder": (MarianDecoder, MarianConfig),
    "FSMTEncoder": (MarianEncoder, MarianConfig),
    "LEDDecoder": (BartDecoder, BartConfig),
    "MvpDecoder": (BartDecoder, BartConfig),
}
"""By the class of a part, the class with the same parts that computes it, and its configuration."""
_REFUSED = {
    "ProphetNetDecoder": "its decoder attends from several streams, each of which predicts a later token",
    "T5Gemma2Decoder": "its decoder attends to the text and to the source in one softmax",
}
"""By the class of a part, why it is not served."""
_SIZES = ("layers", "ffn_dim", "attention_heads")
_OWN_HEAD = "output_projection."
"""The head of FSMT, which is inside its decoder."""
_POSITIONS = "embed_positions.weight"


def in_known_form(part: Any, config: PreTrainedConfig) -> Any:
    """An encoder or decoder of a model with this configuration in the form of a known family, or else as it is.

    The new form calls the registered attention: LED and MVP have the parts of BART's decoder, and FSMT those of Marian,
    under the same names. It shares the parameters. Raises `UnsupportedModel` for a part that no form computes.
    """
    name = type(part).__name__
    if name in _REFUSED:
        raise UnsupportedModel(_REFUSED[name])
    if name not in _FORMS:
        return part
    if getattr(config, "use_prompt", False):
        raise UnsupportedModel("its layers attend to learned prompts (use_prompt)")
    kind, configuration = _FORMS[name]
    own = {name: values for name, values in part.state_dict().items() if not name.startswith(_OWN_HEAD)}
    skips_padding = hasattr(part.embed_positions, "make_positions")  # FSMT begins at the row behind that of padding
    if skips_padding:
        own[_POSITIONS] = own[_POSITIONS][int(part.embed_positions.padding_idx) + 1 :]
    names = [f"{side}_{size}" for side in ("encoder", "decoder") for size in _SIZES]
    with torch.device("meta"):
        form: nn.Module = kind(
            configuration(
                vocab_size=len(part.embed_tokens.weight),
                pad_token_id=0,  # only training reads it
                max_position_embeddings=len(own[_POSITIONS]),
                d_model=config.d_model,
                activation_function=config.activation_function,
                scale_embedding=bool(getattr(config, "scale_embedding", False)),
                attn_implementation=ATTENTION_NAME,
                **{name: getattr(config, name) for name in names},
            )
        )
    if not skips_padding:
        form.embed_positions = part.embed_positions
    form.load_state_dict(own, assign=True)  # raises for any other parts
    return form.eval().requires_grad_(False)
