"""Memory and arithmetic of a configuration: the target, its parts that draft, drafting models and modules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from transformers import AutoConfig

from cluster.core.config.base import ModuleSection
from cluster.core.config.draft_section import DraftModuleSection
from cluster.core.config.model_section import DTYPE_BYTES, ModelSection
from cluster.core.config.sections import Configuration
from cluster.core.config.target_section import TargetSection
from deploy.bench.measuring.results import Cost, KvLayer
from workers.draft.common.modules.module_settings import ModuleSettings
from workers.draft.common.modules.product import stored_type
from workers.draft.common.modules.ranked_paths import MOST_PARENTS
from workers.draft.common.modules.served_module import computed_type
from workers.draft.early_exit import EarlyExitSettings, default_part, part_of
from workers.forward.weights.choice import INT4
from workers.kv.eight_bits import record_bytes
from workers.kv.spec import LayerShape
from workers.model.devices import choose_device
from workers.model.draft_card import DraftDescription
from workers.model.draft_shapes import BlockShape, EagleShape, ExitShape, HeadsShape, TableShape
from workers.model.formats.registry import read_draft
from workers.model.public_shapes import FeatureShape, HydraShape, MaskedBlockShape, MedusaShape, Sizes
from workers.model.stored.quantized_checkpoint import stored_bytes
from workers.model.weight_counts import (
    count_layers,
    count_matrices,
    count_mtp_layer,
    count_part,
    count_weights,
    tensor_shapes,
)

_WITHOUT_KV = {"conv", "linear_attention", "mamba", "mlp", "moe"}
"""Names that configurations give to layers that store no keys and values."""
_QUANTIZED_BYTES = {"int8": 1, "int4": 5 / 8}
"""Bytes of a weight by `quantization`. Of 4 bits, each group of 32 has a scale and a minimum of 16 bits."""


def configuration_cost(configuration: Configuration, grown_bytes: int = 0) -> Cost:
    """The cost of a configuration whose paths are local directories.

    Raises `ModelLoadError`, and `ConfigurationError` for a module of a wrong kind.
    """
    target = count_weights(Path(configuration.target.path))
    weights = configuration.draft.weights
    draft_bytes = sum(_module_bytes(one, configuration.target) for one in configuration.draft.modules.values())
    flops = count_draft_flops(configuration)
    if weights is not None:
        draft = count_weights(Path(weights.path))
        draft_bytes += _weight_bytes(weights, draft.parameters)
    return Cost(
        target_bytes=_weight_bytes(configuration.target, target.parameters),
        read_bytes=_weight_bytes(configuration.target, target.parameters - target.source_parameters),
        draft_bytes=draft_bytes,
        resident_bytes=max(0, grown_bytes),
        target_flops=2.0 * target.multiply_adds,
        draft_flops=flops.proposed,
        draft_step_flops=flops.step,
        draft_committed_flops=flops.committed,
        kv_layers=kv_layers(Path(configuration.target.path), configuration.target),
    )


def kv_layers(directory: Path, section: TargetSection) -> tuple[KvLayer, ...]:
    """The keys and values of each decoder layer that attends, from the model's `config.json`.

    The sources of an encoder-decoder model, which cross-attention reads, count as its prompts.
    """
    config = AutoConfig.from_pretrained(directory).get_text_config(decoder=True)
    heads = _first(config, "decoder_attention_heads", "num_attention_heads", "num_heads")
    layers = _first(config, "decoder_layers", "num_decoder_layers", "num_hidden_layers")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
    shape = LayerShape(kv_heads, head_dim)
    if (latent := getattr(config, "kv_lora_rank", None)) is not None:
        shape = LayerShape(1, latent + config.qk_rope_head_dim, latent_dim=latent)
    token_bytes = shape.records * shape.kv_heads * shape.head_dim * DTYPE_BYTES[section.dtype]
    if section.kv.dtype != "auto":
        token_bytes = shape.records * record_bytes(shape)
    sliding = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"] * layers
    own = None if section.kv.window is None else section.kv.window + section.kv.sinks
    return tuple(
        KvLayer(token_bytes, sliding if kind == "sliding_attention" else own)
        for kind in kinds
        if kind not in _WITHOUT_KV
    )


def _first(config: Any, *names: str) -> int:
    """The first of some values that the configuration has. The names differ by model family."""
    return next(int(value) for name in names if (value := getattr(config, name, None)) is not None)


def _weight_bytes(section: ModelSection, parameters: int) -> int:
    """Bytes of that many weights. Those that stay as they are stored are all counted: a decoder has no others."""
    if section.quantization == "stored":
        on_gpu = choose_device(section.device, 0).type != "cpu"
        stored = stored_bytes(Path(section.path), section.dtype, on_gpu=on_gpu)
        if stored is not None:
            return stored
    return int(parameters * _QUANTIZED_BYTES.get(section.quantization, DTYPE_BYTES[section.dtype]))


def _module_bytes(section: ModuleSection, target: TargetSection) -> int:
    """Bytes of a drafting module's weights, all in the type of its matrices; see `ModuleSettings.weights`."""
    parameters = count_weights(Path(section.path)).parameters
    if not isinstance(section, ModuleSettings):
        return DTYPE_BYTES[target.dtype] * parameters
    if choose_device(target.device, 0).type != "cpu":
        return parameters * computed_type(section.weights).itemsize
    stored = stored_type(section.weights, target.compile_directory)
    return int(parameters * (_QUANTIZED_BYTES["int4"] if stored is INT4 else stored.itemsize))


