"""A target whose hidden states are stored: a training on them needs its embedding, its norm and its head alone.

So the process that trains never has the layers of the target in memory but for those that a draft begins as.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cluster.core.errors import ConfigurationError, ModelLoadError, shorten
from workers.distill.answers import Answer
from workers.distill.modules.batches import TapSource
from workers.model.target_ends import named_tensors, read_config


@dataclass(frozen=True, slots=True)
class StoredTarget:
    """Stands for a decoder-only model of `transformers` in a training."""

    parts: PreTrainedModel
    """The model; the layers that are left out have no weights."""
    states: TapSource
    """The residual streams that a draft reads, and after them that of the last layer, before the final norm."""

    @property
    def config(self) -> PreTrainedConfig:
        """The model's configuration."""
        return self.parts.config

    @property
    def width(self) -> int:
        """Values of the taps of one token, taps x hidden size."""
        return self.states.width - int(self.config.hidden_size)

    def get_input_embeddings(self) -> nn.Module:
        """The module with the embedding."""
        return self.parts.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """The module of the head."""
        head: nn.Module = self.parts.get_output_embeddings()
        return head

    def get_decoder(self) -> Any:
        """The module with `layers` and `norm`."""
        return self.parts.get_decoder()


def load_parts(directory: Path, device: torch.device, dtype: torch.dtype, layers: Collection[int]) -> PreTrainedModel:
    """A frozen target on the device without the weights of its decoder layers, but for `layers`.

    The others are on PyTorch's device `meta`. Raises `ModelLoadError` where the files lack a parameter.
    """
    config = read_config(directory)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    left_out = {
        id(value)
        for number, layer in enumerate(model.get_decoder().layers)
        if number not in layers
        for value in layer.parameters()
    }
    if config.tie_word_embeddings:
        left_out.add(id(model.get_output_embeddings().weight))
        left_out.discard(id(model.get_input_embeddings().weight))
    wanted = {name for name, value in model.named_parameters() if id(value) not in left_out}
    found = {name: value.to(device, dtype) for name, value in named_tensors(directory, wanted) if name in wanted}
    if lacks := sorted(wanted - found.keys()):
        raise ModelLoadError(f"model directory {str(directory)!r}: its safetensors lack {shorten(lacks)}")
    model.load_state_dict(found, strict=False, assign=True)
    if config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    frozen: PreTrainedModel = model.eval().requires_grad_(False)
    return frozen


def read_states(target: StoredTarget, answers: Sequence[Answer]) -> tuple[Tensor, Tensor]:
    """The taps [rows, length, taps x hidden size] and last hidden states [rows, length, hidden size] of texts.

    They are padded on the right, and in the type and on the device of the target. Raises `ConfigurationError` where a
    text's are not stored.
    """
    if missing := [answer.key for answer in answers if not target.states.has(answer)]:
        raise ConfigurationError(f"--states: lacks the hidden states of the texts {shorten(missing)}")
    with torch.inference_mode():
        rows = nn.utils.rnn.pad_sequence([target.states.of(answer) for answer in answers], batch_first=True)
        weight = target.get_input_embeddings().get_parameter("weight")
        rows, size = rows.to(weight.device, weight.dtype), weight.shape[1]
        last: Tensor = target.get_decoder().norm(rows[..., -size:])
        return rows[..., :-size], last
