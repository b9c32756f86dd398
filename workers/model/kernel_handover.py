"""Handing a model to the kernels, once it is shown that they compute what it computes."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from cluster.core.config import PoolSection
from workers.forward.loaded_model import LoadedModel
from workers.forward.native.decoder import NativeDecoder, pack_decoder, supported_shape
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool

logger = logging.getLogger(__name__)

_WIDTH, _BLOCK = 24, 16
_STRIDE = 7919  # a prime, so that the trial's tokens are spread over the vocabulary
_LEAST_COSINE = {torch.float32: 0.99999, torch.bfloat16: 0.99, torch.int8: 0.95}


class KernelMismatch(Exception):
    """The weights were taken and something else came out: the model must be loaded again."""


def try_native_kernels(model: LoadedModel, quantization: str) -> NativeDecoder | None:
    """The model in the kernels' form, or `None`, with the model as it was, where they do not know it.

    Raises `KernelMismatch` when the kernels turn out to compute something else.
    """
    shape = supported_shape(model.module, model.dtype)
    if shape is None:
        return None
    expected = _trial(model)
    native = pack_decoder(model.module, shape, model.dtype, quantization, model.code_directory)
    if native is None:
        return None
    found = _trial(replace(model, native=native))
    least = _LEAST_COSINE[torch.int8 if quantization == "int8" else model.dtype]
    cosine = torch.nn.functional.cosine_similarity(expected.double().flatten(), found.double().flatten(), dim=0).item()
    if cosine >= least:
        return native
    logger.warning("%s: the kernels compute something else (cosine %.5f); a slower path is taken", model.name, cosine)
    raise KernelMismatch


def _trial(model: LoadedModel) -> torch.Tensor:
    """Logits of a short text, `[tokens, vocabulary]`."""
    blocks = 64 * (-(-_WIDTH // _BLOCK))
    pool = KvPool(model.kv_spec, PoolSection(block_size=_BLOCK), blocks)
    table = pool.new_table()
    pool.reserve(table, _WIDTH)
    tokens = tuple((index + 1) * _STRIDE % model.vocabulary_size for index in range(_WIDTH))
    return ModelRunner(model, pool).forward([ForwardRow(table, tokens, select=tuple(range(_WIDTH)))]).float().clone()
