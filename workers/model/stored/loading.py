"""Loads a model whose matrices stay as they are stored: no matrix is de-quantized."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from cluster.core.errors import ConfigurationError, ModelLoadError
from workers.forward.layer_lists import plan_name
from workers.forward.weights.base import CutRefused, Storage
from workers.forward.weights.experts import (
    WHOLE_LAYER,
    ClampedSwiglu,
    Expert,
    Gate,
    RankPart,
    StoredExperts,
    gate_of,
)
from workers.forward.weights.modules import StoredEmbedding, StoredLinear
from workers.kv.start_memory import FreedMemory
from workers.model.plan_styles import HEAD_INPUTS, KV_HEADS, QUERY_HEADS
from workers.model.sharding import OwnPlan, check_heads, head_counts, keep_own_part, rows_of_heads
from workers.model.share import Share
from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.mxfp4 import BLOCK, ExpertRegion
from workers.model.stored.parts import Region
from workers.model.stored.quantized_checkpoint import QuantizedCheckpoint

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 10.0
"""Seconds from one line about a long load to the next."""
_TRIED_ROWS = 64
"""Rows of a table that show what a layer does with them."""
EXPERTS = ("gate_up_proj", "down_proj")
_CPU = torch.device("cpu")


class ExpertsRefused(ConfigurationError):
    """Experts are quantized in a format in which they are not kept. The message names `target.quantization`."""


class StoredCheckpoint(Protocol):
    """Tensors by the names that `transformers` gives to parameters."""

    path: Path

    def __contains__(self, parameter: str) -> bool: ...

    def matrix(self, parameter: str, shape: tuple[int, int] | None = None, region: Region | None = None) -> Storage:
        """The matrix of a parameter, or a region of it. `shape` is what it must have.

        Raises `ModelLoadError`, and `CutRefused` for a region that cannot be cut out.
        """

    def vector(self, parameter: str) -> torch.Tensor:
        """A parameter that no linear layer multiplies with. Raises `ModelLoadError`."""


def load_stored(
    make: Any,
    source: Path,
    dtype: torch.dtype,
    share: Share,
    *,
    device: torch.device = _CPU,
    clock: Callable[[], float] = time.monotonic,
) -> PreTrainedModel:
    """A model from a GGUF file or from a directory of quantized safetensors; `make()` makes it without weights.

    Each rank keeps its share of every matrix, on `device`; experts stay on the CPU until kernels take them. `clock`
    gives seconds: a long load logs how far it is. Raises `ModelLoadError`, `ConfigurationError`.
    """
    checkpoint: StoredCheckpoint = QuantizedCheckpoint(source, dtype) if source.is_dir() else GgufFile(source, dtype)
    with init_empty_weights(include_buffers=False), no_init_weights():
        module: PreTrainedModel = make()
    division = Division(module, share)
    names = {id(owner): name for name, owner in module.named_modules()}
    embedding: Any = module.get_input_embeddings()
    head = module.get_output_embeddings()
    is_tied = module.config.get_text_config().tie_word_embeddings and f"{names[id(head)]}.weight" not in checkpoint
    table = checkpoint.matrix(f"{names[id(embedding)]}.weight", tuple(embedding.weight.shape)).to(device)
    parents, due, freed = list(module.named_modules()), clock() + _PROGRESS_SECONDS, FreedMemory()
    freed.add(table.nbytes)
    for number, (path, parent) in enumerate(parents):
        if clock() >= due:
            logger.info("%s: %d%% of its modules are read", source.name, 100 * number // len(parents))
            due = clock() + _PROGRESS_SECONDS
        for name, child in list(parent.named_children()):
            own = f"{path}.{name}".removeprefix(".")
            if child is embedding and (looked_up := _embedding(child, table, dtype)) is not None:
                setattr(parent, name, looked_up)
            elif type(child) is nn.Linear:
                tied = table if child is head and is_tied else None
                linear = _linear(child, own, checkpoint, dtype, division.of(own, child), tied)
                division.count_heads(own, parent, child)
                freed.add(linear.storage.nbytes)  # unpacking needs several times as many, piece by piece
                linear.storage = linear.storage.to(device)
                setattr(parent, name, linear)
            elif (experts := _experts(child, own, checkpoint, dtype, share)) is not None:
                setattr(parent, name, experts)
            else:
                _fill(child, own, checkpoint, dtype, division)
    _fill_buffers(module, checkpoint)
    left = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if left:
        raise ModelLoadError(f"{str(source)!r} has no tensor for {', '.join(left[:5])}")
    module.eval().requires_grad_(False)
    keep_own_part(module, share)
    module.to(device)  # type: ignore[arg-type] # what is no stored matrix: vectors and buffers
    return module


def _embedding(layer: nn.Module, table: Storage, dtype: torch.dtype) -> StoredEmbedding | None:
    """The embedding with its stored table; `None` for a layer that does more than to look rows up and scale them.

    A layer with code of its own looks a few rows up, to show whether it multiplies them by its factor alone.
    """
    if type(layer) is nn.Embedding:
        return StoredEmbedding(table, dtype)
    given = getattr(layer, "embed_scale", None)
    if not isinstance(layer, nn.Embedding) or not isinstance(given, torch.Tensor | float | int):
        return None
    factor = given.to(dtype) if isinstance(given, torch.Tensor) else given
    rows = table.take_outputs(slice(0, _TRIED_ROWS)).dequantized().to(dtype)
    tried = copy(layer)
    tried._parameters, tried.padding_idx = {"weight": nn.Parameter(rows, requires_grad=False)}, None
    is_scaled = torch.equal(tried(torch.arange(len(rows), device=rows.device)), rows * factor)
    return StoredEmbedding(table, dtype, factor) if is_scaled else None


@dataclass(frozen=True, slots=True)
class Cut:
    """How a layer is divided between ranks."""

    style: str | None
    """The plan's word for it; `None`: every rank has all of it."""
    share: Share
    heads: tuple[int, int]
    """Query heads and KV heads of the model."""
    outputs: torch.Tensor | None = None
    """Indices of the outputs that a rank keeps of a fused projection, in place of a style."""

    @property
    def sums_ranks(self) -> bool:
        """Whether the product is the sum of those of all ranks."""
        return self.style in ("rowwise", HEAD_INPUTS)

    def region(self, shape: tuple[int, int], name: str) -> Region:
        """A rank's part of a matrix. Raises `ConfigurationError`."""
        whole, (heads, kv_heads) = Region.whole(shape), self.heads
        if self.style in (QUERY_HEADS, HEAD_INPUTS):
            own, is_cut = self.share.query_heads(heads, kv_heads), self.style == HEAD_INPUTS
            rows = rows_of_heads(shape[is_cut], heads, own, self.share, name)
            return Region(whole.outputs, rows) if is_cut else Region(rows, whole.inputs)
        if self.style == "rowwise":
            return Region(whole.outputs, self.share.of(shape[1], f"the inputs of {name}"))
        if self.style == "colwise":
            return Region(self.share.tokens(shape[0]), whole.inputs)
        if self.style == KV_HEADS:
            own = self.share.kv_heads(kv_heads)
            return Region(rows_of_heads(shape[0], kv_heads, own, self.share, name), whole.inputs)
        if self.style is None:
            return whole
        raise ConfigurationError(
            f"target.tensor_parallel: {self.share.ranks} is refused: {name} is divided {self.style!r}, which stored "
            "weights are not; it must be 1, or target.quantization must be none"
        )


