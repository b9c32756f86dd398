"""Random draft checkpoints in public layouts, written from what is published of each layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, VOCABULARY = 48, 4, 2, 12, 64, 96
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
DRAFTED = list(range(0, VOCABULARY, 3))
"""The tokens of a reduced vocabulary."""


class Draw:
    """Draws random tensors. Norms are near one, matrices keep the scale of their inputs."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def norm(self, *size: int) -> Tensor:
        """The weight of a norm."""
        return 1 + 0.2 * torch.randn(size, generator=self._generator)

    def matrix(self, *size: int) -> Tensor:
        """A matrix or a bias."""
        return torch.randn(size, generator=self._generator) * size[-1] ** -0.5

    def layer(
        self, prefix: str, inputs: int = HIDDEN, *, head_norms: bool = False, biases: Sequence[str] = ()
    ) -> Tensors:
        """The matrices of a Llama layer and the norm before its MLP."""
        shapes = {
            "self_attn.q_proj": (HEADS * WIDTH, inputs),
            "self_attn.k_proj": (KV_HEADS * WIDTH, inputs),
            "self_attn.v_proj": (KV_HEADS * WIDTH, inputs),
            "self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        found = {f"{prefix}{name}.weight": self.matrix(*shape) for name, shape in shapes.items()}
        found |= {
            f"{prefix}self_attn.{name}_proj.bias": self.matrix(shapes[f"self_attn.{name}_proj"][0]) for name in biases
        }
        if head_norms:
            found |= {f"{prefix}self_attn.{name}_norm.weight": self.norm(WIDTH) for name in "qk"}
        return found | {f"{prefix}post_attention_layernorm.weight": self.norm(HIDDEN)}


def write(directory: Path, config: Mapping[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    """Write a checkpoint. Files that are no safetensors are written by `torch.save`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: value.contiguous() for name, value in tensors.items()}, directory / file)
    else:
        torch.save(tensors, directory / file)
    return directory


def reduced_vocabulary(draw: Draw, tokens: Sequence[int] = tuple(DRAFTED)) -> Tensors:
    """A head for some tokens, and the maps between their rows and tokens."""
    rows, is_drafted = torch.tensor(tokens), torch.zeros(VOCABULARY, dtype=torch.bool)
    is_drafted[rows] = True
    head = 4 * draw.matrix(len(tokens), HIDDEN)
    return {"lm_head.weight": head, "d2t": rows - torch.arange(len(tokens)), "t2d": is_drafted}


def eagle3(
    first: str = "midlayer.",
    *,
    layers: int = 1,
    taps: int = 3,
    norms: Sequence[str] = (),
    head_norms: bool = False,
    biases: Sequence[str] = (),
    target_size: int = HIDDEN,
) -> Tensors:
    """The tensors of an EAGLE-3 head whose first layer's names begin with `first`; `norms` are of single taps."""
    draw = Draw(5)
    found = {"fc.weight": draw.matrix(HIDDEN, taps * target_size), "norm.weight": draw.norm(HIDDEN)}
    found |= draw.layer(first, 2 * HIDDEN, head_norms=head_norms, biases=biases)
    found |= {f"{first}{name}.weight": draw.norm(HIDDEN) for name in ("hidden_norm", "input_layernorm")}
    for number in range(1, layers):
        found |= draw.layer(f"layers.{number}.", head_norms=head_norms, biases=biases)
        found[f"layers.{number}.input_layernorm.weight"] = draw.norm(HIDDEN)
    found |= {f"{name}.weight": draw.norm(target_size) for name in norms}
    return found | reduced_vocabulary(draw)


def peagle(first: str = "layers.0.", *, layers: int = 2) -> Tensors:
    """The tensors of a P-EAGLE head: EAGLE-3 with learned taps beside mask tokens, and an embedding of its own."""
    draw = Draw(14)
    own = {"mask_hidden": draw.matrix(1, 1, 3 * HIDDEN), "embed_tokens.weight": draw.matrix(VOCABULARY, HIDDEN)}
    return eagle3(first, layers=layers) | own


def speculators_config(**changes: Any) -> dict[str, Any]:
    """The configuration of an EAGLE-3 head as the library `speculators` writes it."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": len(DRAFTED),
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
    } | changes


def eagle1(*, has_bias: bool = True, biases: Sequence[str] = ()) -> Tensors:
    """The tensors of an EAGLE-1 head."""
    draw = Draw(6)
    found = {"fc.weight": draw.matrix(HIDDEN, 2 * HIDDEN)} | draw.layer("layers.0.", biases=biases)
    return found | ({"fc.bias": draw.matrix(HIDDEN)} if has_bias else {})


SLOTS, MASK, RANK = 4, VOCABULARY - 1, 8
"""The block of the drafters here, its mask token, and the rank of their Markov heads."""
QWEN3: dict[str, Any] = LLAMA | {"model_type": "qwen3", "head_dim": WIDTH, "num_hidden_layers": 2}
DFLASH: dict[str, Any] = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "block_size": SLOTS,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]},
}
"""The configuration of DFlash as its authors write it."""
DSPARK: dict[str, Any] = QWEN3 | {
    "architectures": ["Qwen3DSparkModel"],
    "layer_types": ["full_attention", "full_attention"],
    "block_size": SLOTS,
    "num_target_layers": 8,
    "target_layer_ids": [1, 3, 5],
    "mask_token_id": MASK,
    "num_anchors": 512,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
"""The configuration of DSpark as its authors write it."""


def block(*, taps: int = 3, biases: Sequence[str] = (), vocabulary: Sequence[int] | None = None) -> Tensors:
    """The tensors of a DFlash drafter; `vocabulary` are the tokens of a head of its own."""
    draw = Draw(10)
    found = {"fc.weight": draw.matrix(HIDDEN, taps * HIDDEN)}
    found |= {f"{name}.weight": draw.norm(HIDDEN) for name in ("hidden_norm", "norm")}
    for number in range(2):
        found |= draw.layer(f"layers.{number}.", head_norms=True, biases=biases)
        found[f"layers.{number}.input_layernorm.weight"] = draw.norm(HIDDEN)
    return found | ({} if vocabulary is None else reduced_vocabulary(draw, vocabulary))


def spark(
    kind: str = "vanilla",
    *,
    size: int = VOCABULARY,
    taps: int = 3,
    vocabulary: Sequence[int] | None = None,
    confidence: str = "markov",
) -> Tensors:
    """The tensors of a DSpark drafter for a target with `size` tokens. `confidence` is what that head reads."""
    draw, found = Draw(11), block(taps=taps, vocabulary=vocabulary)
    rows = size if vocabulary is None else len(vocabulary)
    found |= {
        "markov_head.markov_w1.weight": 4 * draw.matrix(size, RANK),
        "markov_head.markov_w2.weight": 4 * draw.matrix(rows, RANK),
    }
    inputs, name = (HIDDEN + RANK, "gate_proj") if kind == "gated" else (HIDDEN + 2 * RANK, "joint_proj")
    if kind != "vanilla":
        outputs = RANK if kind == "gated" else 3 * RANK
        found[f"markov_head.{name}.weight"] = draw.matrix(outputs, inputs)
        found[f"markov_head.{name}.bias"] = draw.matrix(outputs)
    if confidence != "none":
        found["confidence_head.proj.weight"] = draw.matrix(1, HIDDEN + (RANK if confidence == "markov" else 0))
        found["confidence_head.proj.bias"] = draw.matrix(1)
    return found


GROUP, WIDTH_OF_KERNELS, RANKED = 8, 3, 6
"""Channels of a group, slots of a kernel and candidates of a slot in the DFlash2 drafters here."""
DFLASH2_KEYS: dict[str, Any] = {
    "conv_kernel_size": WIDTH_OF_KERNELS,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": RANKED,
}
DFLASH2: dict[str, Any] = DFLASH | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": DFLASH["dflash_config"] | DFLASH2_KEYS,
}
"""The configuration of DFlash2 as its authors write it."""


def second(*, size: int = VOCABULARY) -> Tensors:
    """The tensors of a DFlash2 drafter for a target with `size` tokens."""
    draw, found = Draw(15), block()
    for number in range(2):
        for part in ("attention", "mlp"):
            name = f"layers.{number}.{part}_conv"
            found[f"{name}.base_kernel"] = draw.matrix(2, WIDTH_OF_KERNELS, HIDDEN)
            found[f"{name}.kernel_projection.weight"] = draw.matrix(2 * WIDTH_OF_KERNELS * HIDDEN // GROUP, HIDDEN)
    return found | {
        "candidate_selector.predecessor_codebook": 4 * draw.matrix(size, RANK),
        "candidate_selector.successor_codebook": 4 * draw.matrix(size, RANK),
        "candidate_selector.hidden_projection.weight": draw.matrix(RANK, HIDDEN),
    }


def speculators_block(kind: str, **changes: Any) -> dict[str, Any]:
    """The configuration of a block drafter, `dflash`, `dflash2` or `dspark`, as the library `speculators` writes it."""
    heads = {
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    common = {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": speculators_config()["speculators_config"] | {"algorithm": kind},
        "transformer_layer_config": QWEN3,
        "draft_vocab_size": VOCABULARY,
        "block_size": SLOTS,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "sample_from_anchor": kind == "dspark",
    }
    own = {"dspark": heads, "dflash2": DFLASH2_KEYS}
    return common | own.get(kind, {}) | changes


def medusa(prefix: str = "", *, depths: int = 3, blocks: int = 1, has_heads: bool = True) -> Tensors:
    """The tensors of Medusa heads as their authors store them."""
    draw, found = Draw(7), Tensors()
    for depth in range(depths):
        for block in range(blocks):
            found[f"{prefix}{depth}.{block}.linear.weight"] = draw.matrix(HIDDEN, HIDDEN)
            found[f"{prefix}{depth}.{block}.linear.bias"] = draw.matrix(HIDDEN)
        if has_heads:
            found[f"{prefix}{depth}.{blocks}.weight"] = 4 * draw.matrix(VOCABULARY, HIDDEN)
    return found


HYDRA: dict[str, Any] = {
    "hydra_num_heads": 3,
    "hydra_num_layers": 2,
    "hydra_head_arch": "mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "base_model_name_or_path": "tiny",
}
"""The configuration of Hydra heads as their authors write it."""


def hydra(*, depths: int = 3, blocks: int = 2, size: int = VOCABULARY) -> Tensors:
    """The tensors of Hydra heads for a target with `size` tokens."""
    draw, found = Draw(16), Tensors()
    for depth in range(depths):
        name, inputs = f"hydra_mlp.{depth}", (depth + 2) * HIDDEN
        for part in ("0.linear", "0.res_connection", *(f"{block}.linear" for block in range(1, blocks))):
            found[f"{name}.{part}.weight"] = draw.matrix(HIDDEN, inputs if part.startswith("0.") else HIDDEN)
            found[f"{name}.{part}.bias"] = draw.matrix(HIDDEN)
        found[f"hydra_lm_head.{depth}.weight"] = 4 * draw.matrix(size, HIDDEN)
        found[f"hydra_lm_head.{depth}.bias"] = draw.matrix(size)
    return found


def medusa_of_vllm(tokens: Sequence[int] | None, *, depths: int = 3, has_bias: bool = False) -> Tensors:
    """The tensors of Medusa heads as vLLM's converter stored them, with absolute ids of `tokens`."""
    draw, found = Draw(8), Tensors()
    for depth in range(depths):
        found[f"blocks.{depth}.layers.0.weight"] = draw.matrix(HIDDEN, HIDDEN)
        if has_bias:
            found[f"blocks.{depth}.layers.0.bias"] = draw.matrix(HIDDEN)
        found[f"lm_heads.{depth}.weight"] = 4 * draw.matrix(VOCABULARY if tokens is None else len(tokens), HIDDEN)
    return found | ({} if tokens is None else {"token_map": torch.tensor(tokens)})
