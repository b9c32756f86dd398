"""Bytes of the weights that a tensor-parallel rank has with `quantization: stored`.

Headers are read, and a few outputs of each matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from cluster.core.errors import ConfigurationError
from workers.forward.weights.base import CutRefused
from workers.forward.weights.experts import gate_of
from workers.model.sharding import complete_plan
from workers.model.share import Share
from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.loading import EXPERTS, Cut, Division, check_plain_experts, own_experts
from workers.model.stored.mxfp4 import BLOCK, ExpertRegion
from workers.model.stored.parts import Region, nbytes_of
from workers.model.stored.quantized_checkpoint import SAMPLED_OUTPUTS, QuantizedCheckpoint, stored_checkpoint
from workers.model.target_ends import read_config


def rank_bytes(
    directory: Path, dtype: str, ranks: int, *, on_gpu: bool = False, expert_parallel: bool = False
) -> int | None:
    """Bytes of the weights of the rank that has most; `None` for a model without stored weights, and for one that
    `transformers` has no decoder of, which its start refuses.

    Each rank has its part of the layers and all of the table of embeddings. A part of groups in activation order is
    padded. Plain tensors are kept as `dtype`; `on_gpu`: matrices are as products there read them. Raises
    `ModelLoadError`, and `ConfigurationError` for a number of ranks that does not divide the model.
    """
    plain: torch.dtype = getattr(torch, dtype)
    checkpoint = stored_checkpoint(directory, plain)
    if checkpoint is None:
        return None
    config = read_config(directory)
    kind: Any = AutoModelForCausalLM
    if config.is_encoder_decoder or type(config) not in kind._model_mapping:
        return None
    complete_plan(config, Share(0, ranks, expert_parallel))
    with torch.device("meta"):
        module: Any = kind.from_config(config)
    matrices = _Matrices(checkpoint, on_gpu)
    shares = (Share(rank, ranks, expert_parallel) for rank in range(ranks))
    return max(sum(_Rank(matrices, plain, share).parts(module)) for share in shares)


class _Matrices:
    """Bytes of regions of a model's matrices."""

    def __init__(self, checkpoint: GgufFile | QuantizedCheckpoint, on_gpu: bool) -> None:
        self.checkpoint, self.on_gpu = checkpoint, on_gpu
        self._kind_of = cache(checkpoint.kind_of)
        self._known: dict[tuple[object, ...], int] = {}

    def nbytes(self, parameter: str, region: Region, *, is_packed: bool = True, is_view: bool = False) -> int:
        """Bytes of a region of a matrix. `is_packed`: it is multiplied; `is_view`: it is a part of another one, so that
        plain numbers take no bytes. Raises `CutRefused`, `ModelLoadError`.
        """
        outputs, inputs = region.outputs, region.inputs
        count, on_gpu = outputs.stop - outputs.start, is_packed and self.on_gpu
        if not count:
            return 0
        key = (self._kind_of(parameter), count, inputs.start, inputs.stop, on_gpu, is_view)
        if key not in self._known:
            some = slice(outputs.start, min(outputs.stop, outputs.start + SAMPLED_OUTPUTS))
            sample = self.checkpoint.matrix(parameter, None, Region(some, inputs))
            size = 0 if is_view and sample.plain is not None else nbytes_of(sample, count, on_gpu=on_gpu)
            if sample.has_own_size:
                return size
            self._known[key] = size
        return self._known[key]

    def experts_nbytes(self, parameter: str, shape: tuple[int, int, int], region: ExpertRegion) -> int:
        """Bytes of a region of the matrices of all experts in MXFP4. `shape` is that of all."""
        experts, own = region.experts, region.matrix
        rows, inputs = own.outputs.stop - own.outputs.start, own.inputs.stop - own.inputs.start
        each = rows * (inputs // 2 + inputs // BLOCK)
        if not self.on_gpu and isinstance(self.checkpoint, QuantizedCheckpoint):  # scales are wider on a CPU
            one = ExpertRegion(slice(experts.start, experts.start + 1), Region(slice(0, 1), own.inputs))
            each = sum(sample.nbytes_of(rows) for sample in self.checkpoint.experts(parameter, shape, one) or [])
        return len(range(experts.start, experts.stop)) * int(each)


class _Rank:
    """One rank of a model."""

    def __init__(self, matrices: _Matrices, dtype: torch.dtype, share: Share) -> None:
        self._matrices, self._dtype, self._share = matrices, dtype, share
        self._checkpoint = matrices.checkpoint

    def parts(self, module: Any) -> Iterator[int]:
        """Bytes of the rank's weights, part by part. `module` is the model without weights."""
        division = Division(module, self._share)
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        names = {id(part): name for name, part in module.named_modules()}
        table, own_head = (f"{names[id(part)]}.weight" for part in (embedding, head))
        is_tied = module.config.get_text_config().tie_word_embeddings and own_head not in self._checkpoint
        for path, layer in module.named_modules():
            if layer is embedding:
                whole = Region.whole(tuple(layer.weight.shape))
                yield self._matrices.nbytes(table, whole, is_packed=False)
            elif type(layer) is nn.Linear:
                yield self._linear(layer, path, division.of(path, layer), table if layer is head and is_tied else None)
            elif (experts := self._experts(layer, path)) is not None:
                yield experts
            else:
                for name, values in layer.named_parameters(recurse=False):
                    count = values.numel()
                    own = division.sinks(count) if name == "sinks" else slice(0, count)
                    yield (own.stop - own.start) * self._dtype.itemsize

    def _linear(self, layer: nn.Linear, path: str, cut: Cut, table: str | None) -> int:
        """Bytes of a rank's part of a layer's matrix and of its bias. `table` is the embedding's, if they are tied.

        Raises `ConfigurationError` for a part that cuts a group.
        """
        region = cut.region((layer.out_features, layer.in_features), path)
        if cut.outputs is not None:
            region = Region(slice(0, len(cut.outputs)), region.inputs)
        bias: int = 0 if layer.bias is None else (region.outputs.stop - region.outputs.start) * self._dtype.itemsize
        if table is not None and cut.style is None:
            return bias  # the rows are read from the head
        is_view = table is not None and self._matrices.on_gpu
        try:
            return bias + self._matrices.nbytes(table or f"{path}.weight", region, is_view=is_view)
        except CutRefused as error:
            ranks = self._share.ranks
            raise ConfigurationError(f"target.tensor_parallel: {ranks} is refused: {path}: {error}") from error

    def _experts(self, layer: Any, path: str) -> int | None:
        """Bytes of a rank's part of the experts of a mixture and of their biases; `None` for another layer."""
        if f"{path}.{EXPERTS[0]}_blocks" not in self._checkpoint:
            if isinstance(getattr(layer, EXPERTS[0], None), nn.Parameter):
                check_plain_experts(self._checkpoint, path)
            return None
        total = 0
        part, regions = own_experts(layer, gate_of(layer), path, self._share)
        for word, region in zip(EXPERTS, regions, strict=True):
            experts, inputs, outputs = getattr(layer, word).shape
            total += self._matrices.experts_nbytes(f"{path}.{word}", (experts, outputs, inputs), region)
            if part.is_cut and self._share.rank and word == EXPERTS[1]:
                continue  # the first rank alone adds the second bias
            rows = region.matrix.outputs.stop - region.matrix.outputs.start
            total += (region.experts.stop - region.experts.start) * rows * self._dtype.itemsize
        return total
