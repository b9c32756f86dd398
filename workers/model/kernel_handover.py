"""Hand a loaded model over to the CPU kernels, after a trial shows that they compute the same logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from cluster.core.config.model_section import PoolSection
from workers.forward.encoder_decoder.encoder import SourceEncoder
from workers.forward.encoder_decoder.native_decoder import NativeSourcedDecoder, pack_sourced_decoder, sourced_shape
from workers.forward.encoder_decoder.native_encoder import NativeSourceEncoder, pack_source_encoder
from workers.forward.loaded_model import LoadedModel, SourceReader
from workers.forward.native.decoder import NativeDecoder
from workers.forward.native.decoder_packing import pack_decoder
from workers.forward.native.decoder_shape import supported_shape
from workers.forward.runner import ForwardRow, ModelRunner
from workers.forward.weights.choice import store
from workers.kv.groups import group_layers
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore

logger = logging.getLogger(__name__)

_TRIAL_TOKENS, _BLOCK_SIZE = 24, 16
_STRIDE = 7919  # a prime: it spreads the trial's tokens over the vocabulary

_MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Bounds on |found - expected| / |expected| over all logits of the trial, by the model's dtype.

The largest errors observed with correct kernels are 2.5e-6 in float32 and 1.3e-2 in bfloat16 (SmolLM2-135M, and random
models of up to 12 layers of each supported family, plain and int8). An omitted factor causes a far larger error.
"""


class KernelMismatch(Exception):
    """The kernels compute other logits than the model. The model's weights are packed, so it must be loaded again."""


def try_native_kernels(model: LoadedModel, quantization: str) -> NativeDecoder | NativeSourcedDecoder | None:
    """Pack the model for the kernels. Returns `None`, and leaves the model as it was, if they do not support it.

    Raises `KernelMismatch` if the packed model computes other logits than the model did.
    """
    shape = supported_shape(model.module, model.dtype) if model.source is None else None
    if shape is None and (model.source is None or sourced_shape(model.module, model.dtype) is None):
        return None
    with _quantized_like_kernels(model.module, quantization):
        expected = _trial_logits(model)
    native: NativeDecoder | NativeSourcedDecoder | None
    if shape is not None:
        native = pack_decoder(model.module, shape, model.dtype, quantization, model.code_directory)
    else:
        native = pack_sourced_decoder(model.module, model.dtype, quantization, model.code_directory)
    if native is None:
        return None
    error = relative_error(_trial_logits(replace(model, native=native)), expected)
    if error <= _MAX_RELATIVE_ERROR[model.dtype]:
        return native
    logger.warning(
        "%s: the CPU kernels compute other logits than the model (relative error %.2g); the model uses a slower path",
        model.name,
        error,
    )
    raise KernelMismatch


def with_fast_encoder(model: LoadedModel, reader: SourceEncoder, quantization: str, *, native: bool) -> LoadedModel:
    """The model with its encoder `reader` on the CPU kernels if they may and can compute it, else on packed layers."""
    found = _try_native_encoder(model, reader, quantization) if native else None
    if found is None or model.source is None:
        reader.replace_linear_layers(quantization, model.code_directory)
        return model
    return replace(model, source=replace(model.source, encoder=found))


def _try_native_encoder(model: LoadedModel, reader: SourceEncoder, quantization: str) -> NativeSourceEncoder | None:
    """Pack the encoder of a model for the kernels. `None` if they do not support it or compute other results.

    The encoder itself stays as it was.
    """
    with (
        _quantized_like_kernels(reader.encoder, quantization),
        _quantized_like_kernels(reader.projection, quantization),
    ):
        expected = _trial_sources(model, reader)
    native = pack_source_encoder(reader, model.module.config, model.dtype, quantization, model.code_directory)
    if native is None:
        return None
    error = relative_error(_trial_sources(model, native), expected)
    if error <= _MAX_RELATIVE_ERROR[model.dtype]:
        return native
    logger.warning(
        "%s: the CPU kernels encode other states than the model (relative error %.2g); its encoder uses a slower path",
        model.name,
        error,
    )
    return None


def _trial_sources(model: LoadedModel, reader: SourceReader) -> torch.Tensor:
    """Keys and values of two short sources, float32 `[tokens, numbers]`."""
    if model.source is None:
        raise ValueError("the model has no encoder")
    size = model.source.vocabulary_size
    sources = [tuple(index * _STRIDE % size for index in range(1, length)) for length in (_TRIAL_TOKENS, 2)]
    found = sorted(((batch.indices, batch.states) for batch in reader.encode(sources, model.device)), key=itemgetter(0))
    return torch.cat([states.flatten(1).float() for _, states in found])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, as Euclidean norms over all elements. NaN if either holds NaN."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def _quantized_like_kernels(module: nn.Module, quantization: str) -> Iterator[None]:
    """Inside, the module's linear layers multiply with the weights as the kernels will store them.

    So the trial measures the kernels alone and not the error of the quantization.
    """

    def multiply(layer: nn.Linear, inputs: tuple[Any, ...], _: torch.Tensor) -> torch.Tensor:
        return store(layer.weight.detach(), quantization).kernel(layer.bias).multiply(*inputs)

    layers = [part for part in module.modules() if isinstance(part, nn.Linear)] if quantization != "none" else []
    hooks = [layer.register_forward_hook(multiply) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _trial_logits(model: LoadedModel) -> torch.Tensor:
    """Logits of a short text, float32 `[tokens, vocabulary]`."""
    section = PoolSection(block_size=_BLOCK_SIZE)
    tables = group_layers(model.kv_spec, section).layout.tables
    # Every table needs its own blocks, and so does a source. Each layer of a large pool would take a huge page.
    pool = KvPool(model.kv_spec, section, 2 * tables * -(-_TRIAL_TOKENS // _BLOCK_SIZE))
    runner = ModelRunner(model, pool)
    source = None
    if model.source is not None:
        store, read = SourceStore(pool), range(1, _TRIAL_TOKENS // 2)
        source = store.acquire(tuple(index * _STRIDE % model.source.vocabulary_size for index in read), "")
        runner.encode([source], store)
    table = pool.new_table()
    pool.reserve(table, _TRIAL_TOKENS)
    tokens = tuple((index + 1) * _STRIDE % model.vocabulary_size for index in range(_TRIAL_TOKENS))
    row = ForwardRow(table, tokens, select=tuple(range(_TRIAL_TOKENS)), source=source)
    return runner.forward([row]).float().clone()
