"""Tiny GGUF files in the types of real ones, written without another program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.support.models import tiny
from workers.model.stored.source import write_stored_in

K_QUANTS: dict[str, tuple[int, int | None, float]] = {
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
}
"""First bytes of the float16 scale and minimum in a block of each type, and the mean of its values where it has both.

The package `gguf` reads these types and does not write them.
"""
ROTATED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def convert(
    directory: Path, architecture: str, config: PreTrainedConfig, kinds: Mapping[str, str], default: str = "Q4_1"
) -> tuple[Path, PreTrainedModel]:
    """A random model's directory as the conversion of a GGUF file leaves it, and the model that the file stands for.

    The model has the file's de-quantized weights, in float32. `kinds` and `default` are those of `write`.
    """
    path = tiny.save(directory / "model", config, sharpness=2.0)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    plain = write(reference, directory / "model.gguf", architecture, kinds, default)
    reference.load_state_dict(plain, strict=False)
    if config.tie_word_embeddings:
        reference.tie_weights()
    write_stored_in(path, directory / "model.gguf")
    return path, reference


def write(
    model: PreTrainedModel,
    file: Path,
    architecture: str,
    kinds: Mapping[str, str],
    default: str = "Q4_1",
    *,
    keys: Mapping[str, Any] | None = None,
    without: str = "",
) -> dict[str, torch.Tensor]:
    """Write a model. `kinds`: other types by a word in a matrix's name. Returns the de-quantized parameters.

    Matrices in k-quants are random ones, as large as the model's. `default` is the type of the other matrices.
    `keys` are further ones of the architecture, and those of any model, of the tokenizer, of divided files and of
    tensors by their whole names. Tensors with `without` in their names are left out.
    """
    config = model.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    for key, value in (keys or {}).items():
        is_whole = isinstance(value, torch.Tensor) or key.startswith(("general.", "tokenizer.", "split."))
        add_key(writer, key if is_whole else f"{architecture}.{key}", value)
    plain: dict[str, torch.Tensor] = {}
    draw = np.random.default_rng(0)
    for name, values in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if (stem == "lm_head" and config.tie_word_embeddings) or (without and without in name):
            continue
        weight = values.float()
        if values.dim() == 1:
            plain[name] = weight
            if architecture.startswith("gemma") and "norm" in name:
                weight = weight + 1.0
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", _rotated(weight, name, architecture, config).numpy())
            continue
        wanted = next((own for word, own in kinds.items() if word in name), default)
        quantization = gguf.GGMLQuantizationType[wanted]
        if wanted in K_QUANTS:
            stored = random_k_quant(wanted, weight, draw)
        else:
            stored = gguf.quantize(_rotated(weight, name, architecture, config).numpy(), quantization)
        read = torch.from_numpy(np.array(gguf.dequantize(stored, quantization)))
        plain[name] = _rotated(read, name, architecture, config, back=True)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", stored, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


def random_k_quant(name: str, weight: torch.Tensor, draw: np.random.Generator | None = None) -> np.ndarray:
    """Random bytes of a matrix in a k-quant with the shape of `weight`, and about its deviation."""
    draw = draw or np.random.default_rng(0)
    outputs, inputs = weight.shape
    scale_at, minimum_at, mean = K_QUANTS[name]
    kind = gguf.GGMLQuantizationType[name]
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    raw = draw.integers(0, 256, (outputs, inputs // numbers, size), dtype=np.uint8)

    def put(at: int, values: np.ndarray) -> None:
        raw[..., at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)

    def put_all(scale: np.ndarray) -> np.ndarray:
        put(scale_at, scale)
        if minimum_at is not None:
            put(minimum_at, scale * mean)
        return raw.reshape(outputs, -1)

    scale = draw.uniform(0.5, 1.5, raw.shape[:2])
    spread = gguf.dequantize(put_all(scale), kind).std()
    return put_all(scale * float(weight.std()) / spread)


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key by its whole name, in the type of its value, or a tensor."""
    if isinstance(value, torch.Tensor):
        writer.add_tensor(key, value.float().numpy())
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _rotated(values: torch.Tensor, name: str, architecture: str, config: object, *, back: bool = False) -> torch.Tensor:
    """The order of outputs in files of the architecture llama: both halves of a head alternate."""
    heads = next((getattr(config, field) for word, field in ROTATED.items() if word in name), None)
    if architecture != "llama" or heads is None:
        return values
    halves = (heads, -1, 2) if back else (heads, 2, -1)
    return values.reshape(*halves, *values.shape[1:]).transpose(1, 2).reshape(values.shape).contiguous()
