"""The defaults of a drafting module, its shape, its initial weights and the plan of its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.distill.loop import training_plan
from workers.distill.modules.batches import tap_batch
from workers.distill.modules.learner import ModulePlan, TappedModule
from workers.distill.modules.start import copy_layers, fit_context
from workers.distill.options import DistillOptions
from workers.model.draft_card import LAYERS, WEIGHTS, DraftCard
from workers.model.draft_shapes import BlockShape, EagleShape, ExitShape, HeadsShape, LayerShape, Shape, TableShape
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.files import read_trained, stored_tensors
from workers.model.public_shapes import DecoderShape, RopeShape
from workers.model.target_ends import (
    decoder_layer_count,
    decoder_vocabulary_size,
    named_tensors,
    outline,
    read_config,
    read_tensors,
)

CURVE = "training.png"
FOR_ENCODER_DECODER = ("heads", "table")
"""The kinds of modules that serve an encoder-decoder target."""
_VOCABULARY_SIZE = 8192
_DEPTHS = {"heads": 4, "block": 5, "table": 8}
_TRAINED_LAYER_SCALE = 0.2
"""Learning rate of decoder layers that a model has trained, relative to the new parameters."""
_FITTED_ANSWERS = 256
"""Answers that the context of a block drafter is fitted to before it is trained."""


def with_defaults(options: DistillOptions, config: Any, target: Path) -> DistillOptions:
    """The options with the defaults of their kind for the model of this configuration in the directory `target`.

    Raises `ConfigurationError`, and `ModelLoadError` for a draft that cannot be trained further.
    """
    count = decoder_layer_count(config)
    if config.is_encoder_decoder and options.kind not in FOR_ENCODER_DECODER:
        raise ConfigurationError(
            f"--kind: {options.kind!r} is refused for an encoder-decoder target; it must be layers, "
            f"{' or '.join(FOR_ENCODER_DECODER)}"
        )
    size = options.vocabulary_size or min(_VOCABULARY_SIZE, decoder_vocabulary_size(config))
    if options.kind == "exit":
        if options.search:
            return replace(options, taps=(), vocabulary_size=size)
        layers = options.layers or _first_half(config)
        if not all(0 <= layer < count for layer in layers):
            raise ConfigurationError(f"--layers: {list(layers)} is refused; it must be within 0 and {count - 1}")
        is_first = layers == tuple(range(len(layers)))
        return replace(options, layers=layers, taps=(len(layers),) if is_first else (), vocabulary_size=size)
    if options.kind == "table":
        return replace(options, taps=(), vocabulary_size=None)
    if options.start is not None and not options.taps:
        options = replace(options, taps=read_trained(options.start, target).taps)
    taps = options.taps or ((count,) if options.kind == "heads" else (count // 3, 2 * count // 3, count))
    if not all(0 <= tap <= count for tap in taps):
        raise ConfigurationError(f"--taps: {list(taps)} is refused; it must be within 0 and {count}")
    if options.kind == "heads" and len(taps) != 1:
        raise ConfigurationError(f"--taps: {list(taps)} is refused; heads read one hidden state")
    return replace(options, taps=taps, vocabulary_size=size)


def _first_half(config: Any) -> tuple[int, ...]:
    """The layers of an early exit unless others are chosen or searched."""
    return tuple(range(decoder_layer_count(config) // 2))


def wanted_shape(options: DistillOptions, config: Any, target: Path) -> Shape:
    """The shape of the module. Raises `ConfigurationError`."""
    started = None if options.start is None else read_trained(options.start, target)
    if started is not None and started.kind == options.kind and started.shape is not None:
        return started.shape
    depths = options.depths or _DEPTHS.get(options.kind, 1)
    if options.kind == "heads":
        return HeadsShape(depths, options.mix_rank, options.selector_rank)
    if options.kind == "table":
        return TableShape(depths)
    if options.kind == "exit":
        return ExitShape(options.layers or _first_half(config), has_norm=bool(options.taps))
    layer, layers = _layer_shape(options, config, started)
    if options.kind == "block":
        return BlockShape(layer, depths, layers, options.selector_rank)
    return EagleShape(layer, layers)


def _layer_shape(options: DistillOptions, config: Any, started: DraftCard | None) -> tuple[LayerShape, int]:
    """The shape of one layer and the number of layers: those of the draft to start from, or of the target."""
    layers = len(options.layers) or 1
    if options.start is not None and started is not None:
        if isinstance(started.shape, (BlockShape, EagleShape)):
            return started.shape.layer, started.shape.layers
        if started.kind != LAYERS:
            raise ConfigurationError(f"--start {options.start}: a draft of kind {started.kind!r} has no decoder layers")
        config = read_config(options.start)
        layers = int(config.num_hidden_layers)
    return layer_shape(config, options.max_length), layers


def layer_shape(config: Any, window: int) -> LayerShape:
    """The shape of a Llama-like layer of a `transformers` configuration, whose positions attend to `window` ones.

    Raises `ConfigurationError` for a configuration without such layers.
    """
    try:
        heads = int(config.num_attention_heads)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        sizes = int(config.hidden_size), heads, int(getattr(config, "num_key_value_heads", None) or heads), int(width)
        inner = int(config.intermediate_size)
    except AttributeError as error:
        raise ConfigurationError(f"model type {config.model_type!r}: its layers are unlike Llama's: {error}") from None
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    return LayerShape(*sizes, inner, float(theta), float(getattr(config, "rms_norm_eps", 1e-5)), window)


def layers_like(config: Any, layers: int) -> DecoderShape:
    """Llama layers of the target's sizes. Raises `ConfigurationError` for a configuration without such layers."""
    try:
        most = int(config.max_position_embeddings)
    except AttributeError as error:
        raise ConfigurationError(f"model type {config.model_type!r}: its layers are unlike Llama's: {error}") from None
    own = layer_shape(config, most)
    return DecoderShape(
        hidden_size=own.hidden_size,
        heads=own.heads,
        kv_heads=own.kv_heads,
        head_width=own.head_width,
        intermediate_size=own.intermediate_size,
        layers=layers,
        norm_epsilon=own.norm_epsilon,
        rope=RopeShape(own.rope_theta, most_positions=most),
    )