class Division:
    """How the layers of a model are divided between ranks: by a plan of `transformers`, or by one of Pilotfish."""

    def __init__(self, module: PreTrainedModel, share: Share) -> None:
        """Raises `ConfigurationError` for a family whose layers are no usual linear ones, and are read whole."""
        self._share, self._heads = share, head_counts(module.config)
        self._own = OwnPlan(module.config, share)
        head = module.get_output_embeddings()
        named = {
            name: "colwise" for name, part in module.named_modules() if part is head
        }  # `embed_out` in some families
        self._plan: dict[str, str] = {**(module.tp_plan or {}), **named}
        others = [name for name, part in module.named_modules() if name in self._own and type(part) is not nn.Linear]
        if share.ranks > 1 and others:
            raise ConfigurationError(
                f"target.tensor_parallel: {share.ranks} is refused for stored weights of model type "
                f"{module.config.model_type!r}; it must be 1, or target.quantization must be none or int8"
            )
        check_heads(module, share)

    def of(self, name: str, layer: nn.Linear) -> Cut:
        """How a layer is divided. Raises `ConfigurationError` for a number of outputs that the ranks do not divide."""
        if self._share.ranks == 1:
            return Cut(None, self._share, self._heads)
        if name not in self._own:
            return Cut(self._plan.get(plan_name(name)), self._share, self._heads)
        outputs = self._own.outputs(name, layer.out_features)
        return Cut(self._own.style(name) if outputs is None else None, self._share, self._heads, outputs)

    def sinks(self, count: int) -> slice:
        """The learned sinks of a rank's own query heads, out of `count` sinks of all heads."""
        return self._share.query_heads(count, self._heads[1])

    def count_heads(self, name: str, attention: nn.Module, layer: nn.Linear) -> None:
        """See `OwnPlan.count_heads`."""
        if self._share.ranks > 1:
            self._own.count_heads(name, attention, layer.in_features)


