"""Llama-like models with random weights in a given shape, where a benchmark needs a size that no packaged model has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from workers.model.stored.source import write_stored_in

_DRAWN_OUTPUTS = 256
"""Outputs of a stored matrix that are drawn; the others repeat them."""


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

    def write_gguf(self, directory: Path) -> None:
        """Write the configuration and a GGUF file that it names into `directory`: Q4_0, embedding and head in Q8_0.

        The values are random and small, and one matrix after another is drawn.
        """
        self.write(directory)
        file = directory / "model.gguf"
        writer, draw = gguf.GGUFWriter(file, "llama"), np.random.default_rng(0)
        writer.add_block_count(self.layers)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        for name, shape, kind in self._tensors():
            stored = gguf.quants.quant_shape_to_byte_shape(shape, kind) if len(shape) > 1 else shape
            size = int(np.prod(stored)) * (1 if len(shape) > 1 else 4)
            types = (np.dtype(np.uint8), kind) if len(shape) > 1 else (np.dtype(np.float32), None)
            writer.add_tensor_info(name, stored, types[0], size, types[1])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, shape, kind in self._tensors():
            if len(shape) == 1:
                writer.write_tensor_data(np.ones(shape, dtype=np.float32))
                continue
            drawn = 0.05 * draw.standard_normal((min(_DRAWN_OUTPUTS, shape[0]), shape[1]), dtype=np.float32)
            rows = gguf.quantize(drawn, kind)
            writer.write_tensor_data(np.resize(rows, (shape[0], rows.shape[1])))
        writer.close()
        write_stored_in(directory, file)

    def gguf_bytes(self, ranks: int) -> int:
        """Bytes of what one of `ranks` ranks keeps of the file of `write_gguf`: the whole embedding and all norms, and
        its part of every other matrix."""
        total = 0
        for name, shape, kind in self._tensors():
            block, size = gguf.GGML_QUANT_SIZES[kind]
            is_whole = len(shape) == 1 or name.startswith("token_embd")
            total += int(np.prod(shape)) // block * size // (1 if is_whole else ranks)
        return total

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
        """Name, shape and type of each tensor of the GGUF file."""
        small, large, plain = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0", "F32"))
        queries, stored = self.heads * self.head, self.kv_heads * self.head
        yield "token_embd.weight", (self.vocabulary, self.hidden), large
        for layer in range(self.layers):
            for name in ("attn_norm", "ffn_norm"):
                yield f"blk.{layer}.{name}.weight", (self.hidden,), plain
            yield f"blk.{layer}.attn_q.weight", (queries, self.hidden), small
            for name in ("attn_k", "attn_v"):
                yield f"blk.{layer}.{name}.weight", (stored, self.hidden), small
            yield f"blk.{layer}.attn_output.weight", (self.hidden, queries), small
            for name in ("ffn_gate", "ffn_up"):
                yield f"blk.{layer}.{name}.weight", (self.intermediate, self.hidden), small
            yield f"blk.{layer}.ffn_down.weight", (self.hidden, self.intermediate), small
        yield "output_norm.weight", (self.hidden,), plain
        if not self.tied:
            yield "output.weight", (self.vocabulary, self.hidden), large

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