def start_module(tapped: TappedModule, options: DistillOptions, target: Path, answers: Sequence[Answer]) -> str:
    """Give a module its initial weights. Returns what they are, in words; empty for random ones."""
    module, ends, cache = tapped.module, tapped.ends, tapped.cache
    if options.start is not None:
        card = read_trained(options.start, target)
        if card.kind == options.kind:
            module.load_state_dict(stored_tensors(options.start))
            return f"the draft {options.start.name}"
    if not isinstance(module, (BlockDrafter, EagleHead)) or (options.start is None and not options.layers):
        return ""
    if options.start is None:
        words, layers = f"layers {', '.join(map(str, options.layers))} of the target", options.layers
        copied = (*(f"layers.{layer}." for layer in layers), "norm.weight")
        parameters = (name for name in outline(read_config(target)).shapes if any(part in name for part in copied))
        tensors = dict(named_tensors(target, parameters))
    else:
        words, layers = f"the layers of the draft {options.start.name}", tuple(range(module.shape.layers))
        tensors = read_tensors(options.start / WEIGHTS)
    copy_layers(module, tensors, layers)
    if isinstance(module, BlockDrafter):
        chosen = [answer for answer in answers if cache.has(answer)][:_FITTED_ANSWERS]
        groups = [chosen[first : first + 4] for first in range(0, len(chosen), 4)]
        fit_context(module, ends, [tap_batch(group, cache, ends, options.max_length) for group in groups])
    return words


def module_training_plan(options: DistillOptions) -> ModulePlan:
    """The settings of the training of a module."""
    training = training_plan(options)
    paths = max(1, options.batch_tokens // 4) if options.kind in ("heads", "block") else 0
    scale = _TRAINED_LAYER_SCALE if options.start is not None or options.layers else 1.0
    return ModulePlan(training, options.taps, paths=paths, layer_scale=scale, optimizer=options.optimizer)


def checkpoint_of(options: DistillOptions) -> Path:
    """Where the training of a kind keeps its state."""
    return options.work_directory / f"checkpoint-{options.kind}.safetensors"
