"""Llama-like models with random weights in a given shape, where a benchmark needs a size that no packaged model has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama-like model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head: int = 128
    tied: bool = False
    """Whether the head has the weights of the embedding."""

    def write(self, directory: Path) -> None:
        """Write the configuration into `directory`, where `load_format: dummy` reads it."""
        self._config().save_pretrained(directory)

    def write_weights(self, directory: Path) -> None:
        """Write the configuration and random float32 weights into `directory`."""
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(self._config(), dtype=torch.float32).save_pretrained(directory)

    def _config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            vocab_size=self.vocabulary,
            max_position_embeddings=16384,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=self.tied,
            architectures=["LlamaForCausalLM"],
        )
