"""Forward passes in which attention is not computed: they show the shape of every layer, and whether layers compile."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ModelLoadError
from workers.forward.attention import Probed, bind
from workers.forward.compilation import compile_layers, undo_compile
from workers.forward.runner import WARM_UP_WIDTHS
from workers.kv.spec import LayerShape

logger = logging.getLogger(__name__)


def measure_layers(module: PreTrainedModel, device: torch.device) -> tuple[LayerShape, ...]:
    """The shape of each attention layer, measured in a forward pass, since configurations differ between families."""
    found = _probe(module, device, 1)
    if not found or sorted(found) != list(range(len(found))):
        raise ModelLoadError(
            f"model type {module.config.model_type!r}: its attention layers have no distinct layer_idx"
        )
    return tuple(LayerShape(*found[layer]) for layer in range(len(found)))


def _probe(module: PreTrainedModel, device: torch.device, width: int) -> dict[int, Probed]:
    """Run a forward pass over `width` tokens that records the arguments of attention instead of computing it."""
    paged = bind(module)
    paged.probe = {}
    try:
        with torch.inference_mode():
            module(
                input_ids=torch.zeros((1, width), dtype=torch.long, device=device),
                position_ids=torch.zeros((1, width), dtype=torch.long, device=device),
                use_cache=False,
            )
        return paged.probe
    finally:
        paged.probe = None


def compile_or_warn(module: PreTrainedModel, section: ModelSection, device: torch.device) -> None:
    """Compile the layers. A failure is logged, and with `compile: on` raises `ModelLoadError`."""
    compile_layers(module, section.compile_directory)
    try:
        _probe(module, device, WARM_UP_WIDTHS[0])
    except Exception as error:  # the compiler may raise anything
        if section.compile == "on":
            raise ModelLoadError(f"model type {module.config.model_type!r} cannot be compiled: {error}") from error
        logger.warning("model type %r cannot be compiled and runs uncompiled: %s", module.config.model_type, error)
        undo_compile(module)
