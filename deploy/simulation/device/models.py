"""Configurations of public models, and one rank's part of them, made on the fake device without weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.initialization import no_init_weights

from cluster.core.errors import ConfigurationError
from workers.forward.attention import ATTENTION_NAME, register
from workers.forward.experts import is_mixture
from workers.forward.layer_lists import decoder_layers
from workers.forward.loaded_model import LoadedModel
from workers.forward.probe import MeasuredLayers, measure_layers
from workers.forward.recurrent import bind_recurrent
from workers.forward.replace_linear import replace_linear_layers
from workers.forward.weights.base import Offset
from workers.forward.weights.groups import GroupStorage
from workers.forward.weights.modules import StoredLinear
from workers.kv.spec import LayerShape
from workers.model.latents import attend_over_latents, drop_expansions

_HEADS = ("num_attention_heads", "num_key_value_heads")
_NARROW = 64
"""Width of hidden states, and number of tokens, of a model that only has the shapes of its layers measured."""
_NARROW_SIZES = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), _NARROW) | {
    "moe_intermediate_size": 8,
    "num_local_experts": 16,
}
"""Other sizes of such a model."""
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
_QWEN3: dict[str, Any] = {
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MODELS: dict[str, PreTrainedConfig] = {
    "Llama-3.1-8B": LlamaConfig(
        **_LLAMA, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336,
    ),
    "Llama-3.2-1B": LlamaConfig(
        **_LLAMA | {"head_dim": 64, "tie_word_embeddings": True}, hidden_size=2048, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
    ),
    "Llama-3.3-70B": LlamaConfig(
        **_LLAMA, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672,
    ),
    "Qwen3-8B": Qwen3Config(
        **_QWEN3, vocab_size=151936, hidden_size=4096, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=12288,
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        **_QWEN3, vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True,
    ),
    "gpt-oss-20b": GptOssConfig(
        vocab_size=201088, hidden_size=2880, num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        tie_word_embeddings=False,
    ),
    "DeepSeek-V3": DeepseekV3Config(
        vocab_size=129280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
        intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
        n_shared_experts=1, n_group=8, topk_group=4, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    ),
    "Qwen3-Next-80B-A3B": Qwen3NextConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, intermediate_size=5120, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        max_position_embeddings=262144, rms_norm_eps=1e-6, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Configurations as the models' authors publish them. Weights are in bfloat16."""
_MXFP4 = {"gpt-oss-20b"}
"""Models whose experts are in MXFP4."""
_MXFP4_BYTES = 17 / 32
"""Bytes of a number in MXFP4: 32 of 4 bits share 8 bits."""


def kv_heads(name: str) -> int:
    """The KV heads of a model."""
    config: Any = MODELS[name]
    heads: int = config.num_key_value_heads or config.num_attention_heads
    return heads


def rank_model(name: str, ranks: int, kv_dtype: Literal["auto", "int8", "fp8"] = "auto") -> RankModel:
    """One of so many ranks of a model. Raises `ConfigurationError` that names the option of the command line."""
    if name not in MODELS:
        raise ConfigurationError(f"--model {name}: unknown; it must be one of {', '.join(MODELS)}")
    if ranks < 1 or kv_heads(name) % ranks:
        raise ConfigurationError(f"--ranks {ranks}: refused; it must divide the {kv_heads(name)} KV heads of {name}")
    undivided = {"gpt_oss": "whose experts have biases", "qwen3_next": "whose states are not divided"}
    if ranks > 1 and (reason := undivided.get(MODELS[name].model_type)) is not None:
        raise ConfigurationError(f"--ranks {ranks}: refused; for {name}, {reason}, it must be 1")
    return RankModel(name, ranks, kv_dtype=kv_dtype)


def check_eagle(model: RankModel) -> None:
    """Raise `ConfigurationError` for a model whose rounds with an EAGLE head are not counted."""
    if model.ranks > 1:
        raise ConfigurationError(f"--ranks {model.ranks}: refused; with --draft eagle it must be 1")
    if type(MODELS[model.name]).__name__ not in ("LlamaConfig", "Qwen3Config"):
        raise ConfigurationError(f"--model {model.name}: refused; with --draft eagle its layers must be dense")