_EXIT, _MTP = "early_exit", "mtp"
_OF_CONTEXT = ("fusion.", "contexts.")
"""Weights of a block drafter that compute once for each committed token."""
_PER_DEPTH = ("layers.", "selector.")
"""Weights of a module that compute for each depth of a draft."""


@dataclass(frozen=True, slots=True)
class DraftFlops:
    """Floating-point operations of drafting for one sequence."""

    proposed: float = 0.0
    """For each proposed token, where a pass drafts one: an upper bound for trees, whose leaves take no pass."""
    step: float = 0.0
    """For each draft, where one pass drafts all depths."""
    committed: float = 0.0
    """For each committed token, whose hidden states a module reads."""


def count_draft_flops(configuration: Configuration) -> DraftFlops:
    """The operations of all selected methods. Raises `ModelLoadError`, and `ConfigurationError` for a wrong module."""
    proposed, step, committed = _without_modules(configuration), 0, 0
    for section in configuration.draft.modules.values():
        directory = Path(section.path)
        card = read_draft(directory, section.taps if isinstance(section, DraftModuleSection) else ())
        match card.shape:
            case HeadsShape(depths=depths):
                step += _one_pass(directory, card, depths)
            case BlockShape(block=depths):
                matrices = count_matrices(directory)
                committed += sum(count for name, count in matrices.items() if name.startswith(_OF_CONTEXT))
                step += _one_pass(directory, card, depths)
            case FeatureShape(depths=depths) as shape if depths:
                layers = _matrices(shape.tensors())
                committed += layers
                step += (depths - 1) * layers + depths * _head(card)
            case FeatureShape() as shape:
                proposed += _matrices(shape.tensors()) + _head(card)
            case MedusaShape() as shape:
                step += _matrices(shape.tensors()) + (0 if shape.rows else shape.depths * _head(card))
            case HydraShape() as shape:
                first = {name: size for name, size in shape.tensors().items() if name.startswith("0.")}
                step += _matrices(first) + MOST_PARENTS * (_matrices(shape.tensors()) - _matrices(first))
            case MaskedBlockShape() as shape:
                entered, layers, later = _of_block(shape.tensors())
                committed += entered
                parents = 1 + (shape.depths - 1) * MOST_PARENTS
                step += shape.slots * layers + shape.depths * _head(card) + parents * later
            case EagleShape():
                proposed += count_weights(directory).multiply_adds
            case None:  # the layer of `mtp`, which its own checkpoint describes
                proposed += _matrices(tensor_shapes(directory)) + _head(card)
            case TableShape() | ExitShape():
                pass  # a table looks tokens up; the layers of an exit are the target's
            case unknown:
                assert_never(unknown)
    return DraftFlops(2.0 * proposed, 2.0 * step, 2.0 * committed)


def _without_modules(configuration: Configuration) -> int:
    """Multiply-adds for each proposed token of a draft model, and of methods that draft with parts of the target."""
    found, target = 0, Path(configuration.target.path)
    if (weights := configuration.draft.weights) is not None:
        found += count_weights(Path(weights.path)).multiply_adds
    if _EXIT in configuration.draft.selected("method"):
        part = part_of(configuration.draft.settings(_EXIT, EarlyExitSettings), configuration.target)
        part = part or default_part(count_layers(target))
        found += count_part(target, part.layers, part.skip_attention, part.skip_mlp)
    if _MTP in configuration.draft.selected("method") and _MTP not in configuration.draft.modules:
        found += count_mtp_layer(target)
    return found


def _one_pass(directory: Path, card: DraftDescription, depths: int) -> int:
    """Multiply-adds of a pass that drafts `depths` tokens: the head, layers and selector compute for each of them."""
    matrices = {name: count for name, count in count_matrices(directory).items() if not name.startswith(_OF_CONTEXT)}
    deep = sum(count for name, count in matrices.items() if name.startswith(_PER_DEPTH))
    return sum(matrices.values()) - deep + depths * (deep + _head(card))


def _of_block(sizes: Sizes) -> tuple[int, int, int]:
    """Multiply-adds of a public block drafter: for a committed token, a slot, and heads below a candidate."""
    layers = {name: size for name, size in sizes.items() if name.startswith("layers.")}
    context = {name: size for name, size in layers.items() if ".k_proj." in name or ".v_proj." in name}
    heads = {name: size for name, size in sizes.items() if "_head." in name and not name.endswith("markov_w1.weight")}
    return _matrices(context | {"fc.weight": sizes["fc.weight"]}), _matrices(layers), _matrices(heads)


def _head(card: DraftDescription) -> int:
    return (card.vocabulary_size or card.target_vocabulary_size) * card.hidden_size


def _matrices(sizes: Sizes) -> int:
    return sum(math.prod(size) for size in sizes.values() if len(size) == 2)