def _linear(
    layer: nn.Linear, name: str, checkpoint: StoredCheckpoint, dtype: torch.dtype, cut: Cut, tied: Storage | None
) -> StoredLinear:
    """A rank's share of a linear layer. `tied` is the whole matrix, if it is known."""
    shape = layer.out_features, layer.in_features
    bias = _bias(layer, f"{name}.bias", checkpoint, dtype)
    region = cut.region(shape, name)
    try:
        if tied is not None:
            storage = tied if cut.style is None else tied.take_outputs(region.outputs).take_inputs(region.inputs)
        elif cut.outputs is not None:
            runs = (Region(run, region.inputs) for run in _runs(cut.outputs))
            first, *others = (checkpoint.matrix(f"{name}.weight", shape, run) for run in runs)
            storage = first.joined(others)
        else:
            storage = checkpoint.matrix(f"{name}.weight", shape, None if cut.style is None else region)
    except CutRefused as error:
        raise ConfigurationError(f"target.tensor_parallel: {cut.share.ranks} is refused: {name}: {error}") from error
    if cut.sums_ranks:
        return StoredLinear(storage, bias, sums_ranks=True)
    return StoredLinear(storage, None if bias is None else bias[region.outputs if cut.outputs is None else cut.outputs])


def _runs(outputs: torch.Tensor) -> list[slice]:
    """Indices `[n]` as slices of neighbours, one after another."""
    breaks = (outputs.diff() != 1).nonzero().flatten() + 1
    return [slice(int(part[0]), int(part[-1]) + 1) for part in torch.tensor_split(outputs, breaks)]


def _bias(layer: Any, name: str, checkpoint: StoredCheckpoint, dtype: torch.dtype) -> torch.Tensor | None:
    """The whole bias of a linear layer, if it has one. Raises `ModelLoadError` for one that the layer would drop."""
    if layer.bias is not None:
        return checkpoint.vector(name).to(dtype)
    if name in checkpoint and bool(checkpoint.vector(name).any()):
        raise ModelLoadError(
            f"{str(checkpoint.path)!r}: {name} is no parameter of the model; its configuration must state it"
        )
    return None


