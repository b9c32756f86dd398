"""A tiny target, and what it computes for one text: the references of public drafts read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.support.models import tiny


@dataclass(frozen=True)
class Shown:
    """A target and its hidden states over a text, [tokens, hidden size] each."""

    directory: Path
    states: Sequence[Tensor]
    """Entry i is the input of layer i, and the last one the output of the last layer before the final norm."""
    final: Tensor
    """The last hidden state after the final norm."""
    embedding: Tensor
    head: Tensor


def shown_target(directory: Path, layers: int, tokens: Sequence[int], config: PreTrainedConfig | None = None) -> Shown:
    """Save a model of random weights, a Llama without another configuration, and run it over a text."""
    tiny.save(directory, config or tiny.llama(num_hidden_layers=layers, rope_theta=5e5))
    model = AutoModelForCausalLM.from_pretrained(directory)
    last: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
    with torch.no_grad():
        found = model(torch.tensor([tokens]), output_hidden_states=True)
    *states, final = (one[0] for one in found.hidden_states)
    return Shown(
        directory, [*states, *last], final, model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    )
