"""Tiny GGUF files with everything that a real one has: a quantized model, its sizes, and a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, Phi3Config, PreTrainedConfig

from tests.support.models import stored_gguf, tiny

KINDS = {"embed_tokens": "Q8_0", "lm_head": "Q8_0", "v_proj": "Q5_1", "up_proj": "Q4_0", "down_proj": "Q8_0"}
_ENDS = ["<|endoftext|>", "<|begin|>"]
_MERGES = ["3 3", "33 3", "\u0120 4", "' '"]
_BYTE_PIECES = [*_ENDS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(one.replace(" ", "") for one in _MERGES)]
_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
_OF_SENTENCEPIECE = ("gemma3", "phi3")
"""Families whose texts are divided as SentencePiece does."""
_NORMAL, _CONTROL = 1, 3
_SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
}
_WITH_BYTES: dict[str, Any] = _SIZES | {"vocab_size": len(_BYTE_PIECES), "pad_token_id": 0, "eos_token_id": 0}
_WITH_PIECES: dict[str, Any] = _SIZES | {"vocab_size": len(_PIECES), "pad_token_id": 0, "eos_token_id": 2}


def _gemma3() -> PreTrainedConfig:
    more = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "tie_word_embeddings": True}
    return Gemma3TextConfig(**_WITH_PIECES | more)


FAMILIES: dict[str, tuple[str, PreTrainedConfig]] = {
    "llama": ("llama", tiny.llama(**_WITH_BYTES, head_dim=32)),
    "llama, tied": ("llama", tiny.llama(**_WITH_BYTES, head_dim=32, tie_word_embeddings=True)),
    "mistral": ("llama", MistralConfig(**_WITH_BYTES, sliding_window=None)),
    "qwen2": ("qwen2", tiny.qwen2(**_WITH_BYTES)),
    "qwen3": ("qwen3", tiny.qwen3(**_WITH_BYTES, head_dim=128)),
    "gemma3": ("gemma3", _gemma3()),
    "phi3": ("phi3", Phi3Config(**_WITH_PIECES)),
}
"""Architecture of the file, and configuration, by name."""


def write(directory: Path, family: str) -> Path:
    """Write a random model of a family to `model.gguf` in a directory. Returns its path."""
    architecture, config = FAMILIES[family]
    source = tiny.save(directory / "source", config, sharpness=2.0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotations: Any = config.rope_parameters
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rotations.get("full_attention", rotations)["rope_theta"]),
        "rope.dimension_count": size,
    }
    if getattr(config, "head_dim", None):
        keys |= {"attention.key_length": size, "attention.value_length": size}
    if getattr(config, "sliding_window", None):
        keys["attention.sliding_window"] = config.sliding_window
    file = directory / "model.gguf"
    stored_gguf.write(model, file, architecture, KINDS, keys=keys | tokenizer_keys(family))
    return file


def divide(file: Path, parts: int) -> list[Path]:
    """Write a file's tensors to so many parts beside it, of which the first has the keys. Returns their paths."""
    reader = gguf.GGUFReader(file)
    each = -(-len(reader.tensors) // parts)
    writer = gguf.GGUFWriter(file, str(reader.fields["general.architecture"].contents()), split_max_tensors=each)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(file.parent.glob(f"{file.stem}-*-of-*.gguf"))


def tokenizer_keys(family: str) -> dict[str, Any]:
    """The keys of a family's vocabulary by their whole names."""
    if family not in _OF_SENTENCEPIECE:
        kinds = [_CONTROL] * len(_ENDS) + [_NORMAL] * (len(_BYTE_PIECES) - len(_ENDS))
        own = {"model": "gpt2", "pre": "smollm", "tokens": _BYTE_PIECES, "token_type": kinds, "merges": _MERGES}
        ends = {"eos_token_id": 0, "bos_token_id": 1}
    else:
        scores = [0.0] * (len(_PIECES) - 1) + [-1.0]
        own = {"model": "llama", "tokens": _PIECES, "token_type": [_NORMAL] * len(_PIECES), "scores": scores}
        ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (own | ends).items()}
