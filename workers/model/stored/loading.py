"""Loads a model whose matrices stay as they are stored: no matrix is de-quantized."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

from cluster.core.errors import ConfigurationError, ModelLoadError
from workers.forward.weights.base import Storage
from workers.forward.weights.modules import StoredEmbedding, StoredLinear
from workers.model.encoder_decoder.shard import Share
from workers.model.stored.gguf_file import GgufFile

_SHARDED_HEAD = {"lm_head": "colwise"}


def load_stored(make: Any, file: Path, dtype: torch.dtype, share: Share) -> PreTrainedModel:
    """A model from a GGUF file; `make()` makes it without weights. Each rank keeps its share of every matrix.

    Raises `ModelLoadError`, `ConfigurationError`.
    """
    checkpoint = GgufFile(file, dtype)
    with init_empty_weights(include_buffers=False):
        module: PreTrainedModel = make()
    plan: dict[str, str] = {**(module.tp_plan or {}), **_SHARDED_HEAD}
    names = {id(owner): name for name, owner in module.named_modules()}
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    is_tied = f"{names[id(head)]}.weight" not in checkpoint
    table = checkpoint.matrix(f"{names[id(embedding)]}.weight")
    for path, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            own = f"{path}.{name}".removeprefix(".")
            if child is embedding and type(child) is nn.Embedding:
                setattr(parent, name, StoredEmbedding(table, dtype))
            elif type(child) is nn.Linear:
                storage = table if child is head and is_tied else checkpoint.matrix(f"{own}.weight")
                bias = None if child.bias is None else checkpoint.vector(f"{own}.bias").to(dtype)
                style = plan.get(re.sub(r"\d+", "*", own)) if share.ranks > 1 else None
                setattr(parent, name, _cut(storage, bias, style, share, own))
            else:
                _fill(child, own, checkpoint, dtype)
    left = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if left:
        raise ModelLoadError(f"GGUF file {str(file)!r}: it has no tensor for {', '.join(left[:5])}")
    module.eval().requires_grad_(False)
    return module


def _cut(storage: Storage, bias: torch.Tensor | None, style: str | None, share: Share, name: str) -> StoredLinear:
    """A rank's share of a linear layer; all of it without a style."""
    if style is None:
        return StoredLinear(storage, bias)
    try:
        if style == "rowwise":
            return StoredLinear(storage.take_inputs(share.of(storage.inputs, name)), bias, sums_ranks=True)
        outputs = share.tokens(storage.outputs)
        return StoredLinear(storage.take_outputs(outputs), None if bias is None else bias[outputs])
    except ValueError as error:
        raise ConfigurationError(f"target.tensor_parallel: {share.ranks} is refused: {name}: {error}") from error


def _fill(owner: nn.Module, path: str, checkpoint: GgufFile, dtype: torch.dtype) -> None:
    """Read a module's own parameters, as vectors of norms."""
    for name, parameter in list(owner.named_parameters(recurse=False)):
        full = f"{path}.{name}"
        values = checkpoint.vector(full) if parameter.dim() < 2 else checkpoint.matrix(full).dequantized()
        if values.shape != parameter.shape:
            raise ModelLoadError(
                f"GGUF file {str(checkpoint.path)!r}: {full!r} is {[*values.shape]}; it must be {[*parameter.shape]}"
            )
        setattr(owner, name, nn.Parameter(values.to(dtype), requires_grad=False))
