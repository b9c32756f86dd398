"""Shards the decoder of an encoder-decoder model over ranks, since `transformers` has no plan for these families.

Each rank holds the heads, the inner numbers of the feed-forward networks and the tokens of the head that are its own.
The encoder is whole on every rank: it runs once for a source, and its output is projected to the rank's heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from cluster.core.errors import ConfigurationError
from workers.forward.encoder_decoder.decoder import RelativePositionBias, SourcedDecoder
from workers.forward.linear import FastLinear, make_linear_kernel
from workers.forward.weights.choice import store
from workers.model.sharding import keep_outputs
from workers.model.share import Share

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
    """Keep this rank's part of every layer. `code_directory` keeps the compiled CPU kernels.

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