def _experts(
    layer: Any, name: str, checkpoint: StoredCheckpoint, dtype: torch.dtype, share: Share
) -> StoredExperts | None:
    """A rank's part of the experts of a mixture; `None` for a layer that has none that are stored quantized.

    A rank without the first inner numbers adds no second bias: the ranks' products are summed.
    """
    is_mixture = isinstance(getattr(layer, "gate_up_proj", None), nn.Parameter)  # a layer in a network without experts
    if not isinstance(checkpoint, QuantizedCheckpoint) or not is_mixture:
        return None
    gate = gate_of(layer)
    part, regions = own_experts(layer, gate, name, share)
    found: list[list[Storage]] = []
    for word, region in zip(EXPERTS, regions, strict=True):
        experts, inputs, outputs = getattr(layer, word).shape
        own = checkpoint.experts(f"{name}.{word}", (experts, outputs, inputs), region)
        if own is None:
            check_plain_experts(checkpoint, name)
        if own is None:
            return None
        found.append(own)
    biases: list[Any] = [
        checkpoint.vector(f"{name}.{word}_bias")[region.experts, region.matrix.outputs].to(dtype)
        for word, region in zip(EXPERTS, regions, strict=True)
    ]
    if part.is_cut and share.rank:
        biases[1] = [None] * len(biases[1])
    rows = zip(found[0], biases[0], found[1], biases[1], strict=True)
    return StoredExperts([Expert(*row) for row in rows], gate, part)


def check_plain_experts(checkpoint: StoredCheckpoint, name: str) -> None:
    """Raise `ExpertsRefused` for experts that are neither in MXFP4 nor plain numbers in two tensors."""
    if any(f"{name}.{word}" not in checkpoint for word in EXPERTS):
        raise ExpertsRefused(
            f"target.quantization: stored is refused for {name}: experts are kept as they are stored in MXFP4 alone; "
            "it must be none"
        )


def own_experts(layer: Any, gate: Gate, name: str, share: Share) -> tuple[RankPart, tuple[ExpertRegion, ExpertRegion]]:
    """What a rank keeps of the first and second matrices of experts. Raises `ConfigurationError`."""
    experts, inner, hidden = layer.down_proj.shape
    outputs = layer.gate_up_proj.shape[2]
    part, own, kept = WHOLE_LAYER, slice(0, experts), slice(0, inner)
    if share.ranks > 1 and share.expert_parallel:
        own = share.experts(experts)
        part = RankPart(sums_ranks=True, first_expert=own.start, all_experts=experts)
    elif share.ranks > 1:
        if not isinstance(gate, ClampedSwiglu):
            raise ConfigurationError(
                f"target.tensor_parallel: {share.ranks} is refused: {name}: stored experts are divided between ranks "
                "for gpt_oss alone; it must be 1, or target.quantization must be none"
            )
        part, kept = RankPart(sums_ranks=True), share.blocks(inner, BLOCK, f"the inner numbers of {name}")
    first = slice(kept.start * outputs // inner, kept.stop * outputs // inner)  # gates and factors alternate
    regions = Region(first, slice(0, hidden)), Region(slice(0, hidden), kept)
    return part, (ExpertRegion(own, regions[0]), ExpertRegion(own, regions[1]))


def _fill_buffers(model: PreTrainedModel, checkpoint: StoredCheckpoint) -> None:
    """Read the buffers that files have, as the factor of each layer of Gemma 4."""
    for path, owner in model.named_modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            full = f"{path}.{name}".removeprefix(".")
            if name in owner._non_persistent_buffers_set or full not in checkpoint:
                continue
            values = checkpoint.vector(full)
            _check_shape(checkpoint, full, values, buffer)
            setattr(owner, name, values.to(buffer.dtype))


def _check_shape(checkpoint: StoredCheckpoint, name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    if found.shape != wanted.shape:
        raise ModelLoadError(f"{str(checkpoint.path)!r}: {name!r} is {[*found.shape]}; it must be {[*wanted.shape]}")


def _fill(owner: nn.Module, path: str, checkpoint: StoredCheckpoint, dtype: torch.dtype, division: Division) -> None:
    """Read a module's own parameters, as vectors of norms. Of learned sinks, a rank keeps those of its heads."""
    for name, parameter in list(owner.named_parameters(recurse=False)):
        full = f"{path}.{name}"
        values = checkpoint.vector(full) if parameter.dim() < 2 else checkpoint.matrix(full).dequantized()
        _check_shape(checkpoint, full, values, parameter)
        if name == "sinks":
            values = values[division.sinks(len(values))]
        setattr(owner, name, nn.Parameter(values.to(dtype), requires_grad=False))