@dataclass(frozen=True, slots=True)
class RankModel:
    """A model of which each of some ranks computes a part."""

    name: str
    ranks: int = 1
    group: int | None = None
    """Inputs of a group of the linear layers' weights in 4 bits, as AWQ stores them; `None`: they are plain."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """The type of stored keys and values, as `target.kv.dtype`."""
    layers: int | None = None
    """Only this many of the first layers; `None`: all."""

    def config(self) -> PreTrainedConfig:
        """The configuration of one rank's part: its heads, its columns of wide layers and experts, and of the head."""
        config = copy.deepcopy(MODELS[self.name])
        config.vocab_size = -(-config.vocab_size // self.ranks)
        for name in ("intermediate_size", "moe_intermediate_size", *(_HEADS if self.shares_heads else ())):
            if hasattr(config, name):
                setattr(config, name, getattr(config, name) // self.ranks)
        if self.layers is not None:
            config.num_hidden_layers = self.layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: self.layers]
        return config

    @property
    def all_layers(self) -> int:
        """Layers of the whole model."""
        count: int = MODELS[self.name].num_hidden_layers
        return count

    @property
    def first_layers(self) -> int:
        """Layers before those that repeat: some models have a few dense ones before those with experts."""
        return int(getattr(MODELS[self.name], "first_k_dense_replace", 0))

    @property
    def period(self) -> int:
        """Layers after which the kinds of layers repeat."""
        kinds = list(getattr(MODELS[self.name], "layer_types", None) or ("",) * self.all_layers)
        return next(size for size in range(1, len(kinds) + 1) if kinds[size:] == kinds[:-size])

    @property
    def has_mxfp4(self) -> bool:
        """Whether experts are in MXFP4."""
        return self.name in _MXFP4

    @property
    def expert_bytes(self) -> float:
        """Bytes of a number of an expert."""
        return _MXFP4_BYTES if self.has_mxfp4 else 2

    @property
    def shares_heads(self) -> bool:
        """Whether each rank has its own heads. The plans of `transformers` leave latent attention whole."""
        return not hasattr(MODELS[self.name], "kv_lora_rank")


def load(model: RankModel, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[LoadedModel, int]:
    """One rank's part on the fake device, and the bytes of the weights that each step reads whole.

    These are all but the experts of mixtures, and the table of embeddings unless it is also the head. Call it inside
    `fake_device`.
    """
    register()
    config = model.config()
    with torch.device(device), no_init_weights():
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    module.eval().requires_grad_(False)
    others = set() if config.tie_word_embeddings else {id(module.get_input_embeddings().weight)}
    others |= {id(weight) for part in module.modules() if is_mixture(part) for weight in part.parameters()}
    read = sum(one.numel() * one.element_size() for one in module.parameters() if id(one) not in others)
    if model.group is not None:
        read += _quantize(module, model.group)
    attend_over_latents(module, None)
    drop_expansions(module)
    replace_linear_layers(module)
    measured, narrow = _measure(config, dtype)
    if (recurrent := bind_recurrent(module)) is not None and (known := bind_recurrent(narrow)) is not None:
        recurrent.measure_like(known)
    for name, part in narrow.named_modules():
        if hasattr(part, "kv_layer"):
            module.get_submodule(name).kv_layer = part.kv_layer
    loaded = LoadedModel(
        module=module,
        name=model.name,
        layers=measured.layers,
        states=measured.states,
        decoder_layers=len(list(decoder_layers(module))) if measured.states else 0,
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


def _quantize(module: nn.Module, group: int) -> int:
    """Give all linear layers but the head the storage of AWQ. Returns by how many bytes the weights grow."""
    grown = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or name == "lm_head":
                continue
            (outputs, inputs), own = child.weight.shape, child.weight
            values = torch.empty((outputs, inputs // 2), dtype=torch.uint8, device=own.device)
            scale, zeros = (
                torch.empty((outputs, inputs // group), dtype=torch.float16, device=own.device) for _ in range(2)
            )
            storage = GroupStorage(values, scale, 4, Offset.ZERO, zeros)
            grown += storage.nbytes - own.numel() * own.element_size()
            setattr(parent, name, StoredLinear(storage, child.bias))
    return grown


def _measure(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[MeasuredLayers, PreTrainedModel]:
    """Measure the layers on a narrow model on the CPU, since fake masks have no values to read. Returns both."""
    narrow = copy.deepcopy(config)
    narrow.update({name: size for name, size in _NARROW_SIZES.items() if hasattr(config, name)})
    with unset_fake_temporarily(), torch.device("cpu"), no_init_weights():
        module = AutoModelForCausalLM.from_config(narrow, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()
        measured = measure_layers(module, torch.device("cpu"), config.max_position_embeddings)
    return replace(measured, layers=tuple(_over_latents(shape, config) for shape in measured.layers)), module


def _over_latents(shape: LayerShape, config: Any) -> LayerShape:
    """The shape of a layer whose heads read one latent per token, if the model has such layers."""
    latent = getattr(config, "kv_lora_rank", None)
    if latent is None:
        return shape
    heads, width = config.num_attention_heads, latent + config.qk_rope_head_dim
    return replace(shape, kv_heads=1, head_dim=width, heads_per_kv=heads, latent_dim=latent)
