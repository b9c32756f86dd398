"""Configurations of public models, and one rank's part of them, made on the fake device without weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig
from transformers.initialization import no_init_weights

from workers.forward.attention import ATTENTION_NAME, register
from workers.forward.loaded_model import LoadedModel
from workers.forward.probe import measure_layers
from workers.forward.replace_linear import replace_linear_layers
from workers.kv.spec import LayerShape

_NARROW = 64
"""Width of hidden states, and number of tokens, of a model that only has the shapes of its layers measured."""
_LLAMA: dict[str, Any] = {
    "vocab_size": 128256,
    "head_dim": 128,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MODELS = {
    "Llama-3.1-8B": LlamaConfig(
        **_LLAMA, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336,
    ),
    "Llama-3.3-70B": LlamaConfig(
        **_LLAMA, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672,
    ),
}  # fmt: skip
"""Configurations as the models' authors publish them."""


def kv_heads(name: str) -> int:
    """The KV heads of a model."""
    config = MODELS[name]
    return config.num_key_value_heads or config.num_attention_heads


@dataclass(frozen=True, slots=True)
class RankModel:
    """A model of which each of some ranks computes a part."""

    name: str
    ranks: int = 1

    def config(self) -> PreTrainedConfig:
        """The configuration of one rank's part: its heads, and its columns of the wide layer and of the head."""
        config = MODELS[self.name]
        return LlamaConfig(
            **_LLAMA | {"vocab_size": -(-config.vocab_size // self.ranks)},
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads // self.ranks,
            num_key_value_heads=kv_heads(self.name) // self.ranks,
            intermediate_size=config.intermediate_size // self.ranks,
        )


def load(model: RankModel, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[LoadedModel, int]:
    """One rank's part on the fake device, and the bytes of the weights that each step reads.

    These are all but the table of embeddings. Call it inside `fake_device`.
    """
    register()
    config = model.config()
    with torch.device(device), no_init_weights():
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    module.eval().requires_grad_(False)
    table = module.get_input_embeddings().weight
    read = sum(one.numel() * one.element_size() for one in module.parameters() if one is not table)
    replace_linear_layers(module)
    loaded = LoadedModel(
        module=module,
        name=model.name,
        layers=_layer_shapes(config),
        hidden_size=config.hidden_size,
        vocabulary_size=MODELS[model.name].vocab_size,
        vocabulary_offset=0,
        max_context_len=config.max_position_embeddings,
        eos_token_ids=(),
        device=device,
        dtype=dtype,
        tensor_parallel=1,  # the all-reduces are counted, not run
    )
    return loaded, read


def _layer_shapes(config: PreTrainedConfig) -> tuple[LayerShape, ...]:
    """Measure the shapes of the layers on a narrow model on the CPU, since fake masks have no values to read."""
    narrow = copy.deepcopy(config)
    narrow.update({"hidden_size": _NARROW, "intermediate_size": _NARROW, "vocab_size": _NARROW})
    with unset_fake_temporarily(), torch.device("cpu"), no_init_weights():
        module = AutoModelForCausalLM.from_config(narrow, attn_implementation=ATTENTION_NAME).eval()
        return measure_layers(module, torch.device("cpu"), config.max_position_embeddings).layers
