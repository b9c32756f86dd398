"""A draft model whose layers can have several weights in one process: models that share the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ConfigurationError
from workers.forward.loaded_model import LoadedModel
from workers.forward.native.decoder import NativeDecoder
from workers.model.formats.checkpoint import Checkpoint
from workers.model.loading import load_prepared, read_decoder
from workers.model.stored.quantized_checkpoint import quantization_of

TRAINED_BYTES = 2
"""Bytes of a parameter in bfloat16, the type that learned weights are stored in."""


def own_parameters(module: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters of a language model by name, without those of its embedding and its head."""
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    shared = {id(value) for end in ends for value in end.parameters()}
    return {name: value for name, value in module.named_parameters() if id(value) not in shared}


class DecoderCopies:
    """Makes models of one draft's shape for a CPU. They share the embedding; layers are not compiled."""

    def __init__(self, section: ModelSection, target_directory: Path) -> None:
        """Read the draft of `section`. `target_directory` is where a distilled draft reads its embedding and its head.

        Raises as `load_model` does, and `ConfigurationError` for a draft whose files store its layers otherwise than
        its module has them, as quantized ones.
        """
        self._section = section.model_copy(update={"compile": "off"})
        self._files = Checkpoint(Path(section.path), {})
        self._template, self._vocabulary = read_decoder(self._section, target_directory)
        self._dtype = self._template.dtype
        own = own_parameters(self._template)
        stored, is_quantized = self._files.sizes, quantization_of(Path(section.path)) is not None
        for name, value in own.items():
            if is_quantized or stored.get(name) != tuple(value.shape):
                raise ConfigurationError(
                    f"draft.learn: on is refused with draft.model.path: {section.path}, whose files store {name} "
                    "quantized or in another form; it must be a draft with plain weights"
                )
        self._own = frozenset(own)
        self._parameters = sum(value.numel() for value in own.values())
        # The template's own parameters have no values: each copy has its own.
        for name, value in own.items():
            place, _, leaf = name.rpartition(".")
            empty = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
            setattr(self._template.get_submodule(place), leaf, empty)
        # The others are copied: models are made from them when weights are learned, and the files may change till then.
        for tensor in (*self._template.parameters(), *self._template.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.clone()
        self._table: Tensor | None = None

    @property
    def bytes_each(self) -> int:
        """Most memory that the weights of one model take, in bytes: as they were trained, and as it computes.

        Each model has the head in a form of its own. The embedding is not counted.
        """
        head: int = self._template.get_output_embeddings().weight.numel()
        return self._parameters * TRAINED_BYTES + (self._parameters + head) * self._dtype.itemsize

    def stored_weights(self, directory: Path | None = None) -> dict[str, Tensor]:
        """The weights of the draft's files, or of a copy of them in another directory, by name.

        Raises `ModelLoadError`.
        """
        files = self._files if directory is None else Checkpoint(directory, {})
        return files.tensors(self._own)

    def make(self, weights: Mapping[str, Tensor]) -> LoadedModel:
        """A model with these weights, which have the names and shapes of those in the files.

        Other threads may compute meanwhile. Raises `ModelLoadError` and `ConfigurationError`.
        """
        model = load_prepared(self._section, self._template.config, lambda: (self._copied(weights), self._vocabulary))
        if isinstance(model.native, NativeDecoder):
            table = model.native.share_embedding(self._table)
            if self._table is None and table is not None:
                self._table = table
                self._template.get_input_embeddings().weight.data = table
        return model

    def _copied(self, weights: Mapping[str, Tensor]) -> PreTrainedModel:
        """A module with these weights. What is not its own is the template's."""
        memo: dict[int, object] = {id(value): value for value in self._template.parameters() if not value.is_meta}
        module: PreTrainedModel = deepcopy(self._template, memo)
        own = {name: value.to(self._dtype) for name, value in weights.items()}
        module.load_state_dict(own, strict=False, assign=True)
        return module
